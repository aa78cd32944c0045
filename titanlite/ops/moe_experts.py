"""The experts of one layer on routed tokens: gather, GEMM, SwiGLU, GEMM, gather-sum.

With the `triton` backend, and with `torch` where the kernel `moe_experts` is installed, it is fused. Only
`z = [gate | up]`, (R, 2 I), is kept for backward: h is computed again while its gradient is at hand, and neither the
permuted tokens nor the results per row are needed, so that a recomputation ends before the second GEMM. The kernels
gather the tokens inside the first GEMM and apply SwiGLU and the router's weight to its accumulator. Otherwise the same
is composed of `permute_tokens`, `grouped_gemm`, `swiglu` and `unpermute_sum`.

Shapes: T tokens, k experts per token, R rows grouped by expert, E experts, I expert width, D hidden.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.ops.elementwise import swiglu
from titanlite.ops.grouped_gemm import GroupedGemmBackend, grouped_gemm, grouped_mm, grouped_mm_wgrad, resolve_backend
from titanlite.ops.kernels import find_kernel
from titanlite.ops.permute import gather_sum_rows, permute_tokens, unpermute_sum


class Travel(Protocol):
    """Gradients in flight between ranks while the experts' backward computes something else."""

    is_served: bool  # set by experts whose backward calls both `wait` and `begin`

    def wait(self) -> None: ...  # for the gradient of the results, before its first use
    def begin(self, dx_TD: Tensor) -> None: ...  # send the gradient of x; meanwhile those of the weights are computed


def moe_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    row_weight_R: Tensor,
    token_R: Tensor,
    rows_Tk: Tensor,
    offsets_E: Tensor,
    backend: GroupedGemmBackend = "auto",
    travel: Travel | None = None,
) -> Tensor:
    """out[t] = sum over the rows r of token t of row_weight[r] * expert_of(r)(x[t]), (T, D) in the dtype of x.

    `gate_up_proj` is (E, 2 I, D), gate above up, `down_proj` (E, D, I); x has their dtype. `offsets_E`, int32, is the
    end of each expert's rows; rows after the last end belong to none and add nothing. `token_R` and the float32
    `row_weight_R` are the token of each row and the router's weight of it. `rows_Tk` are the rows of each token, summed
    in this order; R or more means no row. `travel` is called in backward when a gradient is needed or can be sent.

    Raises ValueError as `grouped_gemm`.
    """
    chosen = resolve_backend(backend, x_TD.device, x_TD.dtype)
    leaves = (x_TD.contiguous(), gate_up_proj, down_proj, row_weight_R)
    if chosen == "triton":
        token_R, rows_Tk = token_R.int(), rows_Tk.int()
        x, gate_up, down, row_weight = (t.detach() for t in leaves)
        keep = any(t.requires_grad for t in leaves) and torch.is_grad_enabled()
        h_RI, z_R2I = gather_swiglu(x, gate_up, row_weight, token_R, offsets_E, keep)
        if travel is not None:
            travel.is_served = keep
        anchor = _Experts.apply(*leaves, token_R, rows_Tk, offsets_E, z_R2I, travel) if keep else None
        return _Results.apply(anchor, h_RI, down, rows_Tk, offsets_E)
    if chosen == "torch" and (kernel := find_kernel("moe_experts", x_TD.device)) is not None:
        return kernel(*leaves, token_R, rows_Tk, offsets_E)
    gate_up_R2I = grouped_gemm(permute_tokens(x_TD, token_R, rows_Tk), gate_up_proj.mT, offsets_E, backend)
    y_RD = grouped_gemm(swiglu(gate_up_R2I, row_weight_R), down_proj.mT, offsets_E, backend)
    return unpermute_sum(y_RD, token_R, rows_Tk)


class _Experts(torch.autograd.Function):
    """Backward of all. The result only brings the gradient from `_Results` here: its one element is not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        *saved, ctx.travel = others  # as `backward` takes them
        ctx.save_for_backward(x, *saved)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        need_x, need_gate_up, need_down, need_row_weight = ctx.needs_input_grad[:4]
        # Once: under activation checkpointing, unpacking recomputes and may not be repeated.
        x, gate_up, down, row_weight, token, rows, offsets, z = ctx.saved_tensors
        if ctx.travel is not None:
            ctx.travel.wait()
        dout = dout.contiguous()
        dz, h, drow_weight = gather_swiglu_backward(dout, down, row_weight, token, offsets, z)
        dx = dgate_up = ddown = None
        if need_x:
            dx = gather_sum_rows(grouped_mm(dz, gate_up, offsets, "triton"), rows)
            if ctx.travel is not None:
                ctx.travel.begin(dx)
        if need_down:
            ddown = grouped_mm_wgrad(h, dout, offsets, True, "triton", None, token).mT
        del h
        if need_gate_up:
            dgate_up = grouped_mm_wgrad(x, dz, offsets, True, "triton", token).mT
        drow_weight = drow_weight.to(row_weight.dtype) if need_row_weight else None
        return dx, dgate_up, ddown, drow_weight, None, None, None, None, None


class _Results(torch.autograd.Function):
    """The second product and the sum. No tensor is saved: a recomputation that ends with the layer leaves it out."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, h: Any, down: Any, rows: Any, offsets: Any) -> Tensor:
        return gather_sum_rows(grouped_mm(h, down.mT, offsets, "triton"), rows)

    @staticmethod
    def backward(ctx: Any, dout: Tensor):
        return dout, None, None, None, None


@torch.library.custom_op("titanlite::gather_swiglu", mutates_args=())
def gather_swiglu(
    x: Tensor, gate_up: Tensor, row_weight: Tensor, token: Tensor, offsets: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return (h, z) by Triton: h (R, I), multiplied by the row's weight, of z (R, 2 I); z is empty unless `keep`."""
    from titanlite.ops import launchers as kernels

    h, z = kernels.row_grouped_swiglu(x, gate_up.mT, offsets, token, row_weight, keep=keep)
    return h, x.new_empty(0, 2 * h.shape[1]) if z is None else z


@torch.library.custom_op("titanlite::gather_swiglu_backward", mutates_args=())
def gather_swiglu_backward(
    dout: Tensor, down: Tensor, row_weight: Tensor, token: Tensor, offsets: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dz, h, drow_weight) by Triton; the last in float32."""
    from titanlite.ops import launchers as kernels

    return kernels.row_grouped_swiglu_backward(dout, down, offsets, token, row_weight, z)


@gather_swiglu.register_fake
def _(x: Any, gate_up: Any, row_weight: Any, token: Any, offsets: Any, keep: bool) -> Any:
    rows, width = token.shape[0], gate_up.shape[1]
    return x.new_empty(rows, width // 2), x.new_empty(rows if keep else 0, width)


@gather_swiglu_backward.register_fake
def _(dout: Any, down: Any, row_weight: Any, token: Any, offsets: Any, z: Any) -> Any:
    return torch.empty_like(z), z.new_empty(len(z), z.shape[1] // 2), torch.empty_like(row_weight, dtype=torch.float32)
