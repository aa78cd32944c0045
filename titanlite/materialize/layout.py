"""Layout: the part of the global tensor that a rank holds, and its encoding in memory.

An `Encoding` stores a tensor in memory in a different form than its values, for example quantized.
Names, global shapes, regions and sources always describe the values. Only the encoding writes the
tensor's memory, in whole rows of values.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Region:
    """A hyper-rectangle of a global tensor: in each dim, `start <= index < start + length`."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that cuts the region out of the global tensor."""
        return tuple(slice(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.starts, self.lengths))

    def overlap(self, other: "Region") -> "Region | None":
        """Return the intersection; None if it is empty."""
        if self == other:
            return self
        starts = tuple(map(max, self.starts, other.starts))
        lengths = tuple(
            min(ends) - start for start, *ends in zip(starts, self.ends, other.ends, strict=True)
        )
        return Region(starts, lengths) if min(lengths, default=1) > 0 else None

    def within(self, outer: "Region") -> "Region":
        """Return the region with starts relative to `outer`, which contains it."""
        if not any(outer.starts):
            return self
        return Region(tuple(map(operator.sub, self.starts, outer.starts)), self.lengths)

    def in_blocks(self, rows: int, columns: int) -> "Region":
        """Return the blocks of the last two dims, of `rows` and `columns`, that the region touches,
        counted in blocks.
        """
        sizes = (*(1 for _ in self.starts[:-2]), rows, columns)
        starts = tuple(map(operator.floordiv, self.starts, sizes))
        ends = (-(-end // size) for end, size in zip(self.ends, sizes, strict=True))
        return Region(starts, tuple(map(operator.sub, ends, starts)))

    def transposed(self) -> "Region":
        """Return the region with its last two dims swapped."""
        starts, lengths = (
            (*sizes[:-2], sizes[-1], sizes[-2]) for sizes in (self.starts, self.lengths)
        )
        return Region(starts, lengths)

    def slabs(self, elements: int) -> Iterator["Region"]:
        """Yield the region in parts of at most `elements` elements, in the region's row-major
        order.
        """
        if self.numel <= max(elements, 1):
            yield self
            return
        dim = next(i for i, length in enumerate(self.lengths) if length > 1)
        length = self.lengths[dim]
        step = max(elements * length // self.numel, 1)
        for start in range(0, length, step):
            starts = list(self.starts)
            lengths = list(self.lengths)
            starts[dim] += start
            lengths[dim] = min(step, length - start)
            yield from Region(tuple(starts), tuple(lengths)).slabs(elements)

    def runs(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yield (first element, number of elements) of the ranges that are contiguous in a tensor
        of `shape`.

        Concatenated, the runs are the elements of the region in its own row-major order.
        """
        if self.lengths == shape:
            yield 0, self.numel
            return
        inner = math.prod(shape[1:])
        if self.lengths[1:] == shape[1:]:
            yield self.starts[0] * inner, self.numel
            return
        runs = [*Region(self.starts[1:], self.lengths[1:]).runs(shape[1:])]
        for row in range(self.starts[0], self.ends[0]):
            for first, count in runs:
                yield row * inner + first, count

    def row_runs(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yield the `runs`, counted in rows of the last dim; in one dim each element is a row."""
        return (
            self.runs(shape)
            if len(shape) < 2
            else Region(self.starts[:-1], self.lengths[:-1]).runs(shape[:-1])
        )


class Encoding(Protocol):
    """The encoding in which the rows of one tensor are stored in memory."""

    @property
    def name(self) -> str:
        """Return the name of the encoding in plans."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the values."""
        ...

    def values_in(self, stored: Region) -> Region:
        """Return the region of the values for `stored`, a region of the tensor in memory."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode rows of values (N, W) as bytes (N, bytes of a row), uint8."""
        ...

    def can_adopt(self, dtype: torch.dtype, block: tuple[int, ...]) -> bool:
        """Return True if codes of `dtype` in a file, with a scale for each `block`, can be stored
        unchanged.
        """
        ...

    def adopt(self, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Store codes (N, W) that `can_adopt` accepts, and the scales of their blocks (N, blocks),
        without loss.
        """
        ...

    def count_not_finite(self, local: torch.Tensor) -> int:
        """Count the blocks (values with a common scale) that contain a NaN or infinite value."""
        ...


_ENCODING = "encoding"
_REMOTE = "is_remote"


def set_encoding(tensor: torch.Tensor, encoding: Encoding) -> None:
    """Mark a meta tensor as stored in this encoding."""
    setattr(tensor, _ENCODING, encoding)


def encoding_of(tensor: torch.Tensor) -> Encoding | None:
    """Return the encoding that `set_encoding` set; None: the tensor holds its values directly."""
    return getattr(tensor, _ENCODING, None)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the global shape of the values."""
    encoding = encoding_of(tensor)
    return tuple(tensor.shape) if encoding is None else encoding.shape


def num_values(tensor: torch.Tensor) -> int:
    """Count the values of `tensor`, globally."""
    return math.prod(shape_of(tensor))


def write_rows(rows: torch.Tensor, local: torch.Tensor, box: Region, outer: Region) -> None:
    """Write encoded rows (N, bytes), uint8, of the values in `box` into the contiguous `local`,
    which holds the values in `outer`.
    """
    held = local.view(torch.uint8).view(*outer.lengths[:-1], -1)
    place = held[box.within(outer).slices[:-1]]
    place.copy_(rows.view(place.shape))


def mark_remote(tensor: torch.Tensor) -> None:
    """Mark a meta tensor as remote: only other ranks hold it, it stays on meta here, and this
    rank's region is empty.
    """
    setattr(tensor, _REMOTE, True)


def is_remote(tensor: torch.Tensor) -> bool:
    """Return True for remote tensors, which `mark_remote` marked."""
    return getattr(tensor, _REMOTE, False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's data as a plain tensor that shares memory with `tensor`; empty if `tensor`
    is remote.
    """
    if is_remote(tensor):
        return torch.empty((0,) * tensor.dim(), dtype=tensor.dtype)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach() if local.requires_grad else local


def region_of(tensor: torch.Tensor) -> Region:
    """Return the region of the global tensor's values that this rank holds; empty if only other
    ranks hold the tensor.

    FSDP2 over a tensor- or expert-parallel parameter splits the existing shard: a `_StridedShard`
    on the outer mesh axis acts after the plain shards to its right. So every split divides a
    contiguous range, in `torch.chunk` sizes.

    Raises ValueError: a placement is neither a shard nor a replica (`Partial` has no region).
    """
    return _values_in(tensor, _stored_here(tensor))


def local_shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the part of `tensor` that this rank stores; raises as `region_of`."""
    return _stored_here(tensor).lengths


def _stored_here(tensor: torch.Tensor) -> Region:
    nothing = Region((0,) * tensor.dim(), (0,) * tensor.dim())
    if is_remote(tensor):
        return nothing
    if not isinstance(tensor, DTensor):
        return Region(nothing.starts, tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return nothing
    local_shape = tuple(local_of(tensor).shape)
    if not tensor.numel():  # FSDP2 splits (5, 0) into parts of (0, 0)
        return Region(nothing.starts, local_shape)
    stored = _stored_at(tensor, coordinate)
    if local_shape != stored.lengths:
        raise ValueError(
            f"layout {tensor.placements}: local shape {local_shape}, expected {stored.lengths}."
        )
    return stored


def region_at(tensor: DTensor, coordinate: Sequence[int]) -> Region:
    """Return the region of the values that the rank at `coordinate` of the tensor's mesh holds."""
    return _values_in(tensor, _stored_at(tensor, coordinate))


def _values_in(tensor: torch.Tensor, stored: Region) -> Region:
    encoding = encoding_of(tensor)
    return stored if encoding is None else encoding.values_in(stored)


def _stored_at(tensor: DTensor, coordinate: Sequence[int]) -> Region:
    """Return the part of `tensor` in the memory of the rank at `coordinate` of its mesh."""
    starts = [0] * tensor.dim()
    lengths = list(tensor.shape)
    placements: Any = tensor.placements  # their common base class has no `dim`
    axes = zip(placements, tensor.device_mesh.shape, coordinate, strict=True)
    # FSDP's `_StridedShard` splits the shard of tensor or expert parallelism.
    for placement, num_ranks, rank in sorted(
        axes, key=lambda axis: hasattr(axis[0], "split_factor")
    ):
        if _is_split(placement):
            dim = placement.dim
            chunk = -(-lengths[dim] // num_ranks)
            begin = min(rank * chunk, lengths[dim])
            starts[dim] += begin
            lengths[dim] = min(chunk, lengths[dim] - begin)
    return Region(tuple(starts), tuple(lengths))


def num_replicas(tensor: torch.Tensor, world_size: int) -> int:
    """Count the ranks that hold each element of `tensor`, among the `world_size` ranks that share
    it; all of them hold a plain tensor.
    """
    if not isinstance(tensor, DTensor):
        return world_size
    split = [
        s for p, s in zip(tensor.placements, tensor.device_mesh.shape, strict=True) if _is_split(p)
    ]
    return world_size // math.prod(split)


def _is_split(placement: object) -> bool:
    if getattr(placement, "is_partial", lambda: False)():
        raise ValueError(
            f"layout: a tensor with placement {placement} holds a partial sum and has no region."
        )
    return hasattr(placement, "dim")
