"""One pass over the stored tensors of a folder, and of the one that training began with.

Streams: a thread holds 1 MiB of each folder at a time.
"""

import math
import operator
import threading
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from titanlite.checkpoint.folder import Stored, StoredTensor
from titanlite.checkpoint.pieces import bytes_of
from titanlite.checkpoint.reader import JOB_BYTES, io_threads, opened, read_bytes, run_jobs
from titanlite.materialize.digest import digest

PLAIN = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_SAMPLE = 1 << 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Look(NamedTuple):
    """Facts of a stored tensor, each a sum over parts of 1 MiB of the tensor.

    Attributes:
        digest, base_digest: summands; the second is of the tensor of the same key and shape in the
            base.
        compared: parts that the base has, too.
        bad: elements that are NaN or infinite.
        varied: parts with elements that differ.
        exact: parts whose last 16 bits are not all zero.
        distance, extent: squared norms of the difference from the base, and of the base.
        power, fourth: mean square, and mean fourth power, of the first 65,536 elements.
    """

    digest: int
    base_digest: int = 0
    compared: int = 0
    bad: int = 0
    varied: int = 0
    exact: int = 0
    distance: float = 0.0
    extent: float = 0.0
    power: float = 0.0
    fourth: float = 0.0

    @property
    def change(self) -> float:
        """Norm of the difference from the base, relative to the norm of the base."""
        return math.sqrt(self.distance / self.extent) if self.extent else 0.0

    def is_normal(self, deviation: float) -> bool:
        """Return True if the sample is as of a normal distribution around 0, within 3 %."""
        squares = (self.power, deviation**2), (self.fourth, 3 * self.power**2)
        return all(math.isclose(value, wanted, rel_tol=0.03) for value, wanted in squares)


def scan(stored: Stored, base: Stored) -> dict[str, Look]:
    """Read every tensor of `stored` once, and of `base` those with the same key and shape.

    Raises CheckpointError: a file cannot be read, or is not as its header said.
    """
    found: dict[str, Look] = {}
    look = partial(_look, threading.local())
    # A file at a time: the jobs of hundreds of GB would need memory, too.
    for _, tensors in groupby(stored.tensors.values(), lambda tensor: tensor.file):
        jobs = []
        files = set[Path]()
        for tensor in tensors:
            other = base.tensors.get(tensor.key)
            if other is not None and not _is_comparable(tensor, other):
                other = None
            files |= {tensor.file, (other or tensor).file}
            total = math.prod(tensor.shape)
            step = JOB_BYTES // tensor.dtype.itemsize
            for first in range(0, max(total, 1), step):
                count = min(step, total - first)
                jobs.append((tensor.key, (tensor, other, first, count)))
        with opened(stored.file_bytes | base.file_bytes, files) as handles:
            looks = run_jobs((partial(look, handles, *job) for _, job in jobs), io_threads())
        for (key, _), part in zip(jobs, looks, strict=True):
            found[key] = Look._make(map(operator.add, found[key], part)) if key in found else part
    return found


def _is_comparable(one: StoredTensor, other: StoredTensor) -> bool:
    return one.shape == other.shape and (
        one.dtype == other.dtype or {one.dtype, other.dtype} <= PLAIN
    )


@torch.no_grad()
def _look(
    buffers: threading.local,
    handles: Mapping[Path, int],
    stored: StoredTensor,
    base: StoredTensor | None,
    first: int,
    count: int,
) -> Look:
    def read(tensor: StoredTensor, name: str) -> tuple[torch.Tensor, int]:
        size = tensor.dtype.itemsize
        if not hasattr(buffers, name):
            setattr(buffers, name, torch.empty(8 * JOB_BYTES, dtype=torch.uint8))
        raw = getattr(buffers, name)[: count * size]
        read_bytes(handles, tensor.file, bytes_of(raw), tensor.offset + first * size)
        return raw, digest(raw, first * size)

    raw, summand = read(stored, "own")
    bits = raw.view(_BITS[stored.dtype.itemsize])
    values = raw.view(stored.dtype)
    found = Look(
        summand,
        varied=int(count > 1 and (bits[0] != bits[-1] or bool((bits != bits[0]).any()))),
        exact=int(
            stored.dtype != torch.float32
            or bool((bits[:64] & 0xFFFF).any() or (bits & 0xFFFF).any())
        ),
    )
    if stored.dtype not in PLAIN:
        return found
    if not values.sum().isfinite():  # or, rarely, the sum is too large
        found = found._replace(bad=int((~values.isfinite()).sum()))
    if not first:
        squares = values[:_SAMPLE].double().square()
        found = found._replace(power=float(squares.mean()), fourth=float(squares.square().mean()))
    if base is not None:
        other, summand = read(base, "base")
        before = other.view(base.dtype).float()
        extent = float(torch.dot(before, before))
        before -= values
        distance = float(torch.dot(before, before))
        found = found._replace(base_digest=summand, compared=1, extent=extent, distance=distance)
    return found
