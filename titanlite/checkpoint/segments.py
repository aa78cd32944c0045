"""Overlap of a stored tensor and a shard in memory: segments of elements that are contiguous in both."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from titanlite.materialize import Region


@dataclass(frozen=True)
class Segments:
    """Equally long segments, in the order of the stored tensor."""

    stored: np.ndarray  # int64 (N,), first element of each segment in the stored tensor
    local: np.ndarray  # the same in the shard
    length: int  # elements per segment

    @property
    def numel(self) -> int:
        return len(self.stored) * self.length

    @property
    def is_local_contiguous(self) -> bool:
        return len(self.local) < 2 or bool((np.diff(self.local) == self.length).all())

    def split(self, max_elements: int, unit: int = 1) -> Iterator["Segments"]:
        """Yield parts of at most `max_elements`; long segments are cut at multiples of `unit` elements."""
        if self.length > max_elements:
            step = max(max_elements // unit, 1) * unit
            for stored, local in zip(self.stored, self.local, strict=True):
                for start in range(0, self.length, step):
                    yield Segments(
                        np.array([stored + start]), np.array([local + start]), min(step, self.length - start)
                    )
        else:
            count = max(max_elements // max(self.length, 1), 1)
            for start in range(0, len(self.stored), count):
                yield Segments(self.stored[start : start + count], self.local[start : start + count], self.length)


def overlap(stored: Region, local: Region) -> Segments | None:
    """Return the elements of `stored` that `local` holds, two regions of one tensor stored row by row; None if none."""
    starts: list[int] = []
    lengths: list[int] = []
    for a, n, b, m in zip(stored.starts, stored.lengths, local.starts, local.lengths, strict=True):
        starts.append(a if a > b else b)
        lengths.append(min(a + n, b + m) - starts[-1])
        if lengths[-1] <= 0:
            return None  # most experts are other ranks'
    run, outer = 1, len(lengths)
    while outer:
        outer -= 1
        run *= lengths[outer]
        if not lengths[outer] == stored.lengths[outer] == local.lengths[outer]:
            break
    return Segments(_offsets(starts, lengths, stored, outer), _offsets(starts, lengths, local, outer), run)


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous one-dimensional CPU tensor."""
    return flat.view(torch.uint8).numpy().data


def _offsets(starts: list[int], lengths: list[int], box: Region, outer: int) -> np.ndarray:
    """Return the first element of every segment inside `box`; the dims before `outer` are walked through."""
    first = 0
    walked: list[tuple[int, int]] = []  # length and stride
    stride = 1
    for dim in reversed(range(len(starts))):
        first += (starts[dim] - box.starts[dim]) * stride
        if dim < outer and lengths[dim] > 1:
            walked.append((lengths[dim], stride))
        stride *= box.lengths[dim]
    offsets = np.array([first], dtype=np.int64)
    for length, stride in reversed(walked):
        offsets = (offsets[:, None] + np.arange(length, dtype=np.int64) * stride).reshape(-1)
    return offsets
