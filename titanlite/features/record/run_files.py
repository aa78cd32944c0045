"""Files that describe a run, in its folder: its environment (environment.json), every tensor of a rank with placement,
source and bytes (plan.json); and the disk space of its checkpoints.
"""

import json
import math
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.base.agree import gather_objects
from titanlite.base.files import replace_file
from titanlite.base.log import logger
from titanlite.base.text import fold_key, fold_names, format_memory, format_size
from titanlite.checkpoint.commit import list_steps
from titanlite.checkpoint.description import describe_versions
from titanlite.config import JobConfig
from titanlite.materialize import Plan, Read, TensorEntry, share_out
from titanlite.materialize.layout import is_elsewhere
from titanlite.models.interface import is_adapter

ENVIRONMENT_FILE, PLAN_FILE = "environment.json", "plan.json"
_GIT_TIMEOUT_S = 5.0


def save_environment(folder: Path, device: torch.device, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write `environment.json` into the run's folder, on rank 0; a resumed run overwrites it. A full disk is a warning.

    Returns what is in it, `facts` that only the caller knows included; on other ranks nothing.

    Collectives: one all-gather of small objects over the default process group; every rank must call.
    """
    here = (socket.gethostname(), _describe_device(device))
    ranks = gather_objects(here)
    if dist.get_rank() > 0:
        return {}
    machines: dict[str, dict[str, Any]] = {}
    for rank, (host, name) in enumerate(ranks):
        machine = machines.setdefault(host, {"ranks": [], "devices": {}})
        machine["ranks"].append(rank)
        machine["devices"][name] = machine["devices"].get(name, 0) + 1
    found = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": shlex.join(sys.argv),
        "commit": _describe_commit(Path(__file__).parents[3]),
        "world_size": len(ranks),
        **facts,
        "versions": {"python": platform.python_version(), **describe_versions(), "cuda": torch.version.cuda},
        "platform": platform.platform(),
        "processor": f"{_describe_processor()}, {os.cpu_count()} logical cores",
        "machines": machines,
    }
    write_json(folder / ENVIRONMENT_FILE, found)
    return found


def _describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def _describe_commit(root: Path) -> str | None:
    """Return the commit of the checkout that this package runs from, followed by + if files differ; None without."""
    try:
        shown = _git(root, "rev-parse", "--show-toplevel")
        if Path(shown).resolve() != root.resolve():  # installed somewhere inside of another project's checkout
            return None
        return _git(root, "rev-parse", "HEAD") + ("+" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S
    )
    return done.stdout.strip()


def _describe_processor() -> str:
    """Return the processor's model name, which `platform.processor` does not know on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


_STEP_BYTES = 4  # AdamW's count of steps, one float32 per parameter


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor, or `count` tensors that differ only in the numbers of their layers."""

    name: str  # the first name, numbers folded: `model.layers.{0-47}.mlp.gate.weight`
    count: int
    shape: tuple[int, ...]  # of the values of each, over all ranks
    dtype: str  # likewise; or the name of their encoding
    placement: str  # mesh axes of one rank left out: `dp_shard 4: shard 0, tp 2: replicate`
    source: str
    trained: bool
    local_bytes: int  # of all of them on this rank


@dataclass(frozen=True)
class RunPlan:
    """Exact bytes of one rank, as tensors count them: the padding of uneven shards is not in."""

    rank: int
    world_size: int
    tensors: tuple[PlannedTensor, ...]
    weights: int
    gradients: int  # of the weights that are trained, once all are there
    optimizer: int  # its states, once there was a step
    buffers: int
    read_bytes: int  # of a checkpoint, by this rank itself, as they are on disk; optimizer states not counted

    def to_json(self) -> dict[str, Any]:
        names = ("weights", "gradients", "optimizer", "buffers")
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "memory": {name: getattr(self, name) for name in names},
            "read_bytes": self.read_bytes,
        }


def build_run_plan(plan: Plan, muon: Container[torch.Tensor] = ()) -> RunPlan:
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
        tensors=tuple(_group(plan.entries)),
        weights=_bytes_of(params),
        gradients=_bytes_of(trained),
        optimizer=moments + _STEP_BYTES * sum(entry.tensor not in muon for entry in trained),
        buffers=plan.local_bytes - _bytes_of(params),
        read_bytes=count_reads(plan, [rank])[0].read,
    )


class RankReads(NamedTuple):
    """Bytes of one rank as they are on disk."""

    held: int  # what its shards are made of
    read: int  # the part of it that this rank reads itself; the rest comes from ranks that hold the same
    files: frozenset[Path]  # that it reads from


def count_reads(plan: Plan, ranks: Iterable[int]) -> list[RankReads]:
    """Return what each of the global `ranks`, of the plan's stage, will hold and read of a checkpoint.

    Replicas share the reads as in `materialize`. A reader without `plan_bytes` (bytes by file), such as that of
    adapters in memory, counts nothing.
    """
    reads = [(entry.tensor, entry.source) for entry in plan.entries if isinstance(entry.source, Read)]
    shares = list(share_out((tensor for tensor, _ in reads), plan.group))
    found = []
    for rank in ranks:
        held = read = 0
        files = set[Path]()
        for share, (_, source) in zip(shares, reads, strict=True):
            region, in_charge = share.place_of(rank)
            if (plan_bytes := getattr(source.reader, "plan_bytes", None)) is None:
                continue
            needed: Mapping[Path, int] = plan_bytes(source.name, region)
            held += sum(needed.values())
            if in_charge:
                read += sum(needed.values())
                files.update(needed)
        found.append(RankReads(held, read, frozenset(files)))
    return found


def save_run_plan(plan: Plan, muon: Container[torch.Tensor], folder: Path) -> None:
    """Write the plan of rank 0 to `plan.json` in `folder`, and log its sums; on rank 0. No communication."""
    if dist.get_rank() != 0:
        return
    run_plan = build_run_plan(plan, muon)
    write_json(folder / PLAN_FILE, run_plan.to_json())
    sizes = (run_plan.weights, run_plan.gradients, run_plan.optimizer, run_plan.read_bytes)
    logger.info(
        "plan: rank 0 holds weights %s, gradients %s, optimizer states %s; reads %s of a checkpoint",
        *map(format_memory, sizes),
    )


def _bytes_of(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.local_bytes for entry in entries)


def _group(entries: Iterable[TensorEntry]) -> Iterable[PlannedTensor]:
    groups: defaultdict[Any, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        name = fold_key(entry.fqn)
        alike = (entry.info.shape, entry.form, describe_placement(entry.tensor), _describe_source(entry))
        groups[name, alike, entry.tensor.requires_grad].append(entry)
    for (_, (shape, form, placement, source), trained), held in groups.items():
        name = fold_names([entry.fqn for entry in held])
        yield PlannedTensor(name, len(held), shape, form, placement, source, trained, _bytes_of(held))


def describe_placement(tensor: torch.Tensor) -> str:
    """Return mesh axes with more than one rank, and what each does to the tensor."""
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


def count_moments(param: torch.Tensor, muon: Container[torch.Tensor]) -> int:
    """Count the moments that the optimizer keeps of a parameter, in its dtype; `muon` are those that Muon steps."""
    return 1 if param in muon else 2


def count_bytes(plan: Plan, job: JobConfig, muon: Container[torch.Tensor]) -> int:
    """Bytes of a checkpoint: the model in `checkpoint.export_dtype`, its exact weights if that loses bits, the moments.

    With adapters, of these alone. Headers, tokenizer and other small files are not counted. `muon` as in
    `count_moments`.
    """
    total = 0
    for entry in plan.entries:
        if not entry.info.persistent or (job.lora.rank and not is_adapter(entry.fqn)):
            continue
        own = entry.dtype.itemsize
        export = own if job.lora.rank else entry.saved_dtype(getattr(torch, job.checkpoint.export_dtype)).itemsize
        moments = count_moments(entry.tensor, muon) if entry.tensor.requires_grad else 0
        total += math.prod(entry.info.shape) * (export + (own if export < own else 0) + moments * own)
    return total


def count_coming(job: JobConfig, present: int, step: int) -> int:
    """Count the most checkpoints at any time besides the `present` ones, from `step` to the end of the run.

    An old one is removed only when the next is complete.
    """
    section, steps = job.checkpoint, job.training.steps
    coming = steps // section.interval - step // section.interval if section.interval else 0
    coming += steps > step and (not section.interval or steps % section.interval > 0)
    if not section.keep_latest_k:
        return coming
    always = (
        steps // section.keep_every_n_steps - step // section.keep_every_n_steps if section.keep_every_n_steps else 0
    )
    return min(coming, max(section.keep_latest_k - present, 0) + 1 + always)


def check_space(
    job: JobConfig, plan: Plan, muon: Container[torch.Tensor], folder: Path, step: int, carried_bytes: int = 0
) -> None:
    """Log the size of a checkpoint, and warn if the coming ones do not fit into `folder`. On rank 0."""
    if not job.checkpoint.enable or dist.get_rank() != 0:
        return
    size, coming = count_bytes(plan, job, muon) + carried_bytes, count_coming(job, len(list_steps(folder)), step)
    try:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    except OSError:
        return  # the first write will report what is wrong
    each, room = format_size(size), format_size(free)
    logger.info("checkpoint: each takes %s, %s are free in %s", each, room, folder)
    if coming * size > free:
        logger.warning(
            "checkpoint: %d more of %s each will be kept at once, and %s are free in %s. Make room, lower "
            "checkpoint.keep_latest_k, or set another job.dump_folder.",
            *(coming, each, room, folder),
        )


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a file that only describes the run: if that fails, only warn."""
    try:
        replace_file(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        logger.warning("cannot write %s: %s.", path, error.strerror or error)
