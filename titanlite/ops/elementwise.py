"""Norm and activation: RMSNorm (arXiv:1910.07467), statistics in float32 or better, and SwiGLU (arXiv:2002.05202).

Shapes: R rows, D width, I inner width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from titanlite.ops.kernels import kernel_device


class _HostRMSNorm(torch.autograd.Function):
    """Takes a third to a half of the time of torch's composition for the CPU, and keeps x and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, rstd)
        return (x * rstd).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor):
        x, weight_D, rstd = ctx.saved_tensors
        normed = x * rstd
        product = dy * normed
        dweight_D = product.reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight_D, None
        # dx = rstd * (dy * weight - normed * mean(dy * weight * normed))
        mean = (product @ weight_D).unsqueeze(-1).div_(-x.shape[-1])
        return (dy * weight_D).addcmul_(normed, mean).mul_(rstd), dweight_D, None


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dim, in the dtype of x."""
    # Compiled, torch's composition is one pass too; and torch 2.11 traces a wrong gradient of the function.
    on_host = kernel_device(x.device) == "cpu" and not torch.compiler.is_compiling()
    if on_host and x.dtype == weight_D.dtype and x.itemsize >= 4:
        return _HostRMSNorm.apply(x, weight_D, eps)
    return F.rms_norm(x, (x.shape[-1],), weight_D, eps)


def apply_swiglu(gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
    """`swiglu` without a gradient."""
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    h_RI = F.silu(gate_RI).mul_(up_RI)
    return h_RI if weight_R is None else h_RI.mul_(weight_R.unsqueeze(-1))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(gate_up_R2I, weight_R)
        return apply_swiglu(gate_up_R2I, weight_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_RI: torch.Tensor):
        gate_up_R2I, weight_R = ctx.saved_tensors
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        dgate_up_R2I = torch.empty_like(gate_up_R2I)
        dgate_RI, dup_RI = dgate_up_R2I.chunk(2, dim=-1)  # written in place: no concatenation
        a_RI = F.silu(gate_RI)
        da_RI = dh_RI * up_RI
        torch.mul(a_RI, dh_RI, out=dup_RI)
        dweight_R = None
        if weight_R is not None:
            if ctx.needs_input_grad[1]:
                dweight_R = a_RI.mul_(da_RI).sum(dim=-1, dtype=weight_R.dtype)
            # Products with the weight in float32 as in forward, stored in dh's dtype.
            dup_RI.mul_(weight_R.unsqueeze(-1))
            da_RI.mul_(weight_R.unsqueeze(-1))
        torch.ops.aten.silu_backward.grad_input(da_RI, gate_RI, grad_input=dgate_RI)
        return dgate_up_R2I, dweight_R


def swiglu(gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up * weight` of `gate_up = [gate | up]`.

    Args:
        gate_up_R2I: (..., 2 I), any float dtype.
        weight_R: (...,) factor per row (the router's weight of a routed row), float32 or the dtype of gate_up; or None.

    Returns:
        (..., I) in the dtype of `gate_up_R2I`. Kept for backward: the arguments, nothing of size I.
    """
    if torch.compiler.is_compiling():
        # What torch traces it fuses, and keeps the same for backward; writing into parts of a tensor is a graph break.
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        h_RI = F.silu(gate_RI) * up_RI
        return h_RI if weight_R is None else (h_RI * weight_R.unsqueeze(-1)).to(h_RI.dtype)
    return _SwiGLU.apply(gate_up_R2I, weight_R)
