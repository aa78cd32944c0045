"""Chunked linear cross entropy: output projection and loss in one, so that full logits never exist.

For Qwen3 (V = 151,936) and 16,384 tokens, float32 logits and their gradient would take 20 GB. Here a chunk of tokens
is projected, its loss and its gradients are computed at once, and the logits are dropped; kept are the gradients of
the hidden states and of the weight, scaled in backward by the upstream scalar.

Shapes: T tokens, C tokens of a chunk, D width, V vocabulary rows of this rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary rows that this rank holds, and the two reductions over the ranks that hold the others.

    Attributes:
        start: first vocabulary row of this rank's weight.
        vocab_size: rows of all ranks together.
        reduce_max, reduce_sum: all-reduce a (C,) or (2, C) tensor over the vocabulary's ranks, out of place; every
            rank calls them in the same order.
    """

    start: int
    vocab_size: int
    reduce_max: Callable[[torch.Tensor], torch.Tensor]
    reduce_sum: Callable[[torch.Tensor], torch.Tensor]


def _chunk_loss(logits_CV: torch.Tensor, labels_C: torch.Tensor, shard: VocabShard | None):
    """Loss (C,) of each token, and in place of the logits the gradient of its sum, softmax - one_hot.

    A label outside the vocabulary gives NaN in both, for a plausible number would hide it.
    """
    max_C = logits_CV.amax(dim=-1)
    if shard is not None:
        max_C = shard.reduce_max(max_C)
    valid_C = labels_C != IGNORE_INDEX
    start, vocab_size = (0, logits_CV.shape[-1]) if shard is None else (shard.start, shard.vocab_size)
    factor_C = valid_C.to(logits_CV.dtype).masked_fill(valid_C & ((labels_C < 0) | (labels_C >= vocab_size)), math.nan)
    local_C = labels_C - start
    mine_C = valid_C & (local_C >= 0) & (local_C < logits_CV.shape[-1])
    column_C1 = local_C.where(mine_C, 0).unsqueeze(-1)

    logits_CV.sub_(max_C.unsqueeze(-1))
    target_C = logits_CV.gather(-1, column_C1).squeeze(-1).where(mine_C, 0.0)
    exp_CV = logits_CV.exp_()
    sum_C = exp_CV.sum(dim=-1)
    if shard is not None:
        sum_C, target_C = shard.reduce_sum(torch.stack([sum_C, target_C])).unbind(0)
    loss_C = (sum_C.log() - target_C) * factor_C

    grad_CV = exp_CV.mul_((factor_C / sum_C).unsqueeze(-1))
    grad_CV.scatter_add_(-1, column_C1, -mine_C.unsqueeze(-1).to(grad_CV.dtype))
    return loss_C, grad_CV


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_T: torch.Tensor,
        chunk_tokens: int,
        shard: VocabShard | None,
        grad_enabled: bool,
    ) -> torch.Tensor:
        need_hidden, need_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        accumulate = torch.promote_types(weight_VD.dtype, torch.float32)
        dhidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=accumulate) if need_weight else None
        losses = []
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD = hidden_TD[rows]
            logits_CV = (hidden_CD @ weight_VD.T).to(accumulate)
            loss_C, grad_CV = _chunk_loss(logits_CV, labels_T[rows], shard)
            losses.append(loss_C)
            grad_CV = grad_CV.to(hidden_TD.dtype)
            if dhidden_TD is not None:
                torch.mm(grad_CV, weight_VD, out=dhidden_TD[rows])
            if dweight_VD is not None:
                if accumulate == hidden_TD.dtype:
                    dweight_VD.addmm_(grad_CV.T, hidden_CD)
                else:  # sum the chunks in float32, or small gradients drown in bfloat16's 8 bits
                    dweight_VD += grad_CV.T @ hidden_CD
        ctx.save_for_backward(dhidden_TD, dweight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return torch.cat(losses).sum() if losses else hidden_TD.new_zeros((), dtype=accumulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        dhidden_TD, dweight_VD = ctx.saved_tensors
        if dhidden_TD is not None:
            # As a matrix the factor stays float32; a scalar would be rounded to bfloat16 first, up to 0.4 % off.
            dhidden_TD = torch.mul(dhidden_TD, dloss.view(1, 1), out=torch.empty_like(dhidden_TD))
        if dweight_VD is not None:
            dweight_VD = (dweight_VD * dloss).to(ctx.weight_dtype)
        return dhidden_TD, dweight_VD, None, None, None, None


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    chunk_tokens: int = 1024,
    shard: VocabShard | None = None,
) -> torch.Tensor:
    """Sum over the tokens of `-log softmax(hidden @ weight.T)[label]`, as a float32 scalar (float64 for float64).

    Args:
        hidden_TD: (T, D) hidden states, any float dtype.
        weight_VD: (V, D) output projection, same dtype; with `shard`, this rank's rows only.
        labels_T: (T,) int64 ids of the whole vocabulary; IGNORE_INDEX (-100) leaves a token out.
        chunk_tokens: tokens projected at once; peak memory is about 2 * chunk_tokens * V floats.
        shard: set when the vocabulary is split over ranks. Collectives: two per chunk; all ranks hold the same tokens.
            The result is the full loss on every rank; the gradient of `hidden_TD` is this rank's part of a sum.
    """
    # Inside forward gradients are always off, so it must be told whether they are wanted.
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD, labels_T, chunk_tokens, shard, torch.is_grad_enabled())
