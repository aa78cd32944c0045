"""Products of float32 matrices with oneDNN, on the processors where it is faster than torch's own way.

torch multiplies float32 matrices on x86 with Intel's MKL, which does without AVX-512 on processors of other makers;
oneDNN does not. One core of a Zen 5 does 100 GFLOP/s with the one and 220 with the other. The operator that torch's
compiler has for `F.linear` is the only way to oneDNN that keeps float32.

oneDNN makes code for each shape that it meets, and torch keeps that of the latest 1024 shapes, 0.6 MB each. So it gets
few numbers of rows, multiples of `ROWS` up to `MOST_ROWS` and multiples of that, and MKL the others. A token's result
may differ in the last bits with the number of tokens beside it. Compiled layers are left to MKL.

Shapes: M rows (tokens), K reduction, N columns.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch

ROWS, MOST_ROWS = 32, 512

_WORTHWHILE = 1 << 21
"""Multiplications; with fewer, oneDNN does not make up for the 10 us that it takes to find its code."""


def multiply_linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor | None:
    """Compute `ops.linear` with oneDNN; None for what torch multiplies as fast."""
    if not _takes_onednn(x, weight_NK, x.numel() // max(x.shape[-1], 1), x.numel() * weight_NK.shape[0]):
        return None
    y = _Linear.apply(x, weight_NK)
    return y if bias_N is None else y + bias_N


def multiply(a: torch.Tensor, b_KN: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Multiply inside operators, where one size is the number of tokens, `rows`; None as in `multiply_linear`."""
    return _multiply(a, b_KN) if _takes_onednn(a, b_KN, rows, a.shape[0] * b_KN.numel()) else None


def prefers_onednn() -> bool:
    """Return True if oneDNN multiplies float32 faster here, and `torch.backends.mkldnn.enabled` is not off."""
    return torch.backends.mkldnn.enabled and _is_onednn_faster()


@cache
def _is_onednn_faster() -> bool:
    """Return True on x86 processors with AVX-512 that are not Intel's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or get_onednn_op() is None:
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@cache
def get_onednn_op() -> Any:
    """Return oneDNN's operator for `x @ weight.T`, which is not documented (torch 2.11 to 2.14 have it); else None."""
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
    return None if packet is None else packet.default


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        need_x, need_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight_NK if need_x else None)
        return _multiply(x, weight_NK.T)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        # By the function itself, so that gradients of gradients exist as they do for F.linear.
        dx = None if weight_NK is None else _Linear.apply(dy, weight_NK.T)
        dweight = None if x is None else _Linear.apply(dy.flatten(0, -2).T, x.flatten(0, -2).T)
        return dx, dweight


def _takes_onednn(one: torch.Tensor, other: torch.Tensor, rows: int, multiplications: int) -> bool:
    return (
        not torch.compiler.is_compiling()
        and multiplications >= _WORTHWHILE
        and one.dtype == other.dtype == torch.float32
        and rows % (ROWS if rows <= MOST_ROWS else MOST_ROWS) == 0
        and prefers_onednn()
    )


def _multiply(a: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    return get_onednn_op()(a, b_KN.T, None, "none", [], "")
