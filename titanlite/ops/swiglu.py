"""SwiGLU (arXiv:2002.05202) with an optional weight per row; keeps only its input for backward.

Shapes: R rows, I inner width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


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
