"""Replicas: one rank reads what several ranks hold, and broadcasts it to the others.

The ranks that hold the same elements follow from placements and meshes alone, so no communication
is needed.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.materialize.layout import is_elsewhere, local_of

# Tensors below this are packed into one broadcast of at most as many bytes.
_BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class Hop:
    """One broadcast of a chain that reaches all replicas: over one mesh axis, from global rank
    `source`.
    """

    group: dist.ProcessGroup | None
    source: int
    takes_part: bool  # False for ranks that another hop of the chain serves


@dataclass(frozen=True)
class Share:
    """A tensor with the replica that is in charge of it: it reads the tensor, or writes it."""

    tensor: torch.Tensor  # DTensor, or plain and then held by all ranks of `group`
    mine: bool  # this rank is in charge
    # broadcasts from the replica in charge to the others; empty without replicas
    hops: tuple[Hop, ...]
    key: Hashable  # equal for tensors whose hops are the same ones


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
            yield Share(tensor, False, (), None)
            continue
        mesh_axes, sizes, coordinate = _replicas(tensor, group)
        if not sizes:
            yield Share(tensor, True, (), None)
            continue
        # Which replicas there are, not which ranks: the same on all ranks of a mesh.
        load = loads[mesh_axes] = loads[mesh_axes] or [0] * math.prod(sizes)
        turn = load.index(min(load))
        load[turn] += tensor.numel() * tensor.dtype.itemsize
        chosen = tuple(map(int, np.unravel_index(turn, sizes)))
        hops = tuple(_hops(tensor, mesh_axes[1], chosen, coordinate, group))
        yield Share(tensor, chosen == coordinate, hops, (mesh_axes, turn))


def _replicas(
    tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[tuple[Hashable, tuple[int, ...]], tuple[int, ...], tuple[int, ...]]:
    """Return (mesh and its axes over which `tensor` is replicated), their sizes, and this rank's
    place on them.
    """
    if not isinstance(tensor, DTensor):
        size = group_size(group)
        return (None, (0,)), (size,) if size > 1 else (), (dist.get_rank(group) if size > 1 else 0,)
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None, "every rank is on every mesh"
    axes = tuple(
        i for i, p in enumerate(tensor.placements) if p.is_replicate() and mesh.size(i) > 1
    )
    return (mesh, axes), tuple(mesh.size(i) for i in axes), tuple(place[i] for i in axes)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of `group`, or of all; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _hops(
    tensor: torch.Tensor,
    axes: Sequence[int],
    chosen: tuple[int, ...],
    coordinate: tuple[int, ...],
    group: dist.ProcessGroup | None,
) -> Iterator[Hop]:
    """Yield a hop per axis. The first reaches ranks that differ from the chosen one in that axis
    only, and so on.
    """
    if not isinstance(tensor, DTensor):
        yield Hop(group, _global_rank(group, chosen[0]), True)
        return
    mesh = tensor.device_mesh
    place = list(mesh.get_coordinate() or ())
    for i, axis in enumerate(axes):
        source = list(place)
        source[axis] = chosen[i]
        yield Hop(
            mesh.get_group(axis),
            int(mesh.mesh[tuple(source)].item()),
            coordinate[i + 1 :] == chosen[i + 1 :],
        )


@torch.no_grad()
def broadcast(shares: Iterable[Share]) -> None:
    """Give every replica what the one in charge holds. Local tensors of up to 4 MiB travel
    together.

    Collectives: broadcasts over the mesh axes of the replicas; every rank must call with the same
    shares.
    """
    by_key: dict[Hashable, list[Share]] = {}
    for share in shares:
        if share.hops:
            by_key.setdefault(share.key, []).append(share)
    for of_key in by_key.values():
        bucket: list[torch.Tensor] = []
        hops = of_key[0].hops
        for share in of_key:
            local = local_of(share.tensor)
            if local.nbytes >= _BUCKET_BYTES and local.is_contiguous():
                _run(hops, local.view(-1).view(torch.uint8))
                continue
            if bucket and (
                sum(t.nbytes for t in bucket) + local.nbytes > _BUCKET_BYTES
                or bucket[0].device != local.device
            ):
                _send_bucket(hops, bucket)
                bucket = []
            bucket.append(local)
        _send_bucket(hops, bucket)


def _send_bucket(hops: tuple[Hop, ...], bucket: Sequence[torch.Tensor]) -> None:
    sizes = [local.nbytes for local in bucket]
    if not sum(sizes):
        return
    packed = torch.cat([local.contiguous().view(-1).view(torch.uint8) for local in bucket])
    _run(hops, packed)
    for local, part in zip(bucket, packed.split(sizes), strict=True):
        if local.numel():
            # cloned, for views need alignment
            local.copy_(part.clone().view(local.dtype).view(local.shape))


def _run(hops: tuple[Hop, ...], data: torch.Tensor) -> None:
    for hop in hops:
        if hop.takes_part:
            dist.broadcast(data, src=hop.source, group=hop.group)
