"""The environment of a run (environment.json in its folder), the disk space of checkpoints, and the
end of a run.
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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.base.agree import gather_objects
from titanlite.base.events import record_event
from titanlite.base.files import read_json, replace_file
from titanlite.base.log import logger
from titanlite.base.text import format_size
from titanlite.checkpoint.description import describe_versions
from titanlite.config import JobConfig
from titanlite.materialize import Plan
from titanlite.models.interface import is_adapter
from titanlite.trainer import Trainer

ENVIRONMENT_FILE = "environment.json"
_GIT_TIMEOUT_S = 5.0


def save_environment(
    folder: Path, device: torch.device, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `environment.json` into the run's folder, on rank 0; a resumed run overwrites it. A
    full disk causes only a warning.

    Returns the content of the file, including `facts` from the caller; empty on other ranks.

    Collectives: one all-gather of small objects over the default process group; every rank must
    call.
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
        "versions": {
            "python": platform.python_version(),
            **describe_versions(),
            "cuda": torch.version.cuda,
        },
        "platform": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} logical cores",
        "machines": machines,
    }
    write_json(folder / ENVIRONMENT_FILE, found)
    return found


def record_trained(folder: Path, trained: int) -> None:
    """Correct the number of trained parameters in the run's `environment.json`, on rank 0."""
    path = folder / ENVIRONMENT_FILE
    with suppress(OSError, ValueError):  # the start has warned that it cannot be written
        write_json(path, read_json(path) | {"trained": trained})


def _describe_device(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} ({platform.machine()})"
    )


def _describe_commit(root: Path) -> str | None:
    """Return the commit of the checkout from which this package runs, with a + if files differ;
    None without a checkout.
    """
    try:
        shown = _git(root, "rev-parse", "--show-toplevel")
        # the package is installed inside the checkout of a different project
        if Path(shown).resolve() != root.resolve():
            return None
        return _git(root, "rev-parse", "HEAD") + (
            "+" if _git(root, "status", "--porcelain") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_TIMEOUT_S,
    )
    return done.stdout.strip()


def count_bytes(plan: Plan, job: JobConfig, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a checkpoint: the model in `checkpoint.export_dtype`, the exact weights
    if that dtype loses bits, and the states of the optimizer.

    With LoRA, only the adapters are counted. Headers, counts of steps, tokenizer and other small
    files are not counted.
    """
    total = 0
    dtype: torch.dtype | None = optimizer.defaults.get("state_dtype")
    state_bytes = {
        param: len({*group["state_names"]} - {"step"}) * (dtype or param.dtype).itemsize
        for group in optimizer.param_groups
        for param in group["params"]
    }
    for entry in plan.entries:
        if not entry.info.persistent or (job.lora.rank and not is_adapter(entry.fqn)):
            continue
        own = entry.dtype.itemsize
        export = (
            own
            if job.lora.rank
            else entry.saved_dtype(getattr(torch, job.checkpoint.export_dtype)).itemsize
        )
        exact = own if export < own else 0
        values = math.prod(entry.info.shape)
        total += values * (export + exact + state_bytes.get(entry.tensor, 0))
    return total


def check_space(
    job: JobConfig,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    step: int,
    carried_bytes: int = 0,
) -> list[str]:
    """Log the size of a checkpoint; return a problem if the first one after `step` does not fit
    into `folder`. Call on one rank.

    It is only a warning if `checkpoint.on_save_error` lets the run continue without checkpoints.
    """
    if not job.checkpoint.enable or step >= job.training.steps:
        return []
    size = count_bytes(plan, job, optimizer) + carried_bytes
    try:
        free = shutil.disk_usage(
            next(path for path in (folder, *folder.parents) if path.exists())
        ).free
    except OSError:
        return []  # the first write will report the error
    logger.info(
        "checkpoint: each takes %s, %s are free in %s",
        format_size(size),
        format_size(free),
        folder,
    )
    if size <= free:
        return []
    text = (
        f"checkpoint: the first one takes {format_size(size)} ({size:,} bytes), and "
        f"{format_size(free)} ({free:,} bytes) are free in {folder}. Free space there, set another "
        "job.dump_folder, or set checkpoint.enable = false to save nothing."
    )
    if job.checkpoint.on_save_error == "stop":
        return [text]
    logger.warning("%s", text)
    return []


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a file that only describes the run; a failure is only a warning."""
    try:
        replace_file(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        logger.warning("cannot write %s: %s.", path, error.strerror or error)


def say_end(trainer: Trainer) -> None:
    """Log and record how a run ended."""
    parts = trainer.parts
    step = trainer.step
    job = parts.run.job
    start = parts.run.start
    steps = job.training.steps
    if trainer.stopping and step == 0:
        logger.info("stopped before the first step of %d", steps)
        return
    if trainer.stopping:
        resume = f"saved; the same command resumes from {parts.checkpointer.folder}"
        text = (
            f"stopped after step {step} of {steps}, {resume if job.checkpoint.enable else 'lost'}"
        )
        logger.info("%s", text)
        record_event("stop", text, step)
        return
    record_event("end", f"ended after step {step} of {steps}", step)
    if parts.results.out_of_patience:
        why = parts.results.describe()
        logger.info("early stopping after step %d of %d: %s", step, steps, why)
    elif start is not None and step == start.progress.step:
        logger.info(
            "nothing left to train: the checkpoint is of step %d of %d. Raise training.%s to train "
            "on, or set another job.dump_folder to start a new run.",
            step,
            steps,
            "epochs" if job.training.epochs else "steps",
        )
    if job.checkpoint.enable:
        folder = parts.checkpointer.final_folder(step)
        logger.info("see what was trained: python -m titanlite verify %s (docs/verify.md)", folder)
