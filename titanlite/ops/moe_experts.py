"""The experts of one layer on routed tokens: gather, GEMM, SwiGLU, GEMM, gather-sum.

With the `triton` backend, and with `torch` where the kernel `moe_experts` is installed, all of it is one operator. Only
`z = [gate | up]`, (R, 2 I), is kept for backward: h is computed again while its gradient is at hand, and neither the
permuted tokens nor the results per row are needed. The kernels gather the tokens inside the first GEMM and apply SwiGLU
and the router's weight to its accumulator. Else the same is composed of `permute_tokens`, `grouped_gemm`, `swiglu` and
`unpermute_sum`.

Shapes: T tokens, k experts per token, R = T * k rows grouped by expert, E experts, I expert width, D hidden.
"""

from typing import Any

import torch

from titanlite.ops.elementwise import swiglu
from titanlite.ops.grouped_gemm import GroupedGemmBackend, grouped_gemm, resolve_backend
from titanlite.ops.kernels import find_kernel
from titanlite.ops.permute import permute_tokens, unpermute_sum


def moe_experts(
    x_TD: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    row_weight_R: torch.Tensor,
    token_R: torch.Tensor,
    rows_Tk: torch.Tensor,
    offsets_E: torch.Tensor,
    backend: GroupedGemmBackend = "auto",
) -> torch.Tensor:
    """out[t] = sum over the rows r of token t of row_weight[r] * expert_of(r)(x[t]), (T, D) in the dtype of x.

    Args:
        x_TD: tokens, the dtype of the weights.
        gate_up_proj: (E, 2 I, D), gate above up.
        down_proj: (E, D, I).
        row_weight_R: the router's weight of each row, float32.
        token_R: token of each row, int64; rows are grouped by expert.
        rows_Tk: rows of each token, int64, the inverse of `token_R`; summed in this order.
        offsets_E: int32 end of each expert's rows. Rows behind the last end belong to no expert and add nothing.
        backend: as in `grouped_gemm`.

    Raises:
        ValueError: as `grouped_gemm`.
    """
    chosen = resolve_backend(backend, x_TD.device, x_TD.dtype)
    if chosen == "triton" or (chosen == "torch" and find_kernel("moe_experts", x_TD.device) is not None):
        keep = any(t.requires_grad for t in (x_TD, gate_up_proj, down_proj, row_weight_R)) and torch.is_grad_enabled()
        if chosen == "triton":
            token_R, rows_Tk = token_R.int(), rows_Tk.int()
        return moe_experts_forward(
            x_TD.contiguous(), gate_up_proj, down_proj, row_weight_R, token_R, rows_Tk, offsets_E, keep, chosen
        )[0]
    gate_up_R2I = grouped_gemm(permute_tokens(x_TD, token_R, rows_Tk), gate_up_proj.mT, offsets_E, backend)
    y_RD = grouped_gemm(swiglu(gate_up_R2I, row_weight_R), down_proj.mT, offsets_E, backend)
    return unpermute_sum(y_RD, token_R, rows_Tk)


@torch.library.custom_op("titanlite::moe_experts_forward", mutates_args=())
def moe_experts_forward(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    row_weight: torch.Tensor,
    token: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    keep: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, z); z is empty unless `keep`. `backend`: "triton", with int32 indices, or "torch" for a kernel."""
    if backend == "torch":
        kernel = find_kernel("moe_experts", x.device)
        assert kernel is not None
        return kernel(x, gate_up, down, row_weight, token, rows, offsets, keep)
    from titanlite.ops import launchers as kernels

    h, z = kernels.row_grouped_swiglu(x, gate_up.mT, offsets, token, row_weight, keep=keep)
    out = kernels.gather_sum(kernels.row_grouped_gemm(h, down.mT, offsets), rows)
    return out, x.new_empty(0, 2 * h.shape[1]) if z is None else z


@torch.library.custom_op("titanlite::moe_experts_backward", mutates_args=())
def moe_experts_backward(
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
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of (x, gate_up, down, row_weight); of the first three those not `needed` are empty."""
    if backend == "torch":
        kernel = find_kernel("moe_experts_backward", x.device)
        assert kernel is not None
        return kernel(dout, x, gate_up, down, row_weight, token, rows, offsets, z, needed)
    from titanlite.ops import launchers as kernels

    need_x, need_gate_up, need_down, _ = needed
    dz, h, drow_weight = kernels.row_grouped_swiglu_backward(dout, down, offsets, token, row_weight, z)
    ddown = kernels.reduction_grouped_gemm(h, dout, offsets, None, token).mT if need_down else x.new_empty(0)
    del h
    dx = kernels.gather_sum(kernels.row_grouped_gemm(dz, gate_up, offsets), rows) if need_x else x.new_empty(0)
    dgate_up = kernels.reduction_grouped_gemm(x, dz, offsets, token).mT if need_gate_up else x.new_empty(0)
    return dx, dgate_up, ddown, drow_weight


@moe_experts_forward.register_fake
def _(x: torch.Tensor, gate_up: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, token, _, _, keep, _ = others
    return torch.empty_like(x), x.new_empty(token.shape[0] if keep else 0, gate_up.shape[1])


@moe_experts_backward.register_fake
def _(dout: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    x, gate_up, down, row_weight, _, _, _, _, (need_x, need_gate_up, need_down, _), backend = others
    return (
        torch.empty_like(x) if need_x else x.new_empty(0),
        gate_up.new_empty(gate_up.shape) if need_gate_up else x.new_empty(0),
        down.new_empty(down.shape) if need_down else x.new_empty(0),
        row_weight.new_empty(row_weight.shape, dtype=row_weight.dtype if backend == "torch" else torch.float32),
    )


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    x, gate_up, down, row_weight, token, rows, offsets, _, ctx.backend = inputs
    z = output[1]
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gate_up, down, row_weight, token, rows, offsets, z)


def _backward(ctx: Any, dout: torch.Tensor | None, dz: torch.Tensor | None) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 9
    needed = list(ctx.needs_input_grad[:4])
    saved = ctx.saved_tensors  # once: under activation checkpointing, unpacking recomputes and may not be repeated
    grads = moe_experts_backward(dout.contiguous(), *saved, needed, ctx.backend)
    grads = [*grads[:3], grads[3].to(saved[3].dtype)]
    return (*(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, None, None, None, None)


moe_experts_forward.register_autograd(_backward, setup_context=_save_for_backward)
