"""Replicas: one rank reads what several ranks hold, and broadcasts it to the others.

The ranks that hold the same elements follow from placements and meshes alone, so no communication
is needed.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.materialize.layout import is_elsewhere, local_of


@dataclass(frozen=True)
class Share:
    """A tensor with the replica that is in charge of it: it reads the tensor, or writes it.

    Attributes:
        tensor: DTensor, or plain and then held by all ranks of `group`.
        mine: this rank is in charge.
        hops: broadcasts that bring it from the replica in charge to the others, each over one mesh
            axis: (group, rank in the group that sends). Empty without replicas.
    """

    tensor: torch.Tensor
    mine: bool
    hops: tuple[tuple[dist.ProcessGroup | None, int], ...] = ()


def share_out(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> Iterator[Share]:
    """Put one replica in charge of each tensor, in turns, so that the ranks get about equally many
    bytes.

    Every rank of `group` (None: all) must give the same tensors in the same order, and comes to the
    same result without communication. Of tensors that others hold, no rank of the group is in
    charge.
    """
    loads: defaultdict[Hashable, list[int]] = defaultdict(list)
    for tensor in tensors:
        if is_elsewhere(tensor):
            yield Share(tensor, mine=False)
            continue
        groups = _replicas(tensor, group)
        sizes = [dist.get_world_size(axis) for axis in groups]
        load = loads[groups] = loads[groups] or [0] * math.prod(sizes)
        turn = load.index(min(load))
        load[turn] += tensor.numel() * tensor.dtype.itemsize
        chosen = [int(rank) for rank in np.unravel_index(turn, sizes)] if sizes else []
        mine = chosen == [dist.get_rank(axis) for axis in groups]
        yield Share(tensor, mine, tuple(zip(groups, chosen, strict=True)))


def _replicas(
    tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, ...]:
    """Return the groups of ranks, one for each axis, over which `tensor` is replicated."""
    if not isinstance(tensor, DTensor):
        return (group,) if group_size(group) > 1 else ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    )


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of `group`, or of all; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


@torch.no_grad()
def broadcast(shares: Iterable[Share]) -> None:
    """Give every replica what the one in charge holds.

    Collectives: broadcasts over the mesh axes of the replicas; every rank must call with the same
    shares.
    """
    for share in shares:
        local = local_of(share.tensor)
        if not share.hops or not local.numel():
            continue
        sent = local.contiguous()
        # The first hop reaches the ranks that differ from the one in charge in its axis only. All
        # others get from it what a later hop replaces.
        for group, source in share.hops:
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=source)
        if sent is not local:
            local.copy_(sent)
