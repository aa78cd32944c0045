"""How a process is set up before its process group starts: `training.deterministic`, and NCCL's flight recorder."""

import os
import random
import re
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.config import JobConfig

# Read by cuBLAS and NCCL when they start: a workspace of fixed size, and sums over ranks in a fixed order, whatever the
# message size and the load of the links.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
# What cuBLAS documents as deterministic.
_WORKSPACES = (":4096:8", ":16:8")
# Names that torch 2.11 to 2.14 read for the flight recorder, each with the older one that it still honours. 2,000
# collectives take about 1 MiB per rank and are several steps of a large model.
_FLIGHT_RECORDER = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "", "1"),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", ""),
)


def explain_refusal(error: BaseException) -> ConfigError | None:
    """Return what to do about an operation that torch refuses under `training.deterministic`; None for other errors."""
    match = re.search(r"(\S+) does not have a deterministic implementation", str(error))
    if match is None:
        return None
    return ConfigError(
        f"training.deterministic: {match[1]} has no deterministic form on this device. Set training.deterministic = "
        "false, or change the model or setting that uses it."
    )


def make_deterministic(job: JobConfig) -> None:
    """Set up this process as `training.deterministic` says; call before the process group and CUDA start.

    Does nothing without the flag. Seeds the generators of Python and numpy (torch's depends on the rank: see `Trainer`;
    titanlite's own numbers come from counters); deterministic algorithms only, no choice of algorithms by timing,
    attention from kernels whose backward adds in fixed order, and the environment of cuBLAS and NCCL. An operation that
    has no deterministic form raises, with its name, when it is first called.

    Raises:
        ConfigError: a setting cannot be deterministic, or the environment forbids it. The same on all ranks.
    """
    if not job.training.deterministic:
        return
    random.seed(job.training.seed)
    np.random.seed(job.training.seed % 2**32)
    problems = []
    if torch.cuda.is_available() and job.model.attention_backend == "flex":
        problems.append(
            "model.attention_backend = 'flex' picks its kernels by timing. Set it to 'sdpa', or deterministic = false."
        )
    for name, value in _ENVIRONMENT.items():
        given = os.environ.setdefault(name, value)
        if name == "CUBLAS_WORKSPACE_CONFIG" and given not in _WORKSPACES:
            problems.append(
                f"the environment has {name}={given}, which is not deterministic. Unset it, or set it to "
                f"{' or '.join(_WORKSPACES)}."
            )
    raise_problems(ConfigError, "training.deterministic", problems)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[assignment]  a pass over each new tensor
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # FlashAttention's backward honours the flag above; these two do not, or choose their plan by themselves.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def enable_flight_recorder(dump_folder: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL, if there are GPUs, dump to `dump_folder/flight_recorder/rank_N` when a collective times out.

    Call it before the process group is made, which reads the environment. What the user has set there stays. gloo has
    no flight recorder; there the error of the rank that waited says which collective it was.
    """
    if not torch.cuda.is_available():
        return
    folder = dump_folder.absolute() / "flight_recorder"
    for name, old_name, value in _FLIGHT_RECORDER:
        if name not in environment and old_name not in environment:
            environment[name] = value or f"{folder}/rank_"
    # NCCL's watchdog makes no folder. A run that cannot write here ends soon with a clear error of `make_dump_folder`.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
