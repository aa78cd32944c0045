"""Replicas: if several ranks hold the same elements, one rank reads them and broadcasts.

Placements and meshes determine which ranks hold the same elements, so no communication is needed
to find them.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.materialize.digest import bytes_in
from titanlite.materialize.layout import is_remote, local_of


@dataclass(frozen=True)
class Replica:
    """A tensor on this rank. Of all ranks with the same elements, one is the owner: it reads the
    tensor and sends it to the other ones, or writes it.

    Attributes:
        tensor: a DTensor, or a plain tensor that all ranks of `group` hold.
        is_owner: this rank is the owner.
        hops: broadcasts from the owner to the other replicas, each over one mesh axis: (group,
            sending rank in the group). Empty without replicas.
    """

    tensor: torch.Tensor
    is_owner: bool
    hops: tuple[tuple[dist.ProcessGroup | None, int], ...] = ()


def assign_owners(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> Iterator[Replica]:
    """Choose an owner among the replicas of each tensor, so that all ranks own about the same
    number of bytes.

    Every rank of `group` (None: all) must pass the same tensors in the same order. All ranks then
    compute the same result without communication. Remote tensors have no owner in the group.
    """
    loads: defaultdict[Hashable, list[int]] = defaultdict(list)
    for tensor in tensors:
        if is_remote(tensor):
            yield Replica(tensor, is_owner=False)
            continue
        groups = _replicas(tensor, group)
        sizes = [dist.get_world_size(axis) for axis in groups]
        load = loads[groups] = loads[groups] or [0] * math.prod(sizes)
        turn = load.index(min(load))
        load[turn] += tensor.numel() * tensor.dtype.itemsize
        chosen = [int(rank) for rank in np.unravel_index(turn, sizes)]
        is_owner = chosen == [dist.get_rank(axis) for axis in groups]
        yield Replica(tensor, is_owner, tuple(zip(groups, chosen, strict=True)))


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
def broadcast(replicas: Iterable[Replica]) -> None:
    """Copy the owner's elements to the other replicas.

    Collectives: broadcasts over the mesh axes of the replicas; every rank must call with the same
    replicas.
    """
    for replica in replicas:
        local = local_of(replica.tensor)
        if not replica.hops or not local.numel():
            continue
        # The first broadcast gives correct data only to ranks that differ from the owner in its
        # axis alone. A later broadcast overwrites the data of the remaining ranks.
        for group, source in replica.hops:
            dist.broadcast(bytes_in(local), group=group, group_src=source)
