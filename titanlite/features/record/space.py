"""How much room the checkpoints of a run take, and whether it is there. Said before the first is written."""

import math
import shutil
from collections.abc import Container
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.base.log import logger
from titanlite.base.tables import format_size
from titanlite.checkpoint.commit import list_steps
from titanlite.config import JobConfig
from titanlite.materialize import Plan
from titanlite.models.interface import is_adapter


def count_moments(param: torch.Tensor, muon: Container[torch.Tensor]) -> int:
    """How many moments the optimizer keeps of a trained parameter, in its dtype; `muon` are those that Muon steps."""
    return 1 if param in muon else 2


def count_bytes(plan: Plan, job: JobConfig, muon: Container[torch.Tensor]) -> int:
    """Bytes of a checkpoint: the model in `checkpoint.export_dtype`, its exact weights if that loses bits, the moments.

    With adapters, of these alone. Headers, tokenizer and other small files are not counted. `muon` as in
    `count_moments`.
    """
    total = 0
    for entry in plan.entries:
        is_param = entry.info.kind == "parameter"
        if not entry.info.persistent or (job.lora.rank and not is_adapter(entry.fqn)):
            continue
        own = entry.dtype.itemsize
        export = getattr(torch, job.checkpoint.export_dtype).itemsize if is_param and not job.lora.rank else own
        moments = count_moments(entry.tensor, muon) if is_param and entry.tensor.requires_grad else 0
        total += math.prod(entry.info.shape) * (export + (own if export < own else 0) + moments * own)
    return total


def count_coming(job: JobConfig, present: int, step: int) -> int:
    """Count the most checkpoints that exist at once beside the `present` ones, from `step` to the end of the run.

    One is removed only when the next is complete.
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
    """Say on rank 0 how large a checkpoint will be, and warn if those that will be kept have no room in `folder`."""
    if not job.checkpoint.enable or dist.get_rank() != 0:
        return
    size, coming = count_bytes(plan, job, muon) + carried_bytes, count_coming(job, len(list_steps(folder)), step)
    try:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    except OSError:
        return  # whoever writes there says what is wrong
    each, room = format_size(size), format_size(free)
    logger.info("checkpoint: each takes %s, %s are free in %s", each, room, folder)
    if coming * size > free:
        logger.warning(
            "checkpoint: %d more of %s each will be kept at once, and %s are free in %s. Make room, lower "
            "checkpoint.keep_latest_k, or set another job.dump_folder.",
            *(coming, each, room, folder),
        )
