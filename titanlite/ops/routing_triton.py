"""Triton kernels of `routing.py`, with their launchers: choice, its gradient, and order of rows.

`choose_kernel` and `weigh_backward_kernel` hold all scores of some tokens of one sequence. The
order is found by counting: `count_kernel` counts how often each id is in a block of rows, and
`place_kernel` adds up these counts and places the rows of its block. There are no atomics, and all
sums have a fixed order, so that every run gives the same bits.

Of equal scores the expert with the lowest number is chosen. NaN is chosen first, as by torch, and
ids are valid even then.

Shapes: B sequences of S tokens, E experts, k chosen per token, N blocks, R rows, G ids.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.ops.launchers import INTERPRETED, cdiv, launch, next_power_of_2
from titanlite.ops.routing import empty_choice, empty_order, tokens_at_once

PROGRAMS = 4 if INTERPRETED else 256  # blocks of rows; `place_kernel` reads the counts of all
HITS = 4096  # comparisons of rows and ids at once
LOWEST = tl.constexpr(-3.0e38)  # -inf marks what was chosen


@triton.jit
def _load(logits_ptr, valid_ptr, S, E, IS_SOFTMAX, BT, E_CEIL):
    """Return tokens (BT,), which of them exist, which are valid (BT, 1), and columns (1, E_CEIL);
    logits, scores and normalized scores, (BT, E_CEIL), 0 where there is no expert.
    """
    s = tl.program_id(1) * BT + tl.arange(0, BT)
    e = tl.arange(0, E_CEIL)[None, :]
    token = tl.program_id(0).to(tl.int64) * S + s
    real = s < S
    x = tl.load(logits_ptr + token[:, None] * E + e, mask=real[:, None] & (e < E), other=0.0)
    if IS_SOFTMAX:
        known = tl.where(e < E, x, LOWEST)
        values = tl.exp(known - tl.max(known, 1)[:, None])
    else:
        values = tl.sigmoid(x)
    values = tl.where(e < E, values, 0.0)
    share = values / tl.sum(values, 1)[:, None]
    scores = share if IS_SOFTMAX else values
    valid = real
    if valid_ptr is not None:
        valid = tl.load(valid_ptr + token, mask=real, other=0) != 0
    return token, real, valid[:, None], e, x, scores, share


@triton.jit
def _limit_groups(choice, e, E, NUM_GROUPS, NUM_LIMITED):
    """Lower the values of all groups except those with the highest sum of their two best values."""
    size = E // NUM_GROUPS
    group = e // size
    sums = tl.full(choice.shape, LOWEST, tl.float32)
    for i in range(NUM_GROUPS):
        values = tl.where(group == i, choice, LOWEST)
        best, place = tl.max(values, 1, return_indices=True)
        if size > 1:
            best += tl.max(tl.where(e == place[:, None], LOWEST, values), 1)
        sums = tl.where(group == i, best[:, None], sums)
    limited = tl.full(choice.shape, LOWEST, tl.float32)
    for _ in range(NUM_LIMITED):
        hit = group == tl.argmax(sums, 1)[:, None] // size
        limited = tl.where(hit, choice, limited)
        sums = tl.where(hit, -float("inf"), sums)
    return limited


@triton.jit
def choose_kernel(
    logits_ptr,
    bias_ptr,
    valid_ptr,
    weights_ptr,
    ids_ptr,
    counts_ptr,
    sums_ptr,
    S,
    E,
    k,
    NUM_GROUPS: tl.constexpr,
    NUM_LIMITED: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    K_CEIL: tl.constexpr,
    BT: tl.constexpr,
    E_CEIL: tl.constexpr,
):
    """Choose k experts for each of BT tokens; count the choices of valid tokens, (B, N, E), and sum
    their normalized scores.
    """
    token, real, valid, e, _, scores, share = _load(
        logits_ptr, valid_ptr, S, E, IS_SOFTMAX, BT, E_CEIL
    )
    choice = scores + tl.load(bias_ptr + e, mask=e < E, other=0.0)
    choice = tl.where(choice == choice, choice, 1.0e38)
    choice = tl.where(e < E, choice, LOWEST)
    if NUM_LIMITED < NUM_GROUPS:
        choice = _limit_groups(choice, e, E, NUM_GROUPS, NUM_LIMITED)
    j = tl.arange(0, K_CEIL)[None, :]
    weights = tl.zeros((BT, K_CEIL), tl.float32)
    for i in range(k):
        best = tl.argmax(choice, 1)
        tl.store(ids_ptr + token * k + i, best, mask=real)
        hit = e == best[:, None]
        weights = tl.where(j == i, tl.sum(tl.where(hit, scores, 0.0), 1)[:, None], weights)
        choice = tl.where(hit, -float("inf"), choice)
    if IS_NORMALIZED:
        weights /= tl.sum(weights, 1)[:, None] + 1e-20
    tl.store(weights_ptr + token[:, None] * k + j, weights, mask=real[:, None] & (j < k))
    count = tl.sum(valid & (choice == -float("inf")), 0)[None, :]
    part = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * E + e
    tl.store(counts_ptr + part, count, mask=e < E)
    tl.store(sums_ptr + part, tl.sum(tl.where(valid, share, 0.0), 0)[None, :], mask=e < E)


@triton.jit
def weigh_backward_kernel(
    dweights_ptr,
    daux_ptr,
    logits_ptr,
    valid_ptr,
    weights_ptr,
    ids_ptr,
    load_ptr,
    dlogits_ptr,
    S,
    E,
    k,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BT: tl.constexpr,
    E_CEIL: tl.constexpr,
):
    """Write the gradient of the logits of BT tokens."""
    token, real, valid, e, x, scores, share = _load(
        logits_ptr, valid_ptr, S, E, IS_SOFTMAX, BT, E_CEIL
    )
    dlogits = tl.zeros((BT, E_CEIL), tl.float32)
    if load_ptr is not None:
        load = tl.load(load_ptr + tl.program_id(0) * E + e, mask=e < E, other=0.0)
        dshare = tl.where(valid, load * tl.load(daux_ptr), 0.0)
        dlogits = share * (dshare - tl.sum(dshare * share, 1)[:, None])
    weights = tl.zeros((BT, E_CEIL), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    for i in range(k):
        place = token * k + i
        hit = e == tl.load(ids_ptr + place, mask=real, other=0)[:, None]
        weight = tl.load(weights_ptr + place, mask=real, other=0.0)
        weights = tl.where(hit, weight[:, None], weights)
        dchosen = weight * tl.load(dweights_ptr + place, mask=real, other=0.0)
        dlogits += tl.where(hit, dchosen[:, None], 0.0)
        total += dchosen
    if IS_NORMALIZED:
        dlogits -= weights * total[:, None]
    elif IS_SOFTMAX:
        dlogits -= scores * total[:, None]
    if not IS_SOFTMAX:
        dlogits *= tl.sigmoid(-x)  # 1 - scores would lose the digits of large logits
    tl.store(dlogits_ptr + token[:, None] * E + e, dlogits, mask=real[:, None] & (e < E))


@triton.jit
def _find_hits(ids_ptr, r, R, G, G_CEIL):
    """Return a matrix (C, G_CEIL) with a one where a row has an id; ids from G on are unknown."""
    ids = tl.load(ids_ptr + r, mask=r < R, other=G).to(tl.int32)
    g = tl.arange(0, G_CEIL)[None, :]
    return ((ids[:, None] == g) & (g < G)).to(tl.int32)


@triton.jit(do_not_specialize=["R", "chunks"])  # with expert parallelism they change in every step
def count_kernel(ids_ptr, counts_ptr, R, G, chunks, C: tl.constexpr, G_CEIL: tl.constexpr):
    """Count each id in a block of `chunks` * C rows; write the block's counts, (N, G_CEIL)."""
    block = tl.program_id(0)
    count = tl.zeros((G_CEIL,), tl.int32)
    for chunk in range(chunks):
        r = (block * chunks + chunk) * C + tl.arange(0, C)
        count += tl.sum(_find_hits(ids_ptr, r, R, G, G_CEIL), 0)
    tl.store(counts_ptr + block * G_CEIL + tl.arange(0, G_CEIL), count)


@triton.jit(do_not_specialize=["R", "chunks", "num_rows"])
def place_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    token_ptr,
    rows_ptr,
    ends_ptr,
    R,
    G,
    chunks,
    k,
    num_rows,
    C: tl.constexpr,
    G_CEIL: tl.constexpr,
):
    """Write the sorted row of each choice, the choice and the token of the first `num_rows` sorted
    rows, and the end of each id's rows.
    """
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    g, c = tl.arange(0, G_CEIL), tl.arange(0, C)
    total, earlier = tl.zeros((G_CEIL,), tl.int32), tl.zeros((G_CEIL,), tl.int32)
    for first in range(0, num_blocks, C):
        n = first + c[:, None]
        count = tl.load(counts_ptr + n * G_CEIL + g[None, :], mask=n < num_blocks, other=0)
        total += tl.sum(count, 0)
        earlier += tl.sum(tl.where(n < block, count, 0), 0)
    starts = tl.cumsum(total, 0) - total
    tl.store(ends_ptr + g, starts + total, mask=g < tl.where(block == 0, G, 0))
    for chunk in range(chunks):
        r = (block * chunks + chunk) * C + c
        hits = _find_hits(ids_ptr, r, R, G, G_CEIL)
        before = earlier[None, :] + tl.cumsum(hits, 0) - hits  # rows of each id before this one
        row = tl.sum(hits * (starts[None, :] + before), 1)
        unknown = tl.sum(total, 0) + r - tl.sum(before, 1)  # its row, if its id is unknown
        row = tl.where(tl.sum(hits, 1) == 1, row, unknown)
        tl.store(rows_ptr + r, row, mask=r < R)
        is_kept = row < tl.where(r < R, num_rows, 0)
        tl.store(order_ptr + row, r, mask=is_kept)
        tl.store(token_ptr + row, r // k, mask=is_kept)
        earlier += tl.sum(hits, 0)


def sizes_of_choice(num_experts: int) -> dict[str, int]:
    """Return the sizes that `choose_kernel` and `weigh_backward_kernel` take."""
    return {"BT": tokens_at_once(num_experts), "E_CEIL": next_power_of_2(num_experts)}


def sizes_of_order(num_ids: int) -> dict[str, int]:
    """Return the sizes that `count_kernel` and `place_kernel` take."""
    ceil = next_power_of_2(num_ids)
    return {"C": max(HITS // ceil, 1), "G_CEIL": ceil}


def _launch_tokens(kernel: Any, logits: Tensor, tensors: tuple[Any, ...], *numbers: int) -> None:
    batch, size, num_experts = logits.shape
    sizes = sizes_of_choice(num_experts)
    grid = (batch, cdiv(size, sizes["BT"]))
    launch(kernel, grid, *tensors, size, num_experts, *numbers, **sizes)


def choose_experts(
    logits: Tensor, bias: Tensor, valid: Tensor | None, top_k: int, *flags: int
) -> tuple[Tensor, ...]:
    """Return weights, ids, counts and sums; `flags` are those of the kernel."""
    results = empty_choice(logits, bias, valid, top_k)
    tensors = (logits, bias, valid, *results)
    _launch_tokens(choose_kernel, logits, tensors, top_k, *flags, next_power_of_2(top_k))
    return results


def weigh_experts_backward(
    dweights: Tensor,
    daux: Tensor | None,
    logits: Tensor,
    valid: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    load: Tensor | None,
    *flags: bool,
) -> Tensor:
    """Return the gradient of the logits; `flags` are those of the kernel."""
    dlogits = torch.empty_like(logits)
    tensors = (dweights, daux, logits, valid, weights, ids, load, dlogits)
    _launch_tokens(weigh_backward_kernel, logits, tensors, ids.shape[1], *flags)
    return dlogits


def group_rows(ids: Tensor, num_ids: int, num_rows: int) -> tuple[Tensor, ...]:
    """Return `group_by_expert`, with an int32 order."""
    rows = ids.numel()
    sizes = sizes_of_order(num_ids)
    chunks = rows // (sizes["C"] * PROGRAMS) + 1
    blocks = rows // (sizes["C"] * chunks) + 1
    counts = ids.new_empty(blocks, sizes["G_CEIL"], dtype=torch.int32)
    results = empty_order(ids, num_ids, num_rows)
    numbers = (rows, num_ids, chunks)
    launch(count_kernel, (blocks,), ids, counts, *numbers, **sizes)
    numbers += (ids.shape[1], num_rows)
    launch(place_kernel, (blocks,), ids, counts, *results, *numbers, **sizes)
    return results
