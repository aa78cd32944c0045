"""Digests of tensors: sums over elements, so shards add up to the digest of the whole.

The memory of a tensor, in row-major order, is a sequence of 64-bit words x. Its digest is the sum
of F**(i + 1) * (x + (x >> 32)) modulo 2**64, where i is the index of the word and F is odd. The
second summand gives high bits as much weight as low ones. Each byte of a word has its own summand,
so any partition of the bytes over ranks adds up to the same number. A changed bit always changes
the digest. So does a swap of two elements that are less than 16 GiB apart: if they are d * 2**m
words apart, with d odd, their difference (below 2**32) is multiplied by an odd number and by 2**(m
+ 2). A swap of rows or tensors leaves the digest unchanged with a probability of about 2**-32.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

MODULUS = 1 << 64
_WORDS = 1 << 17  # of a block: 1 MiB, as a read has; smaller ones would wait for the GIL more often
_FACTOR = 0x9E3779B97F4A7C15  # 5 modulo 8, so that its powers repeat after 2**62


@cache
def _weights(device: torch.device) -> Any:
    powers = np.cumprod(np.full(_WORDS, _FACTOR, np.uint64)).view(np.int64)
    return powers if device.type == "cpu" else torch.from_numpy(powers).to(device)


def shift(words: int) -> int:
    """Return the factor by which a digest is multiplied if its data move on by `words` words."""
    return pow(_FACTOR, words, MODULUS)


def bytes_in(values: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, uint8 (N,)."""
    return values.view(-1).view(torch.uint8)


@torch.no_grad()
def digest(memory: torch.Tensor, first: int = 0) -> int:
    """Return the summand, below 2**64, of a tensor's bytes (N,), uint8, from index `first` on."""
    before = first % 8
    after = -(first + len(memory)) % 8
    if before or after or memory.storage_offset() % 8:
        memory = F.pad(memory, (before, after))
    words: Any = memory.view(torch.int64)
    is_cpu = memory.device.type == "cpu"
    if is_cpu:  # numpy's shifts and products are three times as fast
        words = words.numpy()
    sums = []
    for start in range(0, len(words), _WORDS):
        block = words[start : start + _WORDS]
        weights = _weights(memory.device)[: len(block)]
        mixed = (block >> 32) + block
        sums.append(np.einsum("i,i->", mixed, weights) if is_cpu else (mixed * weights).sum())
    at = first // 8
    return sum(int(x) * shift(at + i * _WORDS) for i, x in enumerate(sums)) % MODULUS


def add_up(
    parts: Mapping[Hashable, int], group: dist.ProcessGroup | None = None
) -> dict[Hashable, int]:
    """Add up the summands of all ranks, which have the same keys in the same order.

    Collectives: one all-reduce over `group`, on the host, if there is one; every rank must call.
    """
    sums = np.array([part % MODULUS for part in parts.values()], dtype=np.uint64)
    if dist.is_initialized():
        dist.all_reduce(torch.from_numpy(sums.view(np.int64)), group=group)  # in place, wraps
    return dict(zip(parts, sums.tolist(), strict=True))
