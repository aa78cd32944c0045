"""The MoE layers and training steps that moe_cpu.py compares, and the forked ranks that they run on."""

import copy
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_SETTINGS: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "use_cache": False,
    "output_router_logits": False,
    # Explicit, so that nothing warns about them.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SEQ_LEN = 512
LAYER_TOKENS = 2048
_LEARNING_RATE, _WEIGHT_DECAY, _BETAS, _MAX_NORM = 3e-4, 0.1, (0.9, 0.95), 1.0
_TIMEOUT_S = 900


class Mismatch(Exception):  # noqa: N818 - what is compared does not agree, so no number is worth printing
    """Two ways do not compute the same."""


def build_layers() -> tuple[dict[str, nn.Module], torch.Tensor, torch.Tensor]:
    """The MoE layer by way, all with the same weights; its input and the gradient of its output, (1, T, D)."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from titanlite.features.cpu import install_kernels
    from titanlite.models.families import families
    from titanlite.models.moe import MoE

    install_kernels()

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**_SETTINGS)
    ways: dict[str, nn.Module] = {"titanlite": MoE(families()["qwen3_moe"].from_hf(config.to_dict(), "bench"))}
    for name in ("grouped_mm", "eager"):
        config = copy.deepcopy(config)
        config._experts_implementation = name
        ways[name] = Qwen3MoeSparseMoeBlock(config)
    for param in ways["eager"].parameters():
        nn.init.normal_(param, std=0.02)
    for layer in ways.values():
        layer.load_state_dict(ways["eager"].state_dict(), strict=False)
        missing = layer.state_dict().keys() - ways["eager"].state_dict().keys() - {"gate.expert_bias"}
        assert not missing, missing
    ways["titanlite"].gate.expert_bias.zero_()  # Qwen3-MoE has none
    shape = (1, LAYER_TOKENS, _SETTINGS["hidden_size"])
    return ways, torch.randn(shape, requires_grad=True), torch.randn(shape)


def make_checkpoint(folder: Path) -> None:
    """Save transformers' model with random float32 weights in `folder`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SETTINGS)).to(torch.float32).save_pretrained(folder)


def make_tokens(step: int, sequences: int) -> torch.Tensor:
    """This rank's tokens of a step, (B, S): a token occurs as 1 / rank, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    weights = 1.0 / torch.arange(1, _SETTINGS["vocab_size"] + 1)
    return torch.multinomial(weights, sequences * SEQ_LEN, replacement=True, generator=generator).view(-1, SEQ_LEN)


def build_titanlite(
    folder: Path, *, packed: bool = False, expert_parallel: bool = False, onednn: bool = True
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`TrainStep` on a model sharded on meta and read from `folder`; float32 products by MKL unless `onednn`."""
    from titanlite.checkpoint.hf_model import hf_checkpoint
    from titanlite.config import JobConfig
    from titanlite.config.parallelism import Degrees
    from titanlite.data.dataset import IGNORE_INDEX, Batch
    from titanlite.distributed import ParallelDims
    from titanlite.distributed.parallelize import parallelize
    from titanlite.features.cpu import install
    from titanlite.materialize import materialize
    from titanlite.models.decoder import build_decoder
    from titanlite.models.families import model_config_from_hf
    from titanlite.objective import NextToken
    from titanlite.optim.optimizer import build_optimizer
    from titanlite.train_step import Schedule, TrainStep

    install(torch.device("cpu"))
    torch.backends.mkldnn.enabled = onednn
    job, config, device, ranks = JobConfig(), model_config_from_hf(folder), torch.device("cpu"), dist.get_world_size()
    job.optimizer.lr, job.optimizer.weight_decay = _LEARNING_RATE, _WEIGHT_DECAY
    job.optimizer.beta1, job.optimizer.beta2 = _BETAS
    job.lr_scheduler.warmup_steps, job.lr_scheduler.min_lr_factor = 0, 1.0
    job.training.max_norm = _MAX_NORM
    job.activation_checkpoint.mode = "none"
    if expert_parallel:
        job.parallelism.fsdp_reshard_after_forward = "never"
    dims = ParallelDims.build(Degrees(dp_shard=ranks, ep=ranks if expert_parallel else 1), "cpu")
    model = build_decoder(config)
    model.configure("sdpa", job.moe, job.training.loss_chunk_tokens, device)
    parallelize(model, job, dims, "cpu")
    materialize(model, device, [hf_checkpoint(folder, config)])
    trainer = TrainStep(job, dims, device, model, build_optimizer(model, job.optimizer), NextToken(), Schedule())

    def step(tokens: torch.Tensor) -> torch.Tensor:
        labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
        positions = torch.arange(SEQ_LEN).expand_as(tokens) if packed else None
        documents = torch.zeros_like(tokens) if packed else None
        return trainer.train_step([Batch(tokens, labels, positions, documents)]).loss

    return step


def build_fsdp2(folder: Path, *, sharded: bool, keep_memory: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """The usual loop on transformers' model, sharded by transformers or by hand; optionally with titanlite's setting
    for the C library's allocator.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from titanlite.features.cpu import keep_freed_memory

    if keep_memory:
        keep_freed_memory()
    ranks = dist.get_world_size()
    options: dict[str, Any] = {"distributed_config": DistributedConfig(fsdp_size=ranks)} if sharded else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm", **options
    )
    if not sharded:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.train()
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_LEARNING_RATE, betas=_BETAS, eps=1e-8, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# In this order in the tables. "fsdp2" is what losses are compared with.
STEP_WAYS: Mapping[str, Callable[[Path], Callable[[torch.Tensor], torch.Tensor]]] = {
    "titanlite": partial(build_titanlite, expert_parallel=True),
    "titanlite_mkl": partial(build_titanlite, expert_parallel=True, onednn=False),
    "titanlite_fsdp": build_titanlite,
    "titanlite_fsdp_packed": partial(build_titanlite, packed=True),
    "fsdp2": partial(build_fsdp2, sharded=False),
    "fsdp2_keep": partial(build_fsdp2, sharded=False, keep_memory=True),
    "transformers_sharded": partial(build_fsdp2, sharded=True),
}


class Team:
    """Forked ranks that join one gloo group, build something, and wait for orders.

        with Team(4, build) as team:
            results = team.do(7)  # what `build()(7)` returned on each rank

    Raises:
        Mismatch: `build`, or what it returned, did so on some rank.
        RuntimeError: a rank failed, or did not answer in time. The ranks end with the context.
    """

    def __init__(self, ranks: int, build: Callable[[], Callable[[int], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        sys.stdout.flush()
        self._folder = tempfile.TemporaryDirectory(prefix="titanlite-bench-ranks-")
        self._processes, self._pipes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            self._processes.append(
                context.Process(target=serve, args=(rank, ranks, self._folder.name, there, build), daemon=True)
            )
            self._processes[-1].start()
            there.close()
            self._pipes.append(here)

    def __enter__(self) -> "Team":
        try:
            self._answers()  # all have built
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def do(self, number: int) -> list[Any]:
        """Give the order `number` to all ranks; what each returned."""
        for pipe in self._pipes:
            pipe.send(number)
        return self._answers()

    def _answers(self) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + _TIMEOUT_S
        while len(results) < len(self._pipes):
            for pipe in wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in results], timeout=1):
                rank = self._pipes.index(pipe)
                try:
                    kind, payload = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise RuntimeError(f"rank {rank} died") from None
                if kind != "result":
                    raise (Mismatch if kind == "mismatch" else RuntimeError)(payload)
                results[rank] = payload
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer after {_TIMEOUT_S} s")
        return [results[rank] for rank in range(len(self._pipes))]


def run_alone(function: Callable[[], Any]) -> Any:
    """What `function` returned in a forked process of its own, a group of one rank."""
    with Team(1, lambda: lambda number: function()) as team:
        return team.do(0)[0]


def serve(rank: int, ranks: int, folder: str, pipe: Any, build: Callable[[], Callable[[int], Any]]) -> None:
    """Body of a forked rank of a team."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
        do, message = build(), ("result", None)
        while True:
            pipe.send_bytes(pickle.dumps(message))
            message = ("result", do(pipe.recv()))
    except EOFError:  # nobody gives orders any more
        os._exit(0)
    except Mismatch as error:
        message = ("mismatch", str(error))
    except BaseException:  # noqa: BLE001 - everything goes to the parent, which reports it
        message = ("error", traceback.format_exc())
    pipe.send_bytes(pickle.dumps(message))
    os._exit(1)  # no teardown of what the parent imported
