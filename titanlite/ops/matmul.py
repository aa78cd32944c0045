"""Products of matrices, on the CPU by the faster of the two libraries that torch has for them.

torch multiplies float32 matrices on x86 with Intel's MKL, which does without AVX-512 on processors of other makers;
oneDNN, with which torch multiplies bfloat16, does not. One core of a Zen 5 does 100 GFLOP/s with the one and 220 with
the other. The operator that torch's compiler has for `F.linear` is the only way to oneDNN that keeps float32.

oneDNN makes code for each shape that it meets, in 0.3 ms, and torch keeps that of 1024 shapes, 0.5 MB each. So it gets
rows in multiples of `ROWS`, and products of other numbers of rows stay with MKL.

Shapes: M rows, K reduction, N columns.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from titanlite.ops.planned import is_planned

ROWS = 32
"""Products with oneDNN have a multiple of this many rows, and sums over rows too."""

_WORTHWHILE = 1 << 19
"""Multiplications; with fewer, oneDNN does not make up for the 10 us that it takes to find its code."""


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, (..., N), of x (..., K): `F.linear`, faster on some CPUs."""
    if not _takes_onednn(x, weight_NK, weight_NK.shape[0]):
        return F.linear(x, weight_NK, bias_N)
    y = _Linear.apply(x, weight_NK)
    return y if bias_N is None else y + bias_N


def multiply(a_MK: torch.Tensor, b_KN: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b`, (M, N), for use inside operators: not differentiable. With oneDNN a transposed `a` is copied."""
    if not _takes_onednn(a_MK, b_KN, b_KN.shape[1]):
        return torch.mm(a_MK, b_KN, out=out)
    product_MN = _multiply(a_MK, b_KN)
    return product_MN if out is None else out.copy_(product_MN)


def add_product_(sum_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """`sum += a @ b`, in the dtype of the sum, which may be the wider one."""
    if sum_MN.dtype != a_MK.dtype or _takes_onednn(a_MK, b_KN, b_KN.shape[1]):
        sum_MN += multiply(a_MK, b_KN)
    else:
        sum_MN.addmm_(a_MK, b_KN)


def prefers_onednn() -> bool:
    """True if oneDNN multiplies float32 faster here, and `torch.backends.mkldnn.enabled` is not off."""
    return torch.backends.mkldnn.enabled and _is_onednn_faster()


@cache
def _is_onednn_faster() -> bool:
    """True on x86 processors with AVX-512 that are not Intel's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or get_onednn_op() is None:
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def get_onednn_op() -> Any:
    """The operator for `x @ weight.T` by oneDNN, not documented (torch 2.11 to 2.13 have it); None without it."""
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
    return None if packet is None else packet.default


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight_NK)
        return _multiply(x, weight_NK.T)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        # By the function itself, so that gradients of gradients exist as they do for F.linear.
        dx = _Linear.apply(dy, weight_NK.T) if need_x else None
        dweight = _Linear.apply(dy.flatten(0, -2).T, x.flatten(0, -2).T) if need_weight else None
        return dx, dweight


def _takes_onednn(a: torch.Tensor, b: torch.Tensor, columns: int) -> bool:
    if torch.compiler.is_compiling():
        return False
    return (
        a.numel() * columns >= _WORTHWHILE
        and a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and a.numel() // a.shape[-1] % ROWS == 0
        and a.shape[-1] % ROWS == 0
        and prefers_onednn()
        and not is_planned()
    )


def _multiply(a: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    return get_onednn_op()(a, b_KN.T, None, "none", [], "")
