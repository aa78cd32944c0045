#!/usr/bin/env python
"""Compare the CPU seconds of a training step with the usual loop on transformers' model, in
float32.

    python scripts/bench/step_cpu.py

Three comparisons, on a Qwen3-MoE or Qwen3-Next with 16 experts, 4 per token, whose weights both ways
read from one checkpoint:

one process   4 layers, hidden size 128 with 4 x 256 tokens and 384 with 2 x 256; the usual loop
documents     one process, the same documents: titanlite packs them into its rows, and the loop has one
              per row, as long as the longest
four ranks    8 layers, hidden size 256, 1 x 512 tokens per rank; the loop's model is sharded by FSDP2

The loop is forward, backward, `clip_grad_norm_` and fused AdamW, with grouped_mm experts.
titanlite's step is the trainer's, on four ranks with the experts split over the ranks. Both have
one document per row but where the name says otherwise, no router loss and no recomputation. Each way has processes of its own, with
one thread each; the ways take turns, step by step, so that a machine that becomes slower does so
for both. Every step's losses are compared.

CPU s   user and system time of all threads of all ranks, per step: median after two steps of warm-up
ratio   the loop's CPU s over titanlite's in the same turn: median, and the middle half
"""  # noqa: E501

import argparse
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

# Before torch is imported: one thread per rank, as run_train.sh sets it, and no network.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from cluster import Forked
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from titanlite.base.process import keep_freed_memory
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config import JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import IGNORE_INDEX, Batch
from titanlite.distributed import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import model_config_from_hf
from titanlite.objective import NextToken
from titanlite.optim.optimizer import build_adamw
from titanlite.run import Run
from titanlite.train_step import TrainStep

_LEARNING_RATE, _WEIGHT_DECAY, _BETAS, _MAX_NORM = 3e-4, 0.1, (0.9, 0.95), 1.0
_LOSS_TOLERANCE = 1e-5  # relative; seen: 3e-7
_WARM_UP = 2  # steps

Documents = list[torch.Tensor]  # tokens of each
Step = Callable[[Documents], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its batches, for a number of ranks.

    With `rows`, the lengths of the documents of each of titanlite's rows, the loop has a row for
    each document.
    """

    ranks: int
    vocab_size: int
    hidden_size: int
    expert_size: int
    layers: int
    sequences: int
    seq_len: int
    family: str = "qwen3_moe"
    rows: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        ranks = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        size = f"{self.sequences} x {self.seq_len} tokens, hidden size {self.hidden_size}"
        name = "Qwen3-Next, " if self.family == "qwen3_next" else ""
        if not self.rows:
            return f"{name}{ranks}, {size}"
        fill = sum(map(sum, self.rows)) / (self.sequences * self.seq_len)
        count = sum(map(len, self.rows))
        return f"{name}{ranks}, {size}, {count} documents, fill {fill:.0%}"

    def to_config(self) -> PreTrainedConfig:
        delta = {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "shared_expert_intermediate_size": self.expert_size,
        }
        return AutoConfig.for_model(
            self.family,
            **(delta if self.family == "qwen3_next" else {}),
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            moe_intermediate_size=self.expert_size,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            num_experts=16,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            max_position_embeddings=4096,
            use_cache=False,
            output_router_logits=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def make_documents(self, step: int, rank: int) -> Documents:
        """Make a rank's documents of a step: a token occurs as 1 / its id, so that there is
        something to learn.
        """
        generator = torch.Generator().manual_seed(1000 * step + rank)
        weights = 1.0 / torch.arange(1, self.vocab_size + 1)
        lengths = [n for row in self.rows for n in row] or [self.seq_len] * self.sequences
        tokens = torch.multinomial(weights, sum(lengths), True, generator=generator)
        return list(tokens.split(lengths))

    def pack(self, documents: Documents) -> Batch:
        """Put documents into titanlite's rows."""
        if not self.rows:
            tokens = torch.stack(documents)
            labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
            return Batch(tokens, labels, None, None)
        shape = self.sequences, self.seq_len
        tokens, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        labels = torch.full(shape, IGNORE_INDEX)
        numbers = torch.full(shape, -1)
        left = iter(documents)
        for row, lengths in enumerate(self.rows):
            start = 0
            for number, length in enumerate(lengths):
                document = next(left)
                here = slice(start, start + length)
                tokens[row, here], positions[row, here] = document, torch.arange(length)
                labels[row, start : start + length - 1] = document[1:]
                numbers[row, here] = number
                start += length
        return Batch(tokens, labels, positions, numbers)


_SMALL = Case(
    ranks=1, vocab_size=1024, hidden_size=128, expert_size=64, layers=4, sequences=4, seq_len=256
)
_NEXT = replace(_SMALL, family="qwen3_next")
CASES = (
    _SMALL,
    replace(_SMALL, hidden_size=384, expert_size=192, sequences=2),
    _NEXT,
    replace(_NEXT, hidden_size=384, expert_size=192, sequences=2),
    replace(_NEXT, rows=((150, 80), (105, 70, 55), (201, 30), (130, 100))),
    Case(
        ranks=4,
        vocab_size=8192,
        hidden_size=256,
        expert_size=256,
        layers=8,
        sequences=1,
        seq_len=512,
    ),
)


def build_titanlite(folder: Path, case: Case) -> Step:
    """Build the trainer's step, of a model that is sharded on meta and read from `folder`."""
    keep_freed_memory()
    ranks, job = case.ranks, JobConfig()
    job.optimizer.lr, job.optimizer.weight_decay = _LEARNING_RATE, _WEIGHT_DECAY
    job.optimizer.beta1, job.optimizer.beta2 = _BETAS
    job.lr_scheduler.warmup_steps, job.lr_scheduler.min_lr_factor = 0, 1.0
    job.training.max_norm = _MAX_NORM
    job.activation_checkpoint.mode = "none"
    if ranks > 1:
        job.parallelism.fsdp_reshard_after_forward = "never"
    config, device = model_config_from_hf(folder), torch.device("cpu")
    dims = ParallelDims.build(Degrees(dp_shard=ranks, ep=ranks), "cpu")
    model = build_decoder(config)
    model.configure("sdpa", job.moe, job.training.loss_chunk_tokens, device)
    parallelize(model, job, dims, "cpu")
    materialize(model, device, [weights_of(folder, model)])
    optimizer = build_adamw(model, job.optimizer)
    trainer = TrainStep(Run(job, config, dims, device), model, optimizer, NextToken())

    def step(documents: Documents) -> torch.Tensor:
        return trainer.train_step([case.pack(documents)]).loss

    return step


def build_loop(folder: Path, case: Case) -> Step:
    """Build the usual loop on transformers' model; on several ranks FSDP2 shards each layer and the
    rest.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    if case.ranks > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    model.train()
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": _WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=_LEARNING_RATE, betas=_BETAS, fused=True)

    def step(documents: Documents) -> torch.Tensor:
        tokens = nn.utils.rnn.pad_sequence(documents, batch_first=True)
        labels = nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=IGNORE_INDEX)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


WAYS: dict[str, Callable[[Path, Case], Step]] = {
    "titanlite": build_titanlite,
    "transformers": build_loop,
}


def serve(case: Case, build: Callable[[Path, Case], Step], folder: Path, pipe: Connection) -> None:
    """Run one rank of a way: make each step that is asked for; send its CPU seconds and loss."""
    step = build(folder, case)
    while True:
        number = pipe.recv()
        documents = case.make_documents(number, dist.get_rank())
        dist.barrier()
        before_s = time.process_time()
        loss = step(documents)
        cpu_s = time.process_time() - before_s
        pipe.send((cpu_s, loss.item()))


def run_step(team: Forked, number: int) -> tuple[float, float]:
    """Make step `number`; return the CPU seconds of all ranks and the mean of their losses.

    Raises RuntimeError: a rank failed.
    """
    for pipe in team.pipes:
        with suppress(OSError):  # the rank died, and reading reports this
            pipe.send(number)
    answers = team.receive(600)
    for kind, text in answers:
        if kind == "error":
            raise RuntimeError(text)
    return sum(cpu_s for cpu_s, _ in answers), statistics.fmean(loss for _, loss in answers)


def compare(case: Case, steps: int) -> str:
    """Measure both ways of one case in turns; return the result as rows of a table.

    Raises ValueError: losses differ.
    """
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="titanlite-bench-") as path, ExitStack() as stack:
        folder = Path(path)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(case.to_config(), dtype=torch.float32)
        model.save_pretrained(folder)
        teams = {}
        for name, build in WAYS.items():
            teams[name] = Forked(case.ranks, partial(serve, case, build, folder))
            stack.callback(teams[name].end)
        for number in range(_WARM_UP + steps):
            names = list(WAYS) if number % 2 else list(WAYS)[::-1]
            losses = {}
            for name in names:
                cpu_s, losses[name] = run_step(teams[name], number)
                if number >= _WARM_UP:
                    seconds[name].append(cpu_s)
            ours, theirs = losses["titanlite"], losses["transformers"]
            if abs(ours - theirs) > _LOSS_TOLERANCE * theirs:
                raise ValueError(
                    f"{case}: in step {number} titanlite's loss is {ours:.7f}, transformers' "
                    f"{theirs:.7f}."
                )
    ratios = [
        theirs / ours
        for ours, theirs in zip(seconds["titanlite"], seconds["transformers"], strict=True)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    ours, theirs = (statistics.median(seconds[name]) for name in WAYS)
    return f"| {case} | {ours:.3f} | {theirs:.3f} | {middle:.2f} | {low:.2f} - {high:.2f} |"


def describe() -> str:
    """Describe the machine and the versions in one line."""
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{cpu[1] if cpu else '?'}, {len(os.sched_getaffinity(0))} cores, {capability}; python "
        f"{platform.python_version()}, {versions}"
    )


def main() -> None:
    """Print a table of what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="of each way and case (default 20)")
    parser.add_argument("--ranks", type=int, choices=(1, 4), help="only the cases of so many ranks")
    families = sorted({case.family for case in CASES})
    parser.add_argument("--family", choices=families, help="only the cases of this family")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    # before any parallel region: forked processes inherit no pool of threads
    torch.set_num_threads(1)
    print(
        "| | titanlite, CPU s | transformers, CPU s | ratio | middle half |\n|---|---|---|---|---|"
    )
    for case in CASES:
        of_family = arguments.family in (None, case.family)
        if of_family and arguments.ranks in (None, case.ranks):
            print(compare(case, arguments.steps), flush=True)
    print("\n" + describe())


if __name__ == "__main__":
    main()
