"""Matrix products and the fused experts on the CPU.

**Products** of float32 matrices use oneDNN on processors where it is faster than torch's default, on x86 Intel's MKL.
MKL does without AVX-512 on processors of other makers; oneDNN does not: one core of a Zen 5 reaches 100 GFLOP/s with
MKL and 220 with oneDNN. Only the operator that torch's compiler uses for `F.linear` reaches oneDNN in float32.

oneDNN compiles code for each shape, and torch caches the latest 1024 shapes, 0.6 MB each. So oneDNN gets only few row
counts: multiples of `ROWS` up to `MOST_ROWS`, and multiples of that. MKL gets all others, and compiled layers. The last
bits of a token's result may depend on the number of tokens in the call.

**Experts** are computed in slices of an expert's rows that stay in a core's cache from the gather to the result. The
arithmetic is that of the Triton kernels: tokens are gathered per slice, only `z = [gate | up]` is kept for backward,
and h is recomputed there. Two-byte floats are multiplied in float32, which is 16 to 50 times faster on CPUs without
instructions for them; z and the results per row are rounded. For oneDNN, slices are padded with rows of zeros, so that
few row counts occur.

Shapes: M rows (tokens), K reduction, N columns; T tokens, k experts per token, R = T * k rows grouped by expert, E
experts, I expert width, D hidden, C rows of a slice, with the zeros.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from titanlite.ops.elementwise import apply_swiglu
from titanlite.ops.matmul import get_compute_dtype, get_groups, multiply, sum_over_rows
from titanlite.ops.moe_experts import gather_sum

ROWS, MOST_ROWS = 32, 512

_WORTHWHILE = 1 << 21
"""Multiplications; with fewer, oneDNN does not make up for the 10 us that it takes to find its code."""


def multiply_linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor | None:
    """Compute `ops.linear` with oneDNN; None if torch multiplies as fast."""
    if not _takes_onednn(x, weight_NK, x.numel() // max(x.shape[-1], 1), x.numel() * weight_NK.shape[0]):
        return None
    y = _OneDNNLinear.apply(x, weight_NK)
    return y if bias_N is None else y + bias_N


def multiply_product(a: torch.Tensor, b_KN: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Multiply inside operators, where one dim is the number of tokens, `rows`; None as in `multiply_linear`."""
    return _multiply_by_onednn(a, b_KN) if _takes_onednn(a, b_KN, rows, a.shape[0] * b_KN.numel()) else None


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


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        need_x, need_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight_NK if need_x else None)
        return _multiply_by_onednn(x, weight_NK.T)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        # By the function itself, so that gradients of gradients exist as they do for F.linear.
        dx = None if weight_NK is None else _OneDNNLinear.apply(dy, weight_NK.T)
        dweight = None if x is None else _OneDNNLinear.apply(dy.flatten(0, -2).T, x.flatten(0, -2).T)
        return dx, dweight


def _takes_onednn(one: torch.Tensor, other: torch.Tensor, rows: int, multiplications: int) -> bool:
    return (
        not torch.compiler.is_compiling()
        and multiplications >= _WORTHWHILE
        and one.dtype == other.dtype == torch.float32
        and rows % (ROWS if rows <= MOST_ROWS else MOST_ROWS) == 0
        and prefers_onednn()
    )


def _multiply_by_onednn(a: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    return get_onednn_op()(a, b_KN.T, None, "none", [], "")


_SLICE_BYTES = 1 << 20
"""Of a slice of z; what else is there of its rows takes as much again, and twice in backward."""


def experts(*arguments: torch.Tensor) -> torch.Tensor:
    """Kernel `moe_experts`: arguments as there, up to `offsets_E`."""
    keep = any(tensor.requires_grad for tensor in arguments) and torch.is_grad_enabled()
    return moe_experts_forward(*arguments, keep)[0]


def forward(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    row_weight: torch.Tensor,
    token: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, z) of `moe_experts`; z (R, 2 I) is empty unless `keep`."""
    compute = get_compute_dtype(x)
    y_RD = x.new_empty(token.shape[0], x.shape[1])
    z = x.new_empty(token.shape[0] if keep else 0, gate_up.shape[1])
    for expert, slices in _slices(token, offsets, gate_up.shape[1], compute):
        up_weight, down_weight = gate_up[expert].to(compute).mT, down[expert].to(compute).mT
        for part in slices:
            z_C2I = multiply(part.gather(x), up_weight)
            if keep:
                part.write(z, z_C2I)
            part.write(y_RD, multiply(apply_swiglu(z_C2I, part.take(row_weight)), down_weight))
    z[int(offsets[-1]) :] = 0.0
    return _sum_by_token(y_RD, rows, offsets), z


def backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    row_weight: torch.Tensor,
    token: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    z: torch.Tensor,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of (x, gate_up, down, row_weight); those of the first three that are not `needed` are empty."""
    need_x, need_gate_up, need_down, _ = needed
    compute = get_compute_dtype(x)
    dx_RD = x.new_empty(token.shape[0], x.shape[1]) if need_x else None
    dgate_up = _PerExpert(gate_up, compute) if need_gate_up else None
    ddown = _PerExpert(down, compute) if need_down else None
    drow_weight = torch.zeros_like(row_weight)
    for expert, slices in _slices(token, offsets, gate_up.shape[1], compute):
        up_weight, down_weight = gate_up[expert].to(compute), down[expert].to(compute)
        for part in slices:
            dy_CD = part.gather(dout)
            dh_CI = multiply(dy_CD, down_weight)
            z_C2I, weight_C1 = part.take(z).to(compute), part.take(row_weight).unsqueeze(-1)
            gate_CI, up_CI = z_C2I.chunk(2, dim=-1)
            a_CI = F.silu(gate_CI)
            h_CI = a_CI * up_CI  # without the row's weight, whose gradient is next
            part.write(drow_weight, torch.sum(h_CI * dh_CI, dim=-1))
            dh_CI.mul_(weight_C1)
            dz_C2I = torch.empty_like(z_C2I)
            dgate_CI, dup_CI = dz_C2I.chunk(2, dim=-1)
            torch.mul(dh_CI, a_CI, out=dup_CI)
            torch.ops.aten.silu_backward.grad_input(dh_CI.mul_(up_CI), gate_CI, grad_input=dgate_CI)
            if ddown is not None:
                ddown.add(expert, dy_CD, h_CI.mul_(weight_C1))
            if dx_RD is not None:
                part.write(dx_RD, multiply(dz_C2I, up_weight))
            if dgate_up is not None:
                dgate_up.add(expert, dz_C2I, part.gather(x))
    return (
        x.new_empty(0) if dx_RD is None else _sum_by_token(dx_RD, rows, offsets),
        x.new_empty(0) if dgate_up is None else dgate_up.finish(),
        x.new_empty(0) if ddown is None else ddown.finish(),
        drow_weight,
    )


class _Slice:
    """Some of an expert's rows, perhaps padded with rows of zeros, whose results are zeros."""

    def __init__(self, start: int, end: int, token_R: torch.Tensor, compute: torch.dtype, multiple: int) -> None:
        self.rows, self.count = slice(start, end), end - start
        self.tokens = token_R[self.rows]
        self._compute, self._padded = compute, _round_up(self.count, multiple)

    def gather(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows' tokens, (C, D), in the dtype of products."""
        if self._padded == self.count:
            return x_TD.index_select(0, self.tokens).to(self._compute)
        x_CD = x_TD.new_empty(self._padded, x_TD.shape[1])
        torch.index_select(x_TD, 0, self.tokens, out=x_CD[: self.count])
        return self._fill(x_CD).to(self._compute)

    def take(self, values_R: torch.Tensor) -> torch.Tensor:
        """Return these rows of `values_R`, (C, ...); perhaps a view."""
        if self._padded == self.count:
            return values_R[self.rows]
        values_C = values_R.new_empty(self._padded, *values_R.shape[1:])
        values_C[: self.count] = values_R[self.rows]
        return self._fill(values_C)

    def write(self, values_R: torch.Tensor, values_C: torch.Tensor) -> None:
        """Write `values_C` to these rows of `values_R`, in place: the inverse of `take`."""
        values_R[self.rows] = values_C[: self.count]

    def _fill(self, values_C: torch.Tensor) -> torch.Tensor:
        values_C[self.count :] = 0
        return values_C


def _slices(
    token_R: torch.Tensor, offsets: torch.Tensor, width: int, compute: torch.dtype
) -> Iterator[tuple[int, Iterator[_Slice]]]:
    """Yield each expert that has rows, with slices of them of equal size; z has `width` columns."""
    multiple = ROWS if compute == torch.float32 and prefers_onednn() else 1
    most = max(1, _SLICE_BYTES // (width * compute.itemsize))
    most = min(most, MOST_ROWS) if multiple > 1 else most
    for expert, (start, end) in enumerate(get_groups(offsets)):
        count = -(-(end - start) // most)
        if count:
            size = _round_up(-(-(end - start) // count), multiple)
            starts = range(start, end, size)
            yield expert, (_Slice(at, min(at + size, end), token_R, compute, multiple) for at in starts)


def _round_up(rows: int, multiple: int) -> int:
    """Round up, except the few rows of a lightly loaded expert: most of its work would be zeros."""
    return rows if rows <= multiple else -(-rows // multiple) * multiple


def _sum_by_token(y_RD: torch.Tensor, rows_Tk: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return (T, D); rows of no expert are zeroed and add nothing."""
    y_RD[int(offsets[-1]) :] = 0.0
    return gather_sum(y_RD, rows_Tk)


class _PerExpert:
    """Gradient of the experts' weights, a sum over slices; zero for an expert without rows."""

    def __init__(self, weight: torch.Tensor, compute: torch.dtype) -> None:
        self._sums = torch.empty(weight.shape, dtype=compute)
        self._dtype, self._left = weight.dtype, set(range(weight.shape[0]))

    def add(self, expert: int, left_CN: torch.Tensor, right_CK: torch.Tensor) -> None:
        sum_over_rows(left_CN, right_CK, self._sums[expert], accumulate=expert not in self._left)
        self._left.discard(expert)

    def finish(self) -> torch.Tensor:
        for expert in self._left:
            self._sums[expert] = 0.0
        return self._sums.to(self._dtype)


moe_experts_forward = torch.library.custom_op("titanlite::moe_experts_forward", forward, mutates_args=())
moe_experts_backward = torch.library.custom_op("titanlite::moe_experts_backward", backward, mutates_args=())


@moe_experts_forward.register_fake
def _(x: torch.Tensor, gate_up: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, token, _, _, keep = others
    return torch.empty_like(x), x.new_empty(token.shape[0] if keep else 0, gate_up.shape[1])


@moe_experts_backward.register_fake
def _(dout: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    *leaves, row_weight, _, _, _, _, needed = others
    some = (t.new_empty(t.shape if need else 0) for t, need in zip(leaves, needed, strict=False))
    return *some, torch.empty_like(row_weight)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], output[1])


def _backward(ctx: Any, dout: torch.Tensor | None, dz: torch.Tensor | None) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 8
    needed = list(ctx.needs_input_grad[:4])
    # Saved tensors once: under activation checkpointing, unpacking recomputes and may not be repeated.
    grads = moe_experts_backward(dout.contiguous(), *ctx.saved_tensors, needed)
    return (*(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, None, None, None)


moe_experts_forward.register_autograd(_backward, setup_context=_save_for_backward)
