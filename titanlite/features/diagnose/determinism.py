"""`training.deterministic`: the same bits in every run on the same mesh, and in a resumed one."""

import os
import random
import re

import numpy as np
import torch

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.config import JobConfig

# Read by cuBLAS and NCCL when they start: a workspace of fixed size, and sums over ranks in a fixed order, whatever the
# message size and the load of the links.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
# What cuBLAS documents as deterministic.
_WORKSPACES = (":4096:8", ":16:8")


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
