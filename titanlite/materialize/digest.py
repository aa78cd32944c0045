"""Digests of tensors: sums over elements, so shards add up to the digest of the whole.

The memory of a tensor, in row-major order, is a sequence of 64-bit words x. Its digest is the sum
of w(i) * (x + (x >> 32)) modulo 2**64, where i is the index of the word and w(i) is odd. The second
summand gives high bits as much weight as low ones. Each byte of a word has a summand of its own, so
any partition of the bytes over ranks adds up to the same number. A changed bit always changes it;
an exchange of elements, rows or tensors does except by a chance of about 2**-32.
"""

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlite.materialize.layout import local_of
from titanlite.materialize.plan import Plan
from titanlite.materialize.replicas import share_out

MODULUS = 1 << 64
_WORDS = 1 << 15  # of a block, in which weights are random; those of the blocks are powers
_FACTOR = 0x9E3779B97F4A7C15


@cache
def _weights(device: torch.device) -> torch.Tensor:
    drawn = np.random.Philox(key=0).random_raw(_WORDS).view(np.int64)
    return torch.from_numpy(drawn | 1).to(device)


def bytes_in(values: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, uint8 (N,)."""
    return values.view(-1).view(torch.uint8)


@torch.no_grad()
def digest(memory: torch.Tensor, first: int = 0) -> int:
    """Return the summand of bytes, uint8 (N,), of a tensor, of which the first has the index
    `first`; below 2**64.
    """
    block, at = divmod(first, 8 * _WORDS)
    sums = []
    while len(memory):
        part = memory[: 8 * _WORDS - at]
        words = F.pad(part, (at % 8, -(at + len(part)) % 8)).view(torch.int64)
        weights = _weights(memory.device)[at // 8 :][: len(words)]
        sums.append((words.add(words >> 32) * weights).sum())
        memory = memory[len(part) :]
        at = 0
    found = torch.stack(sums).tolist() if sums else []
    return sum(x * pow(_FACTOR, block + i, MODULUS) for i, x in enumerate(found)) % MODULUS


def add_up(parts: Iterable[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Add up the summands of all ranks.

    Collectives: one all-reduce over `group`, on the host, if there is one; every rank must call.
    """
    sums = np.array([part % MODULUS for part in parts], dtype=np.uint64)
    if dist.is_initialized():
        dist.all_reduce(torch.from_numpy(sums.view(np.int64)), group=group)  # in place, wraps
    return sums.tolist()


def digest_plan(plan: Plan, group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Return the digest of every persistent tensor of `plan`, by its name, as it is in memory.

    The same on all ranks, and on any mesh. Collectives: as `add_up`; every rank must call.
    """
    entries = [entry for entry in plan.entries if entry.info.persistent]
    sums = dict.fromkeys((entry.fqn for entry in entries), 0)
    for entry, share in zip(
        entries, share_out((entry.tensor for entry in entries), plan.group), strict=True
    ):
        memory = bytes_in(local_of(entry.tensor).contiguous())
        size = entry.dtype.itemsize
        for first, count in entry.region.runs(entry.info.shape) if share.mine else ():
            sums[entry.fqn] += digest(memory[: count * size], first * size)
            memory = memory[count * size :]
    return dict(zip(sums, add_up(sums.values(), group), strict=True))
