"""`environment.json`: what a run ran on. Versions, machines, devices, the commit, the command."""

import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.base.agree import gather_objects
from titanlite.checkpoint.description import describe_versions
from titanlite.features.record import write_json

FILE_NAME = "environment.json"
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
    write_json(folder / FILE_NAME, found)
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
