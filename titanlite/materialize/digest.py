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

from titanlite.materialize.layout import local_of, region_of
from titanlite.materialize.plan import Plan
from titanlite.materialize.replicas import share_out

MODULUS = 1 << 64
_WORDS = 1 << 14  # that are weighed at once: 128 KiB, which stay in the cache
_ROWS = 256  # as many times that on a device, where launches cost more
_FACTOR = 0x9E3779B97F4A7C15  # its powers are the weights of the blocks of words


@cache
def _weights(device: torch.device) -> torch.Tensor:
    drawn = np.random.Philox(key=0).random_raw(_WORDS)
    return torch.from_numpy(drawn.view(np.int64) | 1).to(device)


def _most_rows(device: torch.device) -> int:
    return 1 if device.type == "cpu" else _ROWS


def bytes_in(values: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, uint8 (N,)."""
    return values.view(-1).view(torch.uint8)


@torch.no_grad()
def digest(memory: torch.Tensor, first: int = 0) -> int:
    """Return the summand of bytes, uint8 (N,), of a tensor, of which the first has the index
    `first`; below 2**64.
    """
    before = first % 8
    if before or memory.storage_offset() % 8:
        memory = F.pad(memory, (before, 0)).clone()
    rest = memory.numel() % 8
    if rest:
        end = memory.numel() - rest
        last = digest(F.pad(memory[end:], (0, 8 - rest)), first - before + end)
        return (digest(memory[:end], first - before) + last) % MODULUS
    words = memory.view(torch.int64)
    block, at = divmod(first // 8, _WORDS)
    weights = _weights(memory.device)
    most = _most_rows(memory.device)
    sums = [torch.zeros(0, dtype=torch.int64, device=memory.device)]
    while len(words):
        count = min(_WORDS - at, len(words))
        rows = min(len(words) // _WORDS, most) if count == _WORDS else 1
        part = words[: rows * count].view(rows, count)
        sums.append((part.add(part >> 32) * weights[at : at + count]).sum(1))
        words = words[rows * count :]
        at = 0
    found = torch.cat(sums).tolist()
    return sum(x * pow(_FACTOR, block + i, MODULUS) for i, x in enumerate(found)) % MODULUS


def digest_part(local: torch.Tensor, tensor: torch.Tensor) -> int:
    """Return the summand of this rank's shard `local` of the global `tensor`."""
    size = local.dtype.itemsize
    memory = bytes_in(local.contiguous())
    total = 0
    for first, count in region_of(tensor).runs(tuple(tensor.shape)):
        total += digest(memory[: count * size], first * size)
        memory = memory[count * size :]
    return total


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
    shares = share_out((entry.tensor for entry in entries), plan.group)
    parts = [digest_part(local_of(s.tensor), s.tensor) if s.mine else 0 for s in shares]
    names = [entry.fqn for entry in entries]
    return dict(zip(names, add_up(parts, group), strict=True))
