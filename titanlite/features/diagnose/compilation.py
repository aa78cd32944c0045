"""What cannot be compiled: Triton's kernels where there is no compiler, layers that torch.compile refuses."""

import re
import socket
import subprocess

import torch

from titanlite.base.agree import raise_together
from titanlite.base.errors import ConfigError
from titanlite.base.log import logger
from titanlite.config import JobConfig
from titanlite.ops.grouped_gemm import triton_problem

_CODE = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)


def check_triton(job: JobConfig, device: torch.device) -> None:
    """Run a small kernel, if Triton is to be used: it needs a C compiler. Warn if its code for this GPU is wrong.

    Collective: every rank must call.

    Raises:
        ConfigError: on all ranks; the kernel cannot be compiled or run on one of them.
    """
    if device.type != "cuda" or not job.training.triton_kernels:
        return
    if (problem := triton_problem()) is not None:
        logger.warning("%s titanlite's kernels are left out, which is slower. Install a newer torch.", problem)
        return
    problems = []
    try:
        _run_kernel(device)
    except subprocess.CalledProcessError as error:  # what the compiler says is on the console
        problems.append(f"{error.cmd[0]} ended with exit code {error.returncode}")
    except Exception as error:  # noqa: BLE001 - whatever it is: a kernel that does not run is the problem
        problems.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}")
    raise_together(
        ConfigError,
        "training.triton_kernels",
        [
            f"a first Triton kernel fails on {socket.gethostname()}: {problem}. Triton compiles with gcc and Python's "
            "headers: install them (Debian and Ubuntu: apt install gcc python3-dev), or set training.triton_kernels = "
            "false, which is slower."
            for problem in problems
        ],
    )


def _run_kernel(device: torch.device) -> None:
    from titanlite.ops.grouped_gemm_launch import gather_sum  # nothing else here needs triton

    gather_sum(torch.zeros(1, 16, device=device), torch.zeros(1, 1, device=device, dtype=torch.int32))
    torch.cuda.synchronize(device)


def explain_uncompiled(error: BaseException) -> ConfigError | None:
    """Return what to do about a layer that torch cannot trace or generate code for; None for other errors."""
    if not any(kind.__module__.startswith(("torch._dynamo.", "torch._inductor.")) for kind in type(error).__mro__):
        return None
    text = str(error)
    message, _, code = text.partition("from user code:")
    reason = next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
    explanation = re.search(r"^\s*Explanation: (.*)$", message, re.MULTILINE)
    if explanation:
        reason = f"{reason.rstrip('.')}: {explanation[1]}"
    frames = list(_CODE.finditer(code))
    place = f" (in {frames[-1]['name']}, {frames[-1]['file']}:{frames[-1]['line']})" if frames else ""
    remedy = "Change that code" if frames else "See what it says"
    if "C++ compiler" in reason:
        remedy = "Install one (Debian and Ubuntu: apt install g++)"
    return ConfigError(
        f"compile.enable: torch cannot compile a layer: {reason.rstrip('.')}{place}. {remedy}, or set compile.enable = "
        "false."
    )
