"""The exact part of a plan: every tensor of this rank with placement, source and bytes. Follows from shapes alone.

A real run writes it to `plan.json` in its folder; `python -m titanlite plan` shows it, with what has to be traced.
"""

import json
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.base.files import replace_file
from titanlite.base.log import logger
from titanlite.base.tables import fold_names, format_memory, texts_between_numbers
from titanlite.features.record.planned_reads import PlannedReads
from titanlite.features.record.space import count_moments
from titanlite.materialize import Plan, TensorEntry
from titanlite.materialize.layout import is_elsewhere
from titanlite.materialize.sources import Read

PLAN_FILE = "plan.json"
_STEP_BYTES = 4  # AdamW's count of steps, one float32 per parameter


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor, or tensors that differ only in the numbers of their layers.

    Attributes:
        name: first name, numbers folded: `model.layers.{0-47}.mlp.gate.weight`.
        count: how many tensors.
        shape, dtype: of the values of each, over all ranks; with an encoding its name is the dtype.
        placement: how it is split, mesh axes of one rank left out: `dp_shard 4: shard 0, tp 2: replicate`.
        source: where values come from.
        trained: it gets gradients and optimizer states.
        local_bytes: of all of them on this rank.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    placement: str
    source: str
    trained: bool
    local_bytes: int


@dataclass(frozen=True)
class RunPlan:
    """Exact bytes of one rank, as tensors count them: the padding of uneven shards is not in.

    Attributes:
        weights: of parameters.
        gradients: of those that are trained, once all are there.
        optimizer: its states, once there was a step.
        buffers: of buffers.
        read_bytes: what this rank reads of a checkpoint itself, bytes on disk; optimizer states not counted.
    """

    rank: int
    world_size: int
    tensors: tuple[PlannedTensor, ...]
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    read_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As in `plan.json`."""
        names = ("weights", "gradients", "optimizer", "buffers")
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "memory": {name: getattr(self, name) for name in names},
            "read_bytes": self.read_bytes,
        }


def build_run_plan(plan: Plan, muon: Container[torch.Tensor] = (), *, fold: bool = True) -> RunPlan:
    """Return the figures of this rank. No communication; what lies in files is taken from their headers, read already.

    `muon` are the parameters that Muon steps, and not AdamW, which counts its steps.
    """
    params = [entry for entry in plan.entries if entry.info.kind == "parameter" and not entry.is_elsewhere]
    trained = [entry for entry in params if entry.tensor.requires_grad]
    moments = sum(count_moments(entry.tensor, muon) * entry.local_bytes for entry in trained)
    rank = dist.get_rank()
    return RunPlan(
        rank=rank,
        world_size=dist.get_world_size(),
        tensors=tuple(_group(plan.entries, fold)),
        weights=_bytes_of(params),
        gradients=_bytes_of(trained),
        optimizer=moments + _STEP_BYTES * sum(entry.tensor not in muon for entry in trained),
        buffers=plan.local_bytes - _bytes_of(params),
        read_bytes=PlannedReads(plan).of_rank(rank).read,
    )


def save_run_plan(plan: Plan, muon: Container[torch.Tensor], folder: Path) -> None:
    """Write the plan of rank 0 to `plan.json` in `folder`, and log its sums; on rank 0. No communication.

    It only describes the run, so that a file that cannot be written is a warning.
    """
    if dist.get_rank() != 0:
        return
    run_plan = build_run_plan(plan, muon)
    try:
        replace_file(folder / PLAN_FILE, json.dumps(run_plan.to_json(), indent=1) + "\n")
    except OSError as error:
        logger.warning("cannot write %s: %s.", folder / PLAN_FILE, error.strerror or error)
    sizes = (run_plan.weights, run_plan.gradients, run_plan.optimizer, run_plan.read_bytes)
    logger.info(
        "plan: rank 0 holds weights %s, gradients %s, optimizer states %s; reads %s of a checkpoint",
        *map(format_memory, sizes),
    )


def _bytes_of(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.local_bytes for entry in entries)


def _group(entries: Iterable[TensorEntry], fold: bool) -> Iterable[PlannedTensor]:
    groups: defaultdict[Any, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        name = texts_between_numbers(entry.fqn) if fold else entry.fqn
        alike = (entry.info.shape, entry.form, describe_placement(entry.tensor), _describe_source(entry))
        groups[name, alike, entry.tensor.requires_grad].append(entry)
    for (_, (shape, form, placement, source), trained), held in groups.items():
        name = fold_names([entry.fqn for entry in held])
        yield PlannedTensor(name, len(held), shape, form, placement, source, trained, _bytes_of(held))


def describe_placement(tensor: torch.Tensor) -> str:
    """Mesh axes with more than one rank, and what each does to the tensor."""
    if is_elsewhere(tensor):
        return "other stages"
    if not isinstance(tensor, DTensor):
        return "replicate"
    names = tensor.device_mesh.mesh_dim_names or ()
    parts = []
    for name, size, placement in zip(names, tensor.device_mesh.shape, tensor.placements, strict=True):
        if size > 1:
            dim = getattr(placement, "dim", None)
            parts.append(f"{name} {size}: {'replicate' if dim is None else f'shard {dim}'}")
    return ", ".join(parts) or "whole"


def _describe_source(entry: TensorEntry) -> str:
    """Describe the source; of a checkpoint without the key, which is the tensor's name or follows from it."""
    source = entry.source
    return f"checkpoint {source.reader.name}" if isinstance(source, Read) else str(source)
