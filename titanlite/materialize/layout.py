"""Which part of the global tensor a rank holds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Region:
    """A hyper-rectangle of a global tensor: along each dim the indices `start <= i < start + length`."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that cuts the region out of the global tensor."""
        return tuple(slice(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True))

    @property
    def numel(self) -> int:
        """Elements in the region."""
        return math.prod(self.lengths)

    def row_runs(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Runs (first row, number of rows) of the region in the (rows, shape[-1]) view of a tensor of `shape`.

        Laid end to end, the runs are the rows of the region's own (rows, lengths[-1]) view, in order.
        """
        if len(shape) < 2:
            yield (self.starts[0], self.lengths[0]) if shape else (0, 1)
            return
        outer = [range(s, s + n) for s, n in zip(self.starts[:-2], self.lengths[:-2], strict=True)]
        for flat in range(math.prod(len(r) for r in outer)):
            base = 0
            for size, indices, inner in zip(shape[:-2], outer, _strides_of(self.lengths[:-2]), strict=True):
                base = base * size + indices[flat // inner % len(indices)]
            yield base * shape[-2] + self.starts[-2], self.lengths[-2]


def _strides_of(lengths: tuple[int, ...]) -> list[int]:
    return [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]


_ELSEWHERE, _SHARING_GROUP = "is_held_elsewhere", "sharing_group"


def leave_elsewhere(tensor: torch.Tensor) -> None:
    """Say of a tensor on meta that other ranks hold all of it: it stays on meta, and this rank's region is empty.

    Names, shapes and sources are those of a model that is here as a whole, so that all ranks know the same plan and the
    same files.
    """
    setattr(tensor, _ELSEWHERE, True)


def set_sharing_group(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Say which ranks share what is not left elsewhere: plain tensors are on all of these, DTensors on no others."""
    setattr(model, _SHARING_GROUP, group)


def get_sharing_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that `set_sharing_group` named; None: all."""
    return getattr(model, _SHARING_GROUP, None)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """True for what `leave_elsewhere` was called with."""
    return getattr(tensor, _ELSEWHERE, False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's data; shares memory with `tensor`. Empty where others hold it."""
    if is_elsewhere(tensor):
        return torch.empty((0,) * tensor.dim(), dtype=tensor.dtype)
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def region_of(tensor: torch.Tensor) -> Region:
    """Region of the global tensor that this rank holds; the whole of it for a plain tensor, none where others hold it.

    FSDP2 over a tensor- or expert-parallel parameter splits the shard that is already there. DTensor writes this as a
    `_StridedShard` on the outer mesh axis: it acts after the plain shards to its right, which is how it is read here.
    In that order every split is a split of one contiguous range, in `torch.chunk` sizes.

    Raises:
        ValueError: a placement is neither a shard nor a replica (`Partial` has no region).
    """
    if is_elsewhere(tensor):
        return Region((0,) * tensor.dim(), (0,) * tensor.dim())
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.dim(), tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Region((0,) * tensor.dim(), (0,) * tensor.dim())
    region = region_at(tensor, coordinate)
    local_shape = tuple(local_of(tensor).shape)
    if local_shape != region.lengths:
        raise ValueError(f"layout {tensor.placements}: local shape {local_shape}, expected {region.lengths}.")
    return region


def region_at(tensor: torch.Tensor, coordinate: Sequence[int]) -> Region:
    """Region of the global tensor that the rank at `coordinate` of the tensor's mesh holds."""
    starts, lengths = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        splits = [
            (_is_strided(placement), int(getattr(placement, "dim")), size, index)  # noqa: B009 - no common base class
            for placement, size, index in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True)
            if _is_split(placement)
        ]
        for _, dim, size, index in sorted(splits, key=lambda split: split[0]):  # stable: plain shards first
            chunk = -(-lengths[dim] // size)
            begin = min(index * chunk, lengths[dim])
            starts[dim] += begin
            lengths[dim] = min(chunk, lengths[dim] - begin)
    return Region(tuple(starts), tuple(lengths))


def num_replicas(tensor: torch.Tensor, world_size: int) -> int:
    """Number of ranks that hold each element of `tensor`, of `world_size` that share it; all of them a plain tensor."""
    if not isinstance(tensor, DTensor):
        return world_size
    split = [s for p, s in zip(tensor.placements, tensor.device_mesh.shape, strict=True) if _is_split(p)]
    return world_size // math.prod(split)


def _is_strided(placement: object) -> bool:
    return hasattr(placement, "split_factor")


def _is_split(placement: object) -> bool:
    if getattr(placement, "is_partial", lambda: False)():
        raise ValueError(f"layout: a tensor with placement {placement} holds a partial sum and has no region.")
    return hasattr(placement, "dim")
