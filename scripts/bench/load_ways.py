"""The ways to load and to save that load.py compares. Each function runs on every rank."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from load_checkpoint import (
    Reference,
    check_model,
    expert_views,
    local_region,
    shard_bytes,
    weight_bytes,
    weight_files,
)
from load_ranks import Way
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_FLOOR_CALL_BYTES = 8 * 2**20


def load_ways(folder: Path) -> dict[str, Way]:
    """Ways to load the checkpoint in `folder` into bf16 parameters sharded over all ranks, by
    name.
    """

    def check(model: nn.Module) -> int:
        check_model(model, folder)
        return shard_bytes(model)

    functions: dict[str, Callable[[Path], Any]] = {
        "titanlite": load_titanlite,
        "transformers_sharded": load_transformers_sharded,
        "dcp": load_dcp,
    }
    ways = {name: Way(lambda _, load=load: load(folder), check) for name, load in functions.items()}
    ways["floor"] = Way(lambda _: read_share(folder), lambda memory: memory.nbytes)
    return ways


def save_ways(folder: Path, output: Path) -> dict[str, Way]:
    """Ways to save a sharded model, loaded from `folder` before the clock starts, into `output`, by
    name.
    """

    def prepare(load: Callable[[Path], nn.Module]) -> nn.Module:
        model = load(folder)
        if dist.get_rank() == 0:
            os.sync()  # what earlier runs wrote must not be flushed on this one's time
        return model

    def check(model: nn.Module) -> int:
        check_saved(folder, output)
        return shard_bytes(model)

    pairs: dict[str, tuple[Callable[[Path], nn.Module], Callable[..., nn.Module]]] = {
        "titanlite": (load_titanlite, save_titanlite),
        "transformers_sharded": (load_transformers_sharded, save_transformers),
        "dcp": (load_dcp, save_dcp),
    }
    return {
        name: Way(partial(save, output=output), check, partial(prepare, load))
        for name, (load, save) in pairs.items()
    }


def load_titanlite(folder: Path) -> nn.Module:
    """Meta model, sharded on meta, and every shard read straight into place."""
    from titanlite.checkpoint.hf_model import weights_of
    from titanlite.config import JobConfig
    from titanlite.config.parallelism import Degrees
    from titanlite.distributed import ParallelDims
    from titanlite.distributed.parallelize import parallelize
    from titanlite.materialize import materialize
    from titanlite.models.decoder import build_decoder
    from titanlite.models.families import model_config_from_hf

    config, job = model_config_from_hf(folder), JobConfig()
    job.training.dtype = "bfloat16"
    model = build_decoder(config, torch.bfloat16)
    parallelize(
        model, job, ParallelDims.build(Degrees(dp_shard=dist.get_world_size()), "cpu"), "cpu"
    )
    plan = materialize(model, "cpu", [weights_of(folder, model)])
    object.__setattr__(model, "_bench_plan", plan)  # save_titanlite needs it
    return model


def load_transformers_sharded(folder: Path) -> nn.Module:
    """FSDP2 by transformers itself: each rank reads only its shards."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
    )


def load_dcp(folder: Path) -> nn.Module:
    """DCP, told by hand which views of the local shards are which keys on disk."""
    import torch.distributed.checkpoint as dcp
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    model.to_empty(device="cpu")
    # its buffers are in no checkpoint
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    entries: dict[str, Any] = {}
    for fqn, param in model.named_parameters():
        param = param.detach()
        if ".experts." not in fqn:
            entries[fqn] = param
            continue
        local, starts = local_region(param)
        for row in range(local.shape[0]):
            entries.update(
                (key, view) for key, _, view in expert_views(fqn, local[row], starts[0] + row)
            )
    dcp.load(entries, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return model


def read_share(folder: Path) -> torch.Tensor:
    """Copy this rank's contiguous share of all weight files into fresh memory. No way can do with
    less.
    """
    total, rank, ranks = weight_bytes(folder), dist.get_rank(), dist.get_world_size()
    first, last = total * rank // ranks, total * (rank + 1) // ranks
    memory = torch.empty(last - first, dtype=torch.uint8)
    data, file_start, done = memory.numpy().data, 0, 0
    for path in weight_files(folder):
        size = path.stat().st_size
        position, end = max(first - file_start, 0), min(last - file_start, size)
        file_start += size
        if position >= end:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        while position < end:
            count = min(_FLOOR_CALL_BYTES, end - position)
            count = os.preadv(descriptor, [data[done : done + count]], position)
            position, done = position + count, done + count
        os.close(descriptor)
    assert done == last - first
    return memory


def save_titanlite(model: Any, output: Path) -> nn.Module:
    """Every rank writes its shards in place."""
    from tests.saving import save_hf_model

    save_hf_model(model, model._bench_plan, None, output, torch.bfloat16)
    return model


def save_transformers(model: Any, output: Path) -> nn.Module:
    """`save_pretrained` on every rank; it gathers the model on rank 0, which writes."""
    model.save_pretrained(output)
    return model


def save_dcp(model: nn.Module, output: Path) -> nn.Module:
    """Every rank writes its shards into a file, then rank 0 makes whole tensors of them. Keys are
    the fused ones.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    writer = dcp.HuggingFaceStorageWriter(
        str(output), save_distributed=True, enable_consolidation=True
    )
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    return model


@torch.no_grad()
def check_saved(folder: Path, output: Path) -> None:
    """Compare what was saved with the checkpoint that the model came from, each rank some of the
    tensors.

    Raises:
        ValueError: a tensor differs or is missing.
    """
    before, after = Reference(folder), Reference(output)
    same = sorted(before.keys & after.keys)
    fused = sorted(after.keys - before.keys)
    missing = (
        before.keys - after.keys
        if not fused
        else {key for key in before.keys - after.keys if "expert" not in key}
    )
    if missing:
        raise ValueError(f"{len(missing)} tensors were not saved, among them {min(missing)}")
    for key in [*same, *fused][dist.get_rank() :: dist.get_world_size()]:
        tensor = after.read(key)
        before.compare(key, tensor, [0] * tensor.dim())
