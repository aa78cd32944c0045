"""Token permutation for mixture of experts: gather rows out, gather-sum rows back, each the other's gradient.

Both directions are gathers. A scatter-add (autograd's own backward of `index_select`) would use atomics on CUDA, whose
order, and so whose rounding, changes from run to run.

Shapes: T tokens, k experts per token, R = T * k routed rows, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.ops.grouped_gemm import resolve_backend


def gather_sum(y_RD: Tensor, rows_Tk: Tensor) -> Tensor:
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
def gather_sum_rows(y: Tensor, rows: Tensor) -> Tensor:
    """Compute `gather_sum` by titanlite's kernel."""
    from titanlite.ops import launchers as kernels

    return kernels.gather_sum(y.contiguous(), rows)


@gather_sum_rows.register_fake
def _(y: Tensor, rows: Tensor) -> Tensor:
    return y.new_empty(rows.shape[0], y.shape[1])


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


def sort_rows(ids_Tk: Tensor, num_rows: int | None = None) -> tuple[Tensor, ...]:
    """Order rows by their ids, stable in the tokens; return (ids_R, order_R, token_R, rows_Tk).

    `order_R`, int64, has the place in the flattened (T, k) ids of each sorted row, or of the first `num_rows`, and
    `token_R`, int32, its token. `rows_Tk`, int32, has the sorted row of each choice: the inverse of all of `order_R`.
    """
    ids_R, order_R = ids_Tk.flatten().sort(stable=True)
    arange_R = torch.arange(order_R.numel(), dtype=torch.int32, device=order_R.device)
    rows_R = torch.empty_like(arange_R).scatter_(0, order_R, arange_R)
    token_R = torch.empty_like(order_R[:num_rows], dtype=torch.int32)
    torch.div(order_R[:num_rows], ids_Tk.shape[1], rounding_mode="floor", out=token_R)
    return ids_R, order_R[:num_rows], token_R, rows_R.view(ids_Tk.shape)


def group_by_expert(ids_Tk: Tensor, num_experts: int, num_rows: int | None = None) -> tuple[Tensor, ...]:
    """Return `sort_rows` without the sorted ids, and the end of each expert's rows, int32.

    Ids from `num_experts` on, below 2**15, are last and not counted.
    """
    if ids_Tk.itemsize > 2 and num_experts < 2**15:
        ids_Tk = ids_Tk.to(torch.int16)  # CUDA sorts by radix: fewer bits, fewer passes
    ids_R, *order = sort_rows(ids_Tk, num_rows)
    ids_E = torch.arange(num_experts, dtype=ids_R.dtype, device=ids_R.device)
    return *order, torch.searchsorted(ids_R, ids_E, right=True, out_int32=True)


def permute_tokens(x_TD: Tensor, token_R: Tensor, rows_Tk: Tensor) -> Tensor:
    """Gather `x[token_R]` (R, D) of `x_TD`; the gradient of a token is the ordered sum over its rows.

    `token_R` (R,) is the token of each row, `rows_Tk` (T, k) its inverse, the rows of each token.
    """
    return _Move.apply(x_TD, token_R, rows_Tk, False)


def unpermute_sum(y_RD: Tensor, token_R: Tensor, rows_Tk: Tensor) -> Tensor:
    """Sum each token's rows in a fixed order: `out[t] = sum_j y[rows_Tk[t, j]]`, (T, D); arguments as above."""
    return _Move.apply(y_RD, token_R, rows_Tk, True)
