"""The kernel table: functions that compute an operator on one type of device, by (operator, type of device).

An operator without a kernel, or whose kernel returns None, computes the same values in its own way. Features install
kernels before the first forward. While a run is planned, fake CPU tensors stand in for CUDA's: kernels are chosen as on
CUDA then.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Kernel = Callable[..., Any]

_kernels: dict[tuple[str, str], Kernel] = {}
_costly: set[Any] = set()
# Not a context variable: a compiled forward cannot read one.
_planned_device: str | None = None
_has_triton = True


def install_kernel(operator: str, device_type: str, kernel: Kernel, costly: Sequence[Any] = ()) -> None:
    """Install `kernel` for `operator` on devices of a type, in this process, in place of the one that was there.

    It takes the operator's arguments; returns the result, or None where the operator's own way is better. `costly` are
    torch operators that it calls, whose results selective activation checkpointing keeps.
    """
    _kernels[operator, device_type] = kernel
    _costly.update(costly)


def find_kernel(operator: str, device: torch.device) -> Kernel | None:
    """Return the kernel of `operator` for tensors on `device`; None: there is none."""
    return _kernels.get((operator, kernel_device(device)))


def use_triton(wanted: bool) -> None:
    """Use titanlite's Triton kernels on CUDA in this process, or leave them out: `training.triton_kernels`."""
    global _has_triton
    _has_triton = wanted


def has_triton(device: torch.device) -> bool:
    """Return True if Triton kernels may serve tensors on `device`."""
    return _has_triton and kernel_device(device) == "cuda"


def get_costly() -> set[Any]:
    """Return the torch operators that were installed as costly."""
    return _costly


@contextmanager
def plan_for_device(device_type: str, kernels: Mapping[str, Kernel] | None = None) -> Generator[None]:
    """Choose kernels as for tensors on `device_type`, whatever device they are on. For tensors without data only.

    `kernels`, by operator, stand in for those that need data.
    """
    global _planned_device
    before, table = _planned_device, dict(_kernels)
    _planned_device = device_type
    _kernels.update({(operator, device_type): kernel for operator, kernel in (kernels or {}).items()})
    try:
        yield
    finally:
        _planned_device = before
        _kernels.clear()
        _kernels.update(table)


def kernel_device(device: torch.device) -> str:
    """Return the type of the device whose kernels serve a tensor on `device`."""
    return _planned_device or device.type


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or `param` itself if it is a plain tensor; differentiable.

    All arithmetic of titanlite's models runs on local tensors: DTensor dispatch costs 50 to 200 us per operation, and
    between FSDP2's all-gather and the kernel a DTensor's spec may claim another dtype than its data (up to torch 2.12).
    The gradient of a parameter that is replicated over tp is this rank's part of a sum; `reduce_replicated_grads` adds
    the parts once per step.
    """
    return param.to_local() if isinstance(param, DTensor) else param
