"""Whole matrices of parameters that are split over ranks: each goes to one of the ranks that hold it, and comes back.

What an optimizer computes of a whole matrix would otherwise be computed by every rank that holds a piece of it. Here
the ranks share the matrices of several parameters among themselves, by their cost; a matrix that lies whole on its
rank, as an expert's mostly does, stays there. Replicas of a mesh do the same work, each for itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.materialize.layout import Region, region_at, region_of

AllToAll = Callable[..., object]
"""`torch.distributed.all_to_all_single(out, x, output_splits, input_splits, group=group)`, or what stands for it."""

# Elements of whole matrices that a rank has at once, in the mean over all ranks.
_ELEMENTS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class _Owned:
    """A matrix that this rank puts together: where the piece of each rank belongs in it.

    `ranks` are all that may own it. In another replica, other ranks own the same matrices: what is computed together
    there must be what is computed together here, or rounding would tell the replicas apart.
    """

    shape: tuple[int, int]
    ranks: tuple[int, ...]
    pieces: tuple[tuple[int, tuple[slice, ...]], ...]


class _Route:
    """What this rank sends, and puts together, for the split parameters of a bucket."""

    def __init__(self) -> None:
        self.sent: defaultdict[int, list[tuple[int, tuple[slice, ...]]]] = defaultdict(list)  # to rank: (param, place)
        self.owned: list[_Owned] = []


class MatrixExchange:
    """Applies a function to every matrix of `params`, whatever part of it this rank holds.

    A parameter (..., R, C) is a stack of matrices (R, C); with `stacked` = s, of s matrices (R / s, C) each.
    Collectives are over all ranks: every rank makes one, of the same parameters in the same order, and calls alike.

    Args:
        params: plain tensors or DTensors, two dims or more.
        stacked: s of each of them.
        all_to_all: the collective.

    Attributes:
        buckets: numbers of the parameters that are changed together; in this order.
    """

    def __init__(self, params: Sequence[torch.Tensor], stacked: Sequence[int], all_to_all: AllToAll) -> None:
        self._params, self._stacked, self._all_to_all = list(params), list(stacked), all_to_all
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._whole: set[int] = set()
        self.buckets: list[list[int]] = [[]]
        total = 0
        for number, param in enumerate(self._params):
            if self.buckets[-1] and total + param.numel() > _ELEMENTS_AT_ONCE * world_size:
                self.buckets.append([])
                total = 0
            self.buckets[-1].append(number)
            total += param.numel()
        loads: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._routes = [self._find_route(bucket, loads) for bucket in self.buckets]

    def _find_route(self, bucket: list[int], loads: defaultdict[tuple[int, ...], list[int]]) -> _Route | None:
        """None if every matrix of the bucket lies whole on its ranks; the same on all ranks, then."""
        route, is_split = _Route(), False
        for number in bucket:
            param = self._params[number]
            holders = _get_holders(param)
            if not _are_split(param, holders):
                self._whole.add(number)
                continue
            is_split = True
            ranks = tuple(rank for rank, _ in holders)
            load = loads[ranks] or [0] * len(ranks)
            loads[ranks] = load
            for matrix in _get_matrices(param, self._stacked[number]):
                shape = matrix.lengths[-2], matrix.lengths[-1]
                place = load.index(min(load))
                load[place] += min(shape) * shape[0] * shape[1]
                owner, pieces = ranks[place], []
                for rank, region in holders:
                    piece = _overlap(matrix, region)
                    if piece is None:
                        continue
                    pieces.append((rank, _inside(piece, matrix)[-2:]))
                    if rank == dist.get_rank():
                        route.sent[owner].append((number, _inside(piece, region)))
                if owner == dist.get_rank():
                    route.owned.append(_Owned(shape, ranks, tuple(pieces)))
        return route if is_split else None

    def apply(
        self, bucket: int, tensors: dict[int, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Put `change` of every matrix in its place in `tensors`: this rank's shards by the parameters' numbers.

        Args:
            bucket: place in `buckets`.
            tensors: plain tensors of one dtype and device, contiguous, for every parameter of the bucket.
            change: (N, R, C) to (N, R, C), matrix by matrix; the same on all ranks.

        Collectives: two all-to-all over all ranks if a matrix of the bucket is split; every rank must call.
        """
        route = self._routes[bucket]
        for number in self.buckets[bucket]:
            local = tensors[number]
            if local.numel() and number in self._whole:
                matrices = local.view(-1, local.shape[-2] // self._stacked[number], local.shape[-1])
                matrices.copy_(change(matrices))
        if route is not None:
            self._exchange(route, tensors, change)

    def _exchange(
        self, route: _Route, tensors: dict[int, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        ranks = range(dist.get_world_size())
        like = next(iter(tensors.values()))
        mine = [[tensors[number][place] for number, place in route.sent[rank]] for rank in ranks]
        whole = [like.new_empty(owned.shape) for owned in route.owned]
        theirs: list[list[torch.Tensor]] = [[] for _ in ranks]
        for matrix, owned in zip(whole, route.owned, strict=True):
            for rank, place in owned.pieces:
                theirs[rank].append(matrix[place])
        self._send(like, mine, theirs)
        together: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
        for matrix, owned in zip(whole, route.owned, strict=True):
            together[owned.shape, owned.ranks].append(matrix)
        for matrices in together.values():
            for matrix, changed in zip(matrices, change(torch.stack(matrices)), strict=True):
                matrix.copy_(changed)
        self._send(like, theirs, mine)

    def _send(self, like: torch.Tensor, pieces: list[list[torch.Tensor]], places: list[list[torch.Tensor]]) -> None:
        """`pieces`, by the rank that they go to, into `places`, by the rank that they come from."""
        sent, received = ([sum(x.numel() for x in of_rank) for of_rank in by_rank] for by_rank in (pieces, places))
        flat = [piece.reshape(-1) for of_rank in pieces for piece in of_rank]
        out = like.new_empty(sum(received))
        self._all_to_all(out, torch.cat([like.new_empty(0), *flat]), received, sent, group=dist.group.WORLD)
        targets = [place for of_rank in places for place in of_rank]
        for place, values in zip(targets, out.split([place.numel() for place in targets]), strict=True):
            place.copy_(values.view(place.shape))


def _get_holders(param: torch.Tensor) -> list[tuple[int, Region]]:
    """The ranks of this replica of `param` with the part that each holds; this rank alone for what is not split."""
    if not isinstance(param, DTensor):
        return [(dist.get_rank() if dist.is_initialized() else 0, region_of(param))]
    mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank trains
    me, choices, ranks_of = dist.get_rank(), [], []
    for axis, (placement, place) in enumerate(zip(param.placements, coordinate, strict=True)):
        # Not out of `mesh.mesh`: a mesh is a tensor, whose values cannot be read while a run is planned without data.
        ranks_of.append(dist.get_process_group_ranks(mesh.get_group(axis)))
        choices.append([place] if placement.is_replicate() else range(mesh.size(axis)))
    found = []
    for other in product(*choices):
        rank = me + sum(ranks[place] - me for ranks, place in zip(ranks_of, other, strict=True))
        found.append((rank, region_at(param, other)))
    return found


def _are_split(param: torch.Tensor, holders: list[tuple[int, Region]]) -> bool:
    """True if a rank holds a part of a matrix only."""
    whole = tuple(param.shape[-2:])
    return any(region.numel and region.lengths[-2:] != whole for _, region in holders)


def _get_matrices(param: torch.Tensor, stacked: int) -> Iterator[Region]:
    *outer, rows, columns = param.shape
    for index in product(*map(range, outer)):
        for part in range(stacked):
            starts = (*index, part * (rows // stacked), 0)
            yield Region(starts, (*(1 for _ in index), rows // stacked, columns))


def _overlap(a: Region, b: Region) -> Region | None:
    starts = tuple(map(max, a.starts, b.starts))
    stops = [min(s + n, t + m) for s, n, t, m in zip(a.starts, a.lengths, b.starts, b.lengths, strict=True)]
    lengths = tuple(stop - start for stop, start in zip(stops, starts, strict=True))
    return Region(starts, lengths) if min(lengths) > 0 else None


def _inside(region: Region, whole: Region) -> tuple[slice, ...]:
    """Where `region` is in a tensor of `whole`."""
    places = zip(region.starts, region.lengths, whole.starts, strict=True)
    return tuple(slice(start - first, start - first + length) for start, length, first in places)
