"""Whole matrices of parameters that are split over ranks: each goes to one of the ranks that hold it, and comes back.

The ranks share the matrices of several parameters among themselves, by their cost, instead of computing each on every
rank that holds a piece; a matrix that lies whole on its rank, as an expert's mostly does, stays there. Replicas of a
mesh do the same work, each for itself.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.base import timers
from titanlite.materialize.layout import Region, region_at, region_of

AllToAll = Callable[..., object]
"""`torch.distributed.all_to_all_single(out, x, output_splits, input_splits, group=group)`, or what stands for it."""

_Loads = defaultdict[tuple[int, ...], Counter[int]]
"""What each rank has to do, for each tuple of ranks."""

# Elements of its shards that a rank handles at once, in the mean over the ranks that share a parameter.
_ELEMENTS_AT_ONCE = 1 << 25


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class _Owned:
    """Rows that this rank puts together, of `stacked` matrices: where the piece of each rank belongs in them.

    `ranks` are all that hold a piece. In another replica, other ranks own the same matrices: what is computed together
    there must be what is computed together here, or rounding would tell the replicas apart.
    """

    shape: tuple[int, int]
    stacked: int
    ranks: tuple[int, ...]
    pieces: tuple[tuple[int, Slices], ...]


@dataclass
class _Route:
    """Pieces that this rank sends, (param, outer index) by rank, and joins, for the split parameters of a bucket."""

    sent: defaultdict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=lambda: defaultdict(list))
    owned: list[_Owned] = field(default_factory=list)


class MatrixExchange:
    """Application of a function to every matrix of `params`, plain or DTensors, whatever part this rank holds.

    A parameter (..., R, C) is a stack of matrices (R, C); with `stacked` = s, of s matrices (R / s, C) each.
    Collectives are over the ranks of `group` (None: all): each makes one of the same parameters in the same order, and
    calls alike.

    Attributes:
        buckets: numbers of the parameters that are changed together; in this order. Those whose matrices lie whole on
            their ranks are in buckets of their own, which need no collective.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        stacked: Sequence[int],
        all_to_all: AllToAll,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self._params, self._stacked, self._all_to_all = list(params), list(stacked), all_to_all
        known: dict[object, list[tuple[int, Region]]] = {}  # layers are alike, and ranks may be thousands
        holders: list[list[tuple[int, Region]]] = []
        for param in self._params:
            layout = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
            if (layout, param.shape) not in known:
                known[layout, param.shape] = _get_holders(param)
            holders.append(known[layout, param.shape])
        is_split = [  # a rank holds a part of a matrix only
            any(region.numel and region.lengths[-2:] != tuple(param.shape[-2:]) for _, region in held)
            for param, held in zip(self._params, holders, strict=True)
        ]
        self._loads: _Loads = defaultdict(Counter)
        self.buckets: list[list[int]] = []
        self._routes: list[_Route | None] = []
        for which in (False, True):
            total = _ELEMENTS_AT_ONCE + 1.0
            begin = len(self.buckets)
            for number in (number for number, split in enumerate(is_split) if split == which):
                size = self._params[number].numel() / len(holders[number])  # of a replica: the same for all ranks
                if total + size > _ELEMENTS_AT_ONCE:
                    self.buckets.append([])
                    total = 0.0
                self.buckets[-1].append(number)
                total += size
            for bucket in self.buckets[begin:]:
                self._routes.append(self._find_route(bucket, holders) if which else None)

    def _find_route(self, bucket: list[int], holders: list[list[tuple[int, Region]]]) -> _Route:
        """Share the matrices of a bucket among the ranks that hold a piece: the costliest first, each for the rank that
        has the least to do yet.
        """
        me, found = dist.get_rank(), []
        known: dict[int, dict[tuple[int, ...], tuple[tuple[int, Region], ...]]] = {}
        for number in bucket:
            param, layout = self._params[number], id(holders[number])
            if layout not in known:
                known[layout] = _group_by_outer(holders[number], me)
            rows, columns = param.shape[-2:]
            cost = min(rows // self._stacked[number], columns) * rows * columns
            found += [(cost, number, index, holding) for index, holding in known[layout].items()]
        route, loads = _Route(), cast(_Loads, defaultdict(Counter))
        for cost, number, index, holding in sorted(found, key=lambda item: -item[0]):  # stable: alike on all ranks
            ranks = tuple(rank for rank, _ in holding)
            load, total = loads[ranks], self._loads[ranks]  # all wait for each bucket, so that comes first
            owner = min(ranks, key=lambda rank: (load[rank], total[rank]))
            load[owner] += cost
            total[owner] += cost
            place = (i - first for i, first in zip(index, dict(holding)[me].starts, strict=False))
            route.sent[owner].append((number, tuple(place)))
            if owner == me:
                rows, columns = self._params[number].shape[-2:]
                pieces = tuple((rank, region.slices[-2:]) for rank, region in holding)
                route.owned.append(_Owned((rows, columns), self._stacked[number], ranks, pieces))
        return route

    def apply(
        self, bucket: int, tensors: dict[int, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Put `change` of every matrix in its place in `tensors`, contiguous shards of one dtype by the parameters'
        numbers.

        `change` maps (N, R, C) to (N, R, C), matrix by matrix, the same on all ranks.

        Collectives: two all-to-all over the group if the matrices of the bucket are split; every rank of it must call.
        """
        route = self._routes[bucket]
        if route is not None:
            self._exchange(route, tensors, change)
            return
        for number in self.buckets[bucket]:
            local = tensors[number]
            if local.numel():
                matrices = local.view(-1, local.shape[-2] // self._stacked[number], local.shape[-1])
                matrices.copy_(change(matrices))

    def _exchange(
        self, route: _Route, tensors: dict[int, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        ranks = dist.get_process_group_ranks(self._group)
        like = next(iter(tensors.values()))
        mine = [[tensors[number][place] for number, place in route.sent[rank]] for rank in ranks]
        whole = [like.new_empty(owned.shape) for owned in route.owned]
        theirs: dict[int, list[torch.Tensor]] = {rank: [] for rank in ranks}
        together: defaultdict[tuple[int, int, int, object], list[torch.Tensor]] = defaultdict(list)
        for matrix, owned in zip(whole, route.owned, strict=True):
            together[*owned.shape, owned.stacked, owned.ranks].append(matrix)
            for rank, place in owned.pieces:
                theirs[rank].append(matrix[place])
        self._send(like, mine, list(theirs.values()))
        for (rows, columns, stacked, _), matrices in together.items():
            changed = change(torch.stack(matrices).view(-1, rows // stacked, columns))
            for matrix, values in zip(matrices, changed.reshape(-1, rows, columns), strict=True):
                matrix.copy_(values)
        self._send(like, list(theirs.values()), mine)

    def _send(self, like: torch.Tensor, pieces: list[list[torch.Tensor]], places: list[list[torch.Tensor]]) -> None:
        """Send `pieces`, by the rank that they go to, into `places`, by the rank that they come from."""
        sent, received = ([sum(x.numel() for x in of_rank) for of_rank in by_rank] for by_rank in (pieces, places))
        flat = [piece.reshape(-1) for of_rank in pieces for piece in of_rank]
        out, packed = like.new_empty(sum(received)), torch.cat([like.new_empty(0), *flat])
        with timers.collective():
            self._all_to_all(out, packed, received, sent, group=self._group or dist.group.WORLD)
        targets = [place for of_rank in places for place in of_rank]
        for place, values in zip(targets, out.split([place.numel() for place in targets]), strict=True):
            place.copy_(values.view(place.shape))


def _get_holders(param: torch.Tensor) -> list[tuple[int, Region]]:
    """Return the ranks of this replica of `param` and what each holds of it; this rank alone if it is not split."""
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


def _group_by_outer(
    holders: list[tuple[int, Region]], me: int
) -> dict[tuple[int, ...], tuple[tuple[int, Region], ...]]:
    """By the outer indices of the matrices that this rank has a part of: who else has, in the order of `holders`."""
    groups: defaultdict[tuple[int, ...], list[tuple[int, Region]]] = defaultdict(list)
    for rank, region in holders:
        outer = zip(region.starts[:-2], region.lengths[:-2], strict=True)
        for index in product(*(range(start, start + length) for start, length in outer)) if region.numel else ():
            groups[index].append((rank, region))
    return {index: tuple(held) for index, held in groups.items() if any(rank == me for rank, _ in held)}
