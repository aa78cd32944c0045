"""Mixture of experts on routed tokens: gather rows out, GEMM, SwiGLU, GEMM, gather-sum rows back.

With the `triton` backend it is fused. Only `z = [gate | up]`, (R, 2 I), is saved for backward. h is
recomputed when its gradient is computed, and neither the permuted tokens nor the results per row
are needed, so that a recomputation ends before the second GEMM. The kernels gather the tokens
inside the first GEMM and apply SwiGLU and the router's weight to its accumulator. Otherwise it is
composed of `permute_tokens`, `grouped_gemm`, `swiglu` and `unpermute_sum`.

Both directions of the permutation are gathers, each the other's gradient. A scatter-add (autograd's
own backward of `index_select`) would use atomics on CUDA, whose order, and so whose rounding,
changes from run to run.

Shapes: T tokens, k experts per token, R = T * k rows grouped by expert, E experts, I expert width,
D hidden.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from titanlite.ops.elementwise import swiglu
from titanlite.ops.kernels import define_operator
from titanlite.ops.matmul import (
    GroupedGemmBackend,
    grouped_gemm,
    grouped_mm,
    grouped_mm_wgrad,
    grouped_mm_wgrad_into,
    has_kernels,
    resolve_backend,
)


def gather_sum(y_RD: Tensor, rows_Tk: Tensor) -> Tensor:
    """Return out[t] = sum over j of y[rows[t, j]], in order of j, in float32 or wider, without a
    (T, k, D) copy.

    Rows from R on count as zeros; only a token with fewer than k rows has such entries.
    """
    if rows_Tk.shape[1] == 1:
        return y_RD.index_select(0, rows_Tk.squeeze(1))
    if has_kernels(y_RD.device, y_RD.dtype):
        return gather_sum_rows(y_RD.contiguous(), rows_Tk)
    if rows_Tk.numel() > y_RD.shape[0]:
        y_RD, rows_Tk = F.pad(y_RD, (0, 0, 0, 1)), rows_Tk.clamp(max=y_RD.shape[0])
    return F.embedding_bag(rows_Tk, y_RD, mode="sum")


gather_sum_rows = define_operator(
    "gather_sum(Tensor y, Tensor rows) -> Tensor",
    "titanlite.ops.launchers",
    lambda y, rows: y.new_empty(rows.shape[0], y.shape[1]),
)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token_R: Tensor, rows_Tk: Tensor, is_back: bool) -> Tensor:
        ctx.is_back = is_back
        ctx.save_for_backward(token_R if is_back else rows_Tk)
        return gather_sum(x, rows_Tk) if is_back else x.index_select(0, token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        (index,) = ctx.saved_tensors
        dx = dy.index_select(0, index) if ctx.is_back else gather_sum(dy.contiguous(), index)
        return dx, None, None, None


def permute_tokens(x_TD: Tensor, token_R: Tensor, rows_Tk: Tensor) -> Tensor:
    """Gather `x[token_R]` (R, D) of `x_TD`; the gradient of a token is the ordered sum over its
    rows.

    `token_R` (R,) is the token of each row, `rows_Tk` (T, k) its inverse, the rows of each token.
    """
    return _Move.apply(x_TD, token_R, rows_Tk, False)


def unpermute_sum(y_RD: Tensor, token_R: Tensor, rows_Tk: Tensor) -> Tensor:
    """Sum each token's rows in a fixed order: `out[t] = sum_j y[rows_Tk[t, j]]`, (T, D); arguments
    as in `permute_tokens`.
    """
    return _Move.apply(y_RD, token_R, rows_Tk, True)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, offsets: Tensor, weight: Tensor | None):
        rows = torch.arange(y.shape[0], dtype=offsets.dtype, device=y.device)
        expert_R = torch.searchsorted(offsets, rows, right=True).clamp_(max=len(offsets) - 1)
        ctx.save_for_backward(bias, offsets, weight, expert_R)
        added = bias.index_select(0, expert_R)
        return y + (added if weight is None else (added * weight.unsqueeze(-1)).to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        bias, offsets, weight, expert_R = ctx.saved_tensors
        dbias = dweight = None
        if ctx.needs_input_grad[1]:
            # A matmul with one column of ones sums over rows; kernels need 16 bytes, so 8 columns.
            factors = dy.new_zeros(dy.shape[0], 8)
            factors[:, 0] = 1 if weight is None else weight
            backend = resolve_backend("auto", dy.device, dy.dtype)
            dbias = grouped_mm_wgrad(factors, dy.contiguous(), offsets, False, backend)[:, 0]
        if weight is not None and ctx.needs_input_grad[3]:
            dweight = (dy * bias.index_select(0, expert_R)).sum(-1, dtype=weight.dtype)
        return dy, dbias, None, dweight


def add_expert_bias(
    y_RN: Tensor, bias_EN: Tensor, offsets_E: Tensor, weight_R: Tensor | None = None
) -> Tensor:
    """Add to each row the bias of its expert, times the row's weight if weights are given. The
    gradient of a bias is a sum over its rows in a fixed order.
    """
    return _AddBias.apply(y_RN, bias_EN.to(y_RN.dtype), offsets_E, weight_R)


class Exchange(Protocol):
    """Gradients in flight between ranks while the experts' backward computes."""

    is_served: bool  # set by experts whose backward calls both `wait` and `begin`

    def wait(self) -> None: ...  # for the gradient of the results, before its first use
    # send the gradient of x while the weights' gradients are computed
    def begin(self, dx_TD: Tensor) -> None: ...


def moe_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    row_weight_R: Tensor,
    token_R: Tensor,
    rows_Tk: Tensor,
    offsets_E: Tensor,
    backend: GroupedGemmBackend = "auto",
    exchange: Exchange | None = None,
) -> Tensor:
    """Return out[t] = sum over the rows r of token t of row_weight[r] * expert_of(r)(x[t]), (T, D)
    in the dtype of x.

    `gate_up_proj` is (E, 2 I, D), gate above up, and `down_proj` (E, D, I); x has their dtype.
    `offsets_E`, int32, is the end of each expert's rows; rows after the last end belong to no
    expert and add nothing. `token_R` and the float32 `row_weight_R` are the token and the router's
    weight of each row. `rows_Tk` are the rows of each token, summed in this order; R or more means
    no row. `exchange` is called in backward when a gradient is needed or can be sent. A weight may
    have an attribute `find_total`, which returns a contiguous float32 tensor for its gradient, and
    whether to add to it. `triton` then calls it, and the weight gets no other gradient.

    Raises ValueError: as `grouped_gemm`.
    """
    chosen = resolve_backend(backend, x_TD.device, x_TD.dtype)
    leaves = (x_TD.contiguous(), gate_up_proj, down_proj, row_weight_R)
    if chosen == "triton":
        token_R, rows_Tk = token_R.int(), rows_Tk.int()
        x, gate_up, down, row_weight = (t.detach() for t in leaves)
        keep = any(t.requires_grad for t in leaves) and torch.is_grad_enabled()
        h_RI, z_R2I = gather_swiglu(x, gate_up, row_weight, token_R, offsets_E, keep)
        if exchange is not None:
            exchange.is_served = keep
        totals = [getattr(weight, "find_total", None) for weight in (gate_up_proj, down_proj)]
        rest = (token_R, rows_Tk, offsets_E, z_R2I, totals, exchange)
        anchor = _Experts.apply(*leaves, *rest) if keep else None
        return _Results.apply(anchor, h_RI, down, rows_Tk, offsets_E)
    gate_up_R2I = grouped_gemm(
        permute_tokens(x_TD, token_R, rows_Tk), gate_up_proj.mT, offsets_E, backend
    )
    y_RD = grouped_gemm(swiglu(gate_up_R2I, row_weight_R), down_proj.mT, offsets_E, backend)
    return unpermute_sum(y_RD, token_R, rows_Tk)


class _Experts(torch.autograd.Function):
    """Autograd node whose backward is the backward of the whole operator. Its result has a single
    element in memory, and only passes the gradient of `_Results` on.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        *saved, ctx.totals, ctx.exchange = others  # in the order of `backward`
        ctx.save_for_backward(x, *saved)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        need_x, need_gate_up, need_down, need_row_weight = ctx.needs_input_grad[:4]
        # Unpack once: under activation checkpointing this recomputes.
        x, gate_up, down, row_weight, token, rows, offsets, z = ctx.saved_tensors
        if ctx.exchange is not None:
            ctx.exchange.wait()
        dout = dout.contiguous()
        dz, h, drow_weight = gather_swiglu_backward(dout, down, row_weight, token, offsets, z)
        dx = dgate_up = ddown = None
        if need_x:
            dx = gather_sum_rows(grouped_mm(dz, gate_up, offsets, "triton"), rows)
            if ctx.exchange is not None:
                ctx.exchange.begin(dx)
        if need_down:
            ddown = _sum_gradient(ctx.totals[1], h, dout, offsets, None, token)
        del h
        if need_gate_up:
            dgate_up = _sum_gradient(ctx.totals[0], x, dz, offsets, token, None)
        drow_weight = drow_weight.to(row_weight.dtype) if need_row_weight else None
        return dx, dgate_up, ddown, drow_weight, *[None] * 6


def _sum_gradient(find_total: Any, x: Tensor, dy: Tensor, offsets: Tensor, *rows: Any) -> Any:
    """Return the gradient of a weight, or write it into the tensor from `find_total` and return
    None.
    """
    if find_total is not None:
        grouped_mm_wgrad_into(x, dy, offsets, *find_total(), *rows)
        return None
    total = x.new_empty(len(offsets), dy.shape[1], x.shape[1])
    grouped_mm_wgrad_into(x, dy, offsets, total, False, *rows)
    return total


class _Results(torch.autograd.Function):
    """Autograd node of the second matmul and the sum. It saves no tensor, so a recomputation that
    ends with the layer skips them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Any, h: Any, down: Any, rows: Any, offsets: Any) -> Tensor:
        return gather_sum_rows(grouped_mm(h, down.mT, offsets, "triton"), rows)

    @staticmethod
    def backward(ctx: Any, dout: Tensor):
        return dout, None, None, None, None


def empty_swiglu(
    x: Tensor, gate_up: Tensor, row_weight: Tensor, token: Any, offsets: Any, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the results of `gather_swiglu` without data."""
    rows, width = row_weight.shape[0], gate_up.shape[1]
    return x.new_empty(rows, width // 2), x.new_empty(rows if keep else 0, width)


def _empty_gradients(*operands: Tensor) -> tuple[Tensor, ...]:
    *_, row_weight, _, _, z = operands
    h = z.new_empty(z.shape[0], z.shape[1] // 2)
    return torch.empty_like(z), h, torch.empty_like(row_weight, dtype=torch.float32)


_LAUNCHERS = "titanlite.ops.launchers"
# (h, z): h (R, I) from z (R, 2 I), multiplied by the row's weight; z is empty unless `keep`.
gather_swiglu = define_operator(
    "gather_swiglu(Tensor x, Tensor gate_up, Tensor row_weight, Tensor token, Tensor offsets,"
    " bool keep) -> (Tensor, Tensor)",
    _LAUNCHERS,
    empty_swiglu,
)
# (dz, h, drow_weight); the last one is float32.
gather_swiglu_backward = define_operator(
    "gather_swiglu_backward(Tensor dout, Tensor down, Tensor row_weight, Tensor token,"
    " Tensor offsets, Tensor z) -> (Tensor, Tensor, Tensor)",
    _LAUNCHERS,
    _empty_gradients,
)


@register_flop_formula(torch.ops.titanlite.gather_swiglu)
def _(x: Any, gate_up: Any, row_weight: Any, *rest: Any, **options: Any) -> int:
    return 2 * row_weight[0] * gate_up[1] * gate_up[2]


@register_flop_formula(torch.ops.titanlite.gather_swiglu_backward)
def _(dout: Any, down: Any, row_weight: Any, *rest: Any, **options: Any) -> int:
    return 2 * row_weight[0] * down[1] * down[2]
