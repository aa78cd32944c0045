"""Choice of experts for each token, its gradient, and rows in the order of their experts.

With the kernels (`routing_triton.py`) a choice and its gradient are one launch each, and the order
is two; otherwise they are composed of torch's operators. Of equal scores the kernels choose the
expert with the lowest number; torch does not say which.

Shapes: B sequences of S tokens, T = B * S, E experts, k chosen per token, R = T * k rows, N parts
of a sequence.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.ops.kernels import define_operator, like
from titanlite.ops.matmul import has_kernels

if TYPE_CHECKING:  # operators import only torch and triton
    from titanlite.config.model import ModelConfig


def tokens_at_once(num_experts: int) -> int:
    """Return the number of tokens per program, which holds all scores of its tokens: 2048, with
    padding.
    """
    return max(2048 >> (num_experts - 1).bit_length(), 1)


def empty_choice(logits: Tensor, bias: Any, valid: Any, top_k: int, *rest: Any) -> Any:
    """Return the results of `choose_experts` without data."""
    batch, size, num_experts = logits.shape
    parts = (batch, -(-size // tokens_at_once(num_experts)), num_experts)
    weights = logits.new_empty(batch * size, top_k)
    sums = logits.new_empty(parts)
    ids = torch.empty_like(weights, dtype=torch.int64)
    return weights, ids, torch.empty_like(sums, dtype=torch.int32), sums


def empty_order(ids: Tensor, num_ids: int, num_rows: int) -> tuple[Tensor, ...]:
    """Return the results of `group_by_expert` without data."""
    shapes = (num_rows, num_rows, ids.shape, num_ids)
    return tuple(ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


_KERNELS = "titanlite.ops.routing_triton"
_choose_experts = define_operator(
    "choose_experts(Tensor logits, Tensor bias, Tensor? valid, int top_k, int num_groups,"
    " int num_limited, bool is_softmax, bool is_normalized) -> (Tensor, Tensor, Tensor, Tensor)",
    _KERNELS,
    empty_choice,
)
_weigh_experts_backward = define_operator(
    "weigh_experts_backward(Tensor dweights, Tensor? daux, Tensor logits, Tensor? valid,"
    " Tensor weights, Tensor ids, Tensor? load, bool is_softmax, bool is_normalized) -> Tensor",
    _KERNELS,
    like(2),
)
_group_rows = define_operator(
    "group_rows(Tensor ids, int num_ids, int num_rows) -> (Tensor, Tensor, Tensor, Tensor)",
    _KERNELS,
    empty_order,
)


def takes_kernels(x: Tensor) -> bool:
    """Return True if the kernels serve logits, which are float32, or ids `x`. In compiled code
    torch fuses these operations itself.
    """
    return not torch.compiler.is_compiling() and has_kernels(x.device, torch.float32)


def choose_experts(
    logits_BSE: Tensor,
    expert_bias_E: Tensor,
    valid_BS: Tensor | None,
    config: "ModelConfig",
    *,
    counts: bool,
    sums: bool,
) -> tuple[Any, ...]:
    """Choose top_k experts for each token by their scores plus `expert_bias`; all tensors are
    contiguous.

    Return (weights_Tk, ids_Tk, counts_BNE, sums_BNE). Weights, float32, are the scores without the
    bias and before the scaling factor; ids are int64. Counts are the numbers of rows of each
    expert, and sums are the sums of the normalized scores of each expert; both are in N parts, and
    leave out tokens whose `valid_BS` is False. They may be None unless `counts` or `sums` is True.
    """
    if takes_kernels(logits_BSE):
        return _choose_experts(
            logits_BSE,
            expert_bias_E,
            valid_BS,
            config.top_k,
            config.num_expert_groups,
            config.num_limited_groups,
            config.score_func == "softmax",
            config.norm_topk_prob,
        )
    scores_BSE = _score(logits_BSE, config)
    scores_TE = scores_BSE.flatten(0, 1)
    choice_TE = scores_TE + expert_bias_E
    if config.num_limited_groups < config.num_expert_groups:
        choice_TE = _limit_groups(choice_TE, config)
    ids_Tk = choice_TE.topk(config.top_k, dim=-1).indices
    weights_Tk = scores_TE.gather(-1, ids_Tk)
    if config.norm_topk_prob:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + 1e-20)
    counts_B1E = None
    if counts:
        counts_B1E = _count(ids_Tk, valid_BS, scores_BSE.shape[0], config.num_experts)
    sums_B1E = None
    if sums:
        share_BSE = _shares(scores_BSE, config)
        sums_B1E = (
            share_BSE.sum(dim=1, keepdim=True)
            if valid_BS is None
            else valid_BS.to(share_BSE.dtype).unsqueeze(1) @ share_BSE
        )
    return weights_Tk, ids_Tk, counts_B1E, sums_B1E


def _score(logits_BSE: Tensor, config: "ModelConfig") -> Tensor:
    return logits_BSE.softmax(dim=-1) if config.score_func == "softmax" else logits_BSE.sigmoid()


def _shares(scores_BSE: Tensor, config: "ModelConfig") -> Tensor:
    """Return each score divided by the sum of its token's scores."""
    return (
        scores_BSE
        if config.score_func == "softmax"
        else scores_BSE / scores_BSE.sum(dim=-1, keepdim=True)
    )


def _limit_groups(choice_TE: Tensor, config: "ModelConfig") -> Tensor:
    """Mask all experts except the groups with the highest sum of their two best scores."""
    grouped_TGe = choice_TE.unflatten(-1, (config.num_expert_groups, -1))
    best_TG = grouped_TGe.topk(min(2, grouped_TGe.shape[-1]), dim=-1).values.sum(dim=-1)
    kept_Tg = best_TG.topk(config.num_limited_groups, dim=-1).indices
    allowed_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, kept_Tg, True)
    return grouped_TGe.masked_fill(~allowed_TG.unsqueeze(-1), float("-inf")).flatten(1)


def _count(ids_Tk: Tensor, valid_BS: Tensor | None, batch: int, num_experts: int) -> Tensor:
    """Count each expert's valid rows per sequence, (B, 1, E). int64, because bfloat16 counts only
    to 256 and float32 to 16.7 M.
    """
    if valid_BS is not None:
        ids_Tk = ids_Tk.masked_fill(~valid_BS.reshape(-1, 1), num_experts)
    return count_rows(ids_Tk.view(batch, 1, -1), num_experts)


def count_rows(ids: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert is in the int64 `ids` (..., R); return (..., E). The id
    `num_experts` does not count.
    """
    counts = ids.new_zeros(*ids.shape[:-1], num_experts + 1)
    return counts.scatter_add_(-1, ids, ids.new_ones(1).expand_as(ids))[..., :num_experts]


class WeighExperts(torch.autograd.Function):
    """Weights of a choice, and the sequence-wise balance loss (arXiv:2412.19437, eq. 17 to 20) as a
    sum over this rank's tokens.

    Operands: the configuration, logits (B, S, E), valid tokens (B, S) or None, weights and ids of
    the choice, the load of each expert (B, E), and its sum of normalized scores, (B, E). Without a
    load there is no loss. A normalized score has the gradient of softmax; with sigmoid scores y it
    is multiplied by 1 - y.
    """

    @staticmethod
    def forward(ctx: Any, config: "ModelConfig", logits: Any, valid: Any, *chosen: Any):
        weights, ids, load, sums = chosen
        ctx.config = config
        ctx.save_for_backward(logits, valid, weights, ids, load)
        aux = None if load is None else torch.dot(load.flatten(), sums.flatten())
        return weights.view_as(weights), aux

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_Tk: Tensor, daux: Tensor | None) -> tuple[Any, ...]:
        config = ctx.config
        is_softmax = config.score_func == "softmax"
        saved = ctx.saved_tensors
        logits_BSE, valid_BS, weights_Tk, ids_Tk, load_BE = saved
        if takes_kernels(logits_BSE):
            operands = (dweights_Tk.contiguous(), daux, *saved, is_softmax, config.norm_topk_prob)
            return None, _weigh_experts_backward(*operands), *[None] * 5
        scores_BSE = _score(logits_BSE, config)
        softmax_backward = torch.ops.aten._softmax_backward_data
        if load_BE is None:
            dlogits_BSE = torch.zeros_like(scores_BSE)
        else:
            dshare_BSE = (daux * load_BE).unsqueeze(1)
            dshare_BSE = dshare_BSE if valid_BS is None else dshare_BSE * valid_BS.unsqueeze(-1)
            share_BSE = _shares(scores_BSE, config)
            dlogits_BSE = softmax_backward(
                dshare_BSE.expand_as(share_BSE), share_BSE, -1, share_BSE.dtype
            )
        if config.norm_topk_prob:
            dchosen_Tk = softmax_backward(dweights_Tk, weights_Tk, -1, weights_Tk.dtype)
        else:
            dchosen_Tk = dweights_Tk * weights_Tk
            if is_softmax:
                dlogits_BSE.addcmul_(
                    scores_BSE, dchosen_Tk.sum(dim=-1).view(*scores_BSE.shape[:2], 1), value=-1
                )
        dlogits_BSE.view(-1, scores_BSE.shape[-1]).scatter_add_(1, ids_Tk, dchosen_Tk)
        dlogits_BSE = dlogits_BSE if is_softmax else dlogits_BSE.mul_(1 - scores_BSE)
        return None, dlogits_BSE, *[None] * 5


def group_by_expert(
    ids_Tk: Tensor, num_experts: int, num_rows: int | None = None
) -> tuple[Tensor, ...]:
    """Order rows by their ids, stable in the tokens; return (order_R, token_R, rows_Tk, ends_E).

    Sorted row r is the choice at position `order_R[r]` of the flattened (T, k) ids, and belongs to
    token `token_R[r]`. With `num_rows` both have only the first sorted rows. `rows_Tk` has the
    sorted row of each choice: the inverse of the whole `order_R`. `ends_E` is the end of each
    expert's rows. Ids from `num_experts` on come last and do not count. All results are int32, but
    `order_R` from torch is int64.
    """
    if takes_kernels(ids_Tk):
        num_rows = ids_Tk.numel() if num_rows is None else num_rows
        return _group_rows(ids_Tk.contiguous(), num_experts, num_rows)
    ids_R, order_R = ids_Tk.flatten().sort(stable=True)
    arange_R = torch.arange(order_R.numel(), dtype=torch.int32, device=order_R.device)
    rows_R = torch.empty_like(arange_R).scatter_(0, order_R, arange_R)
    order_R = order_R[:num_rows]
    token_R = (order_R // ids_Tk.shape[1]).int()
    ids_E = torch.arange(num_experts, dtype=ids_R.dtype, device=ids_R.device)
    ends_E = torch.searchsorted(ids_R, ids_E, right=True, out_int32=True)
    return order_R, token_R, rows_R.view(ids_Tk.shape), ends_E
