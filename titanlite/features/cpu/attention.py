"""Causal attention on the CPU for short sequences: blocks of queries, whose scores stay in a core's cache.

torch's flash kernel for CPUs takes 1.3 to 1.6 times as long at 512 tokens on one thread (docs/benchmarks.md). Here, the
query heads that share a key/value head are rows of one matrix, so that keys are neither repeated nor their gradients
summed; keys above the diagonal, and in packed rows those of earlier documents, are left out by the block. Only q, k and
v are kept for backward, which computes the scores again.

Shapes: B batch, S sequence, H heads, G key/value heads, R = H / G query heads per key/value head, K head width.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from titanlite.ops.attention import AttentionMask

_QUERIES = 64
"""Queries of a block."""
_SCORE_BYTES = 2 << 20
"""Of the scores that are computed at once; decides how many key/value heads that is."""
_LONGEST = 1024
"""Beyond, torch's kernel is as fast: a block's scores no longer stay in the cache."""


def attend(
    q_BSHK: torch.Tensor, k_BSGK: torch.Tensor, v_BSGK: torch.Tensor, mask: AttentionMask, scale: float
) -> torch.Tensor | None:
    """Compute `ops.attention`; None if torch's kernel is faster, as with several threads or long sequences."""
    fits = q_BSHK.itemsize >= 4 and 0 < q_BSHK.shape[1] <= _LONGEST and q_BSHK.shape[-1] == v_BSGK.shape[-1]
    if not fits or _num_threads() != 1:
        return None
    return host_attention(q_BSHK, k_BSGK, v_BSGK, mask.allowed_B1SS, scale)


@torch.compiler.assume_constant_result  # a compiled graph would break at it
def _num_threads() -> int:
    return torch.get_num_threads()


class _Block(NamedTuple):
    """One block of queries of one sequence: its row in the batch, key/value heads, and positions."""

    row: int
    heads: slice
    queries: slice
    keys: slice


@torch.library.custom_op("titanlite::host_attention", mutates_args=())
def host_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Causal attention of q (B, S, H, K) over k and v (B, S, G, K), (B, S, H, K); float32 or float64, on the CPU.

    `allowed` (B, 1, S, S) is a causal mask of the keys that a query sees, at least one; None: all up to itself.
    """
    q_BGRSK, k_BGSK, v_BGSK = _by_head(q, k.shape[2]).mul_(scale), _by_head(k), _by_head(v)
    out_BGRSK = torch.empty_like(q_BGRSK)
    for block, bias in _blocks(q_BGRSK, allowed):
        p = _probabilities(q_BGRSK, k_BGSK, block, bias)
        rows = out_BGRSK[block.row, block.heads, :, block.queries]
        rows.copy_(torch.bmm(p, v_BGSK[block.row, block.heads, block.keys]).view_as(rows))
    return _by_token(out_BGRSK)


@torch.library.custom_op("titanlite::host_attention_backward", mutates_args=())
def host_attention_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of (q, k, v)."""
    num_kv_heads = k.shape[2]
    q_BGRSK, k_BGSK, v_BGSK = _by_head(q, num_kv_heads).mul_(scale), _by_head(k), _by_head(v)
    dout_BGRSK = _by_head(dout, num_kv_heads)
    dq, dk, dv = torch.empty_like(q_BGRSK), torch.zeros_like(k_BGSK), torch.zeros_like(v_BGSK)
    for block, bias in _blocks(q_BGRSK, allowed):
        row, heads, queries, keys = block
        p = _probabilities(q_BGRSK, k_BGSK, block, bias)
        q_rows, dout_rows = (x[row, heads, :, queries].flatten(1, 2) for x in (q_BGRSK, dout_BGRSK))
        dv[row, heads, keys].baddbmm_(p.mT, dout_rows)
        dp = torch.bmm(dout_rows, v_BGSK[row, heads, keys].mT)
        ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
        dk[row, heads, keys].baddbmm_(ds.mT, q_rows)
        dq_rows = dq[row, heads, :, queries]
        dq_rows.copy_(torch.bmm(ds, k_BGSK[row, heads, keys]).view_as(dq_rows))
    return _by_token(dq.mul_(scale)), dk.transpose(1, 2).contiguous(), dv.transpose(1, 2).contiguous()


def _by_head(x_BSHK: torch.Tensor, num_groups: int | None = None) -> torch.Tensor:
    """Return a copy, (B, H, S, K), or with groups of heads (B, G, R, S, K)."""
    heads_first = x_BSHK.transpose(1, 2) if num_groups is None else x_BSHK.unflatten(2, (num_groups, -1)).movedim(1, 3)
    return heads_first.clone(memory_format=torch.contiguous_format)


def _by_token(x_BGRSK: torch.Tensor) -> torch.Tensor:
    return x_BGRSK.movedim(3, 1).flatten(2, 3).contiguous()


def _blocks(q_BGRSK: torch.Tensor, allowed_B1SS: torch.Tensor | None) -> Iterator[tuple[_Block, torch.Tensor]]:
    """Yield every block, with the bias for the scores of its last keys: -inf where a query may not see a key."""
    batch, num_kv_heads, shared, length, _ = q_BGRSK.shape
    heads_at_once = max(1, _SCORE_BYTES // (shared * min(_QUERIES, length) * length * q_BGRSK.itemsize))
    above = q_BGRSK.new_full((_QUERIES, _QUERIES), float("-inf")).triu_(1)
    for row in range(batch):
        for start in range(0, length, _QUERIES):
            queries, first = slice(start, min(start + _QUERIES, length)), 0
            if allowed_B1SS is None:
                bias = above[: queries.stop - start, : queries.stop - start]
            else:
                seen = allowed_B1SS[row, 0, queries, : queries.stop]
                first = int(seen.any(dim=0).int().argmax())
                bias = torch.zeros(seen[:, first:].shape, dtype=q_BGRSK.dtype)
                bias.masked_fill_(~seen[:, first:], float("-inf"))
            for head in range(0, num_kv_heads, heads_at_once):
                yield _Block(row, slice(head, head + heads_at_once), queries, slice(first, queries.stop)), bias


def _probabilities(q_BGRSK: torch.Tensor, k_BGSK: torch.Tensor, block: _Block, bias: torch.Tensor) -> torch.Tensor:
    """Softmax of the block's scores, (heads, R * queries, keys)."""
    q_rows = q_BGRSK[block.row, block.heads, :, block.queries]
    scores = torch.bmm(q_rows.flatten(1, 2), k_BGSK[block.row, block.heads, block.keys].mT)
    scores.view(*q_rows.shape[:3], -1)[..., scores.shape[-1] - bias.shape[1] :].add_(bias)
    return scores.softmax(dim=-1)


@host_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float) -> torch.Tensor:
    return q.new_empty(q.shape)


@host_attention_backward.register_fake
def _(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, allowed, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, allowed)


def _backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    return *host_attention_backward(dout, *ctx.saved_tensors, ctx.scale), None, None


host_attention.register_autograd(_backward, setup_context=_save_for_backward)
