"""Speed on the CPU: kernels for attention, experts and products, shared-memory transport, and memory that is kept."""

import ctypes
import sys

import torch

from titanlite.features.cpu import attention, experts
from titanlite.features.cpu.shared_memory import open_shared_memory
from titanlite.ops.kernels import install_kernel

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def install(device: torch.device) -> None:
    """Make this process fast if its rank is on the CPU: `install_kernels`, and keep the memory that it frees."""
    install_kernels()
    if device.type == "cpu":
        keep_freed_memory()


def install_kernels() -> None:
    """Install the kernels for the CPU in this process; idempotent. Call before the first forward or collective."""
    install_kernel("attention", "cpu", attention.attend, costly=[torch.ops.titanlite.host_attention.default])
    install_kernel("moe_experts", "cpu", experts.experts)
    install_kernel("transport", "cpu", open_shared_memory)
    if (op := experts.get_onednn_op()) is not None:
        install_kernel("linear", "cpu", experts.multiply_linear, costly=[op])
        install_kernel("product", "cpu", experts.multiply_product)


def keep_freed_memory() -> None:
    """Keep freed host memory in the process for its next tensors, as CUDA's caching allocator does on GPUs.

    By default glibc returns blocks to the kernel, and the page faults of getting them again take a tenth of a small
    model's CPU time in each step. The peak is unchanged. No-op if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
