"""Token permutation for mixture of experts: gather rows out, gather-sum rows back, each the other's gradient.

Both directions are gathers. A scatter-add (autograd's own backward of `index_select`) would use atomics on CUDA, whose
order, and so whose rounding, changes from run to run.

Shapes: T tokens, k experts per token, R = T * k routed rows, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from titanlite.ops.grouped_gemm import resolve_backend


def gather_sum(y_RD: torch.Tensor, rows_Tk: torch.Tensor) -> torch.Tensor:
    """Return out[t] = sum over j of y[rows[t, j]], in order of j, in float32 or better; no (T, k, D) copy.

    Rows from R on, which only a token with fewer than k rows has, are zeros.
    """
    if rows_Tk.shape[1] == 1:
        return y_RD.index_select(0, rows_Tk.squeeze(1))
    if resolve_backend("auto", y_RD.device, y_RD.dtype) == "triton":
        return gather_sum_rows(y_RD, rows_Tk)
    if rows_Tk.numel() > y_RD.shape[0]:
        y_RD, rows_Tk = F.pad(y_RD, (0, 0, 0, 1)), rows_Tk.clamp(max=y_RD.shape[0])
    return F.embedding_bag(rows_Tk, y_RD, mode="sum")


@torch.library.custom_op("titanlite::gather_sum", mutates_args=())
def gather_sum_rows(y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`gather_sum` by titanlite's kernel."""
    from titanlite.ops import launchers as kernels

    return kernels.gather_sum(y.contiguous(), rows)


@gather_sum_rows.register_fake
def _(y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return y.new_empty(rows.shape[0], y.shape[1])


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, token_R: torch.Tensor, rows_Tk: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_Tk)
        return x_TD.index_select(0, token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: torch.Tensor):
        (rows_Tk,) = ctx.saved_tensors
        return gather_sum(dy_RD.contiguous(), rows_Tk), None, None


class _UnpermuteSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: torch.Tensor, token_R: torch.Tensor, rows_Tk: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_R)
        return gather_sum(y_RD, rows_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: torch.Tensor):
        (token_R,) = ctx.saved_tensors
        return dout_TD.index_select(0, token_R), None, None


def group_by_expert(
    topk_expert_ids_Tk: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order the rows by expert, stable in the tokens. Ids from `num_experts` on are last and not counted.

    Returns:
        order_R: index into the flattened (T, k) choices for each grouped row, int64.
        rows_Tk: grouped row of each choice, the inverse of `order_R`.
        counts_E: rows per expert, int64.
    """
    ids_R = topk_expert_ids_Tk.flatten().clamp(max=num_experts)
    keys_R = ids_R.to(torch.int16) if num_experts < 2**15 else ids_R  # CUDA sorts by radix: fewer bits, fewer passes
    order_R = keys_R.argsort(stable=True)
    rows_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.numel(), device=order_R.device))
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_R.device)
    counts.scatter_add_(0, ids_R, torch.ones_like(ids_R))
    return order_R, rows_R.view_as(topk_expert_ids_Tk), counts[:-1]


def permute_tokens(x_TD: torch.Tensor, token_R: torch.Tensor, rows_Tk: torch.Tensor) -> torch.Tensor:
    """Gather `x[token_R]` (R, D) of `x_TD`; the gradient of a token is the ordered sum over its rows.

    `token_R` (R,) is the token of each row, `rows_Tk` (T, k) its inverse, the rows of each token; both int64.
    """
    return _Permute.apply(x_TD, token_R, rows_Tk)


def unpermute_sum(y_RD: torch.Tensor, token_R: torch.Tensor, rows_Tk: torch.Tensor) -> torch.Tensor:
    """Sum each token's rows in a fixed order: `out[t] = sum_j y[rows_Tk[t, j]]`, (T, D); arguments as above."""
    return _UnpermuteSum.apply(y_RD, token_R, rows_Tk)
