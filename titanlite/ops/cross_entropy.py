"""Chunked linear cross entropy: output projection and loss in one, so that full logits are never
materialized.

For Qwen3 (V = 151,936) and 16,384 tokens, float32 logits and their gradient would take 20 GB. Here
a chunk of tokens is projected, its loss and its gradients are computed at once, and the logits are
freed. Two operators do the work between the matmuls, on logits in the model's dtype; on CUDA they
are kernels (`kernels_triton.py`).

Losses per token (`reduction="none"`) have one upstream gradient each, unknown in forward: only the
logarithm of the softmax's denominator is saved, and backward projects every chunk again.

Shapes: T tokens, C tokens of a chunk, D width, V vocabulary rows of this rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.ops.kernels import operator, wide_dtype
from titanlite.ops.matmul import get_launchers, has_kernels, sum_over_rows

IGNORE_INDEX = -100
_CACHED_LOGITS = 1 << 19  # as many as stay in a core's cache, in float32


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary rows of this rank, and two all-reduces over the ranks with the other rows."""

    start: int  # first row of this rank's weight
    vocab_size: int  # number of rows on all ranks together
    reduce_max: Callable[[Tensor], Tensor]  # of (C,), out of place
    reduce_sum: Callable[[Tensor], Tensor]  # of (2, C), out of place


def _use_kernels(x: Tensor) -> bool:
    return has_kernels(x.device, x.dtype)


def _targets(logits_CV: Tensor, labels_C: Tensor, shard: VocabShard | None):
    """Return for each token the factor of its loss, whether its label is a column of this rank, and
    the number of that column.

    The factor is 1, or 0 without a label, or NaN for a label outside of the vocabulary: a plausible
    number would hide that.
    """
    valid_C = labels_C != IGNORE_INDEX
    start, vocab_size = (
        (0, logits_CV.shape[-1]) if shard is None else (shard.start, shard.vocab_size)
    )
    factor_C = valid_C.to(wide_dtype(logits_CV)).masked_fill(
        valid_C & ((labels_C < 0) | (labels_C >= vocab_size)), math.nan
    )
    local_C = labels_C - start
    mine_C = valid_C & (local_C >= 0) & (local_C < logits_CV.shape[-1])
    return factor_C, mine_C, local_C.where(mine_C, 0).unsqueeze(-1)


def _softmax_parts(
    logits_CV: Tensor, mine_C: Tensor, column_C1: Tensor, shard: VocabShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum, sum of exp(logit - maximum), and the label's logit - maximum, (C,)."""
    own_max_C, sum_C, target_C = softmax_statistics(logits_CV, column_C1)
    if shard is None:
        return own_max_C, sum_C, (target_C - own_max_C).where(mine_C, 0.0)
    max_C = shard.reduce_max(own_max_C)
    sum_C = sum_C * (own_max_C - max_C).exp()
    target_C = (target_C - max_C).where(mine_C, 0.0)
    sum_C, target_C = shard.reduce_sum(torch.stack([sum_C, target_C])).unbind(0)
    return max_C, sum_C, target_C


def _like_statistics(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    maximum, total, target = (
        logits.new_empty(logits.shape[0], dtype=wide_dtype(logits)) for _ in range(3)
    )
    return maximum, total, target


@operator(fake=_like_statistics)
def softmax_statistics(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (maximum, sum of exp(logit - maximum), logit in `column`) of each row of `logits` (C,
    V).

    The three have the shape (C,), and are float32, or float64 for float64 logits.
    """
    if _use_kernels(logits):
        return get_launchers().softmax_statistics(logits, column)
    wide = logits.to(wide_dtype(logits))
    maximum = wide.amax(dim=-1)
    # Block by block, because a copy of all logits would go through main memory.
    rows = max(1, _CACHED_LOGITS // wide.shape[-1])
    blocks = zip(wide.split(rows), maximum.unsqueeze(-1).split(rows), strict=True)
    total = torch.cat([(block - peak).exp_().sum(dim=-1) for block, peak in blocks])
    return maximum, total, wide.gather(-1, column).squeeze(-1)


@operator(fake=lambda *operands: None, mutates_args=("logits",))
def softmax_gradient_(
    logits: Tensor, shift: Tensor, scale: Tensor, hit: Tensor, column: Tensor
) -> None:
    """Overwrite `logits` (C, V) by exp(logit - shift) * scale, and subtract `hit` in each row's
    `column`. The other arguments have the shape (C,) and a wide dtype.
    """
    if _use_kernels(logits):
        get_launchers().softmax_gradient_(logits, shift, scale, hit, column)
        return
    wide = logits.to(wide_dtype(logits))  # the same tensor, if the logits are wide
    wide.sub_(shift.unsqueeze(-1)).exp_().mul_(scale.unsqueeze(-1)).scatter_add_(
        -1, column, -hit.unsqueeze(-1)
    )
    if wide is not logits:
        logits.copy_(wide)


def _chunks(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk_tokens: int,
    shard: VocabShard | None,
) -> Iterator[tuple[Any, ...]]:
    """Yield each chunk's rows and logits, and its `_targets`."""
    for start in range(0, hidden_TD.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        logits_CV = hidden_TD[rows] @ weight_VD.T
        yield rows, logits_CV, *_targets(logits_CV, labels_T[rows], shard)


class _Gradients:
    """Gradients of hidden states and weight, summed chunk by chunk; None if not needed."""

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, needed: Sequence[bool]) -> None:
        self._hidden_TD, self._weight_VD = hidden_TD, weight_VD
        self.hidden = torch.empty_like(hidden_TD) if needed[0] else None
        self.weight = (
            torch.zeros_like(weight_VD, dtype=wide_dtype(weight_VD)) if needed[1] else None
        )

    def add(self, rows: slice, grad_CV: Tensor) -> None:
        """Add a chunk's gradients, from the gradient of its logits."""
        if self.hidden is not None:
            torch.mm(grad_CV, self._weight_VD, out=self.hidden[rows])
        # chunks are summed in float32: in bfloat16's 8 bits small gradients would be lost
        if self.weight is not None:
            sum_over_rows(grad_CV, self._hidden_TD[rows], self.weight, accumulate=True)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, *others: Any) -> Tensor:
        *_, shard = others
        gradients = _Gradients(hidden_TD, weight_VD, ctx.needs_input_grad)
        losses = []
        for rows, logits_CV, factor_C, mine_C, column_C1 in _chunks(hidden_TD, weight_VD, *others):
            max_C, sum_C, target_C = _softmax_parts(logits_CV, mine_C, column_C1, shard)
            losses.append((sum_C.log() - target_C) * factor_C)
            hit_C = mine_C.to(factor_C.dtype)
            softmax_gradient_(logits_CV, max_C, factor_C / sum_C, hit_C, column_C1)
            gradients.add(rows, logits_CV)
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        ctx.weight_dtype = weight_VD.dtype
        return (
            torch.cat(losses).sum()
            if losses
            else hidden_TD.new_zeros((), dtype=wide_dtype(weight_VD))
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        dhidden_TD, dweight_VD = ctx.saved_tensors
        if dhidden_TD is not None:
            # As a matrix, the factor stays float32; a scalar would first be rounded to bfloat16, up
            # to 0.4 % off.
            dhidden_TD = torch.mul(dhidden_TD, dloss.view(1, 1), out=torch.empty_like(dhidden_TD))
        if dweight_VD is not None:
            dweight_VD = torch.mul(
                dweight_VD, dloss, out=torch.empty_like(dweight_VD, dtype=ctx.weight_dtype)
            )
        return dhidden_TD, dweight_VD, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *others: Any
    ) -> Tensor:
        ctx.others = others  # chunk_tokens, shard
        loss_T, logsumexp_T = (
            hidden_TD.new_empty(len(hidden_TD), dtype=wide_dtype(weight_VD)) for _ in range(2)
        )
        for rows, logits_CV, factor_C, mine_C, column_C1 in _chunks(
            hidden_TD, weight_VD, labels_T, *others
        ):
            max_C, sum_C, target_C = _softmax_parts(logits_CV, mine_C, column_C1, others[1])
            loss_T[rows] = (sum_C.log() - target_C) * factor_C
            logsumexp_T[rows] = max_C + sum_C.log()
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, logsumexp_T)
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Any, ...]:
        hidden_TD, weight_VD, labels_T, logsumexp_T = ctx.saved_tensors
        gradients = _Gradients(hidden_TD, weight_VD, ctx.needs_input_grad)
        for rows, logits_CV, factor_C, mine_C, column_C1 in _chunks(
            hidden_TD, weight_VD, labels_T, *ctx.others
        ):
            # The denominator is already that of the whole vocabulary: no collective.
            shift_C = logsumexp_T[rows]
            scale_C = factor_C * dloss_T[rows]
            hit_C = mine_C * dloss_T[rows]
            softmax_gradient_(logits_CV, shift_C, scale_C, hit_C, column_C1)
            gradients.add(rows, logits_CV)
        dweight_VD = None if gradients.weight is None else gradients.weight.to(weight_VD.dtype)
        return gradients.hidden, dweight_VD, None, None, None


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk_tokens: int = 0,
    shard: VocabShard | None = None,
    reduction: Literal["sum", "none"] | Callable[..., Tensor] = "sum",
) -> Tensor:
    """Return `-log softmax(hidden @ weight.T)[label]` of every token, or their sum; float32
    (float64 for float64).

    Args:
        hidden_TD: (T, D) hidden states, any float dtype.
        weight_VD: (V, D) output projection, same dtype; with `shard`, only this rank's rows.
        labels_T: (T,) int64 ids of the whole vocabulary; tokens with IGNORE_INDEX (-100) do not
            count.
        chunk_tokens: tokens projected at once; peak memory is about 2 * chunk_tokens * V floats, on
            CUDA a chunk's logits in the dtype of `hidden_TD`. 0 means 4096 with the kernels,
            because every chunk reads the weight; otherwise, and for functions as `reduction`, which
            may make more tensors of that size, 1024.
        shard: set if the vocabulary is split over ranks. Collectives: two per chunk; all ranks hold
            the same tokens. The result is the full loss on every rank; the gradient of `hidden_TD`
            is this rank's part of a sum.
        reduction: "sum", a scalar, or "none", (T,), with 0 for tokens without a label: a third more
            work, and their gradient must be the same on all ranks of `shard`. A function of the
            first five arguments replaces the cross entropy.
    """
    chunk_tokens = chunk_tokens or (
        4096 if _use_kernels(hidden_TD) and not callable(reduction) else 1024
    )
    if callable(reduction):
        return reduction(hidden_TD, weight_VD, labels_T, chunk_tokens, shard)
    if reduction == "none":
        return _TokenCrossEntropy.apply(hidden_TD, weight_VD, labels_T, chunk_tokens, shard)
    # checked here, because gradients are always disabled inside the function's forward
    if not torch.is_grad_enabled():
        hidden_TD, weight_VD = hidden_TD.detach(), weight_VD.detach()
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD, labels_T, chunk_tokens, shard)
