"""Speed on the CPU: kernels for attention, experts and products, shared-memory transport, and memory that is kept."""

import torch

from titanlite.base.process import keep_freed_memory
from titanlite.features.cpu import attention, experts
from titanlite.features.cpu.shared_memory import open_shared_memory
from titanlite.ops.kernels import install_kernel


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
