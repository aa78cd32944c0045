"""Which kernels a device that is not there would run: while a run is planned, fake CPU tensors stand in for CUDA's.

Code that chooses between kernels by device asks here.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

# Not a context variable: a compiled forward cannot read one.
_planned_device: str | None = None


@contextmanager
def plan_for_device(device_type: str) -> Generator[None]:
    """Choose kernels as for tensors on `device_type`, whatever device they are on. For tensors without data only."""
    global _planned_device
    before, _planned_device = _planned_device, device_type
    try:
        yield
    finally:
        _planned_device = before


def is_planned() -> bool:
    """True inside `plan_for_device`."""
    return _planned_device is not None


def kernel_device(device: torch.device) -> str:
    """The type of the device whose kernels serve a tensor on `device`."""
    return _planned_device or device.type
