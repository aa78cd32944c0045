"""Differentiable collectives as torch operators: gather and scatter along a dim, sum, all-to-all of rows.

As operators (`titanlite::...`) with fake kernels they can be kept by selective activation checkpointing, and do not
break a compiled graph. A process group is passed by name, for operators take no objects. FSDP2 gathers and reduces with
`all_gather_single` and `reduce_scatter_single`, which are not differentiable.

Collectives: every rank of the group must call, in the same order.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from titanlite import timers

# torch 2.13 renamed both and warns about the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Of a gather: below, gloo's own takes less time (measured on 4 ranks: level at 64 KiB to 1 MiB).
_FEWEST_BYTES = 512 << 10
_groups: dict[str, dist.ProcessGroup] = {}


def register_group(group: dist.ProcessGroup) -> str:
    """Make `group` known to the operators; returns its name."""
    _groups[group.group_name] = group
    return group.group_name


def forget_groups() -> None:
    """Let go of all groups: they hold connections and threads as long as someone knows them."""
    _groups.clear()


def all_gather_single(
    out: torch.Tensor, x: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """`torch.distributed.all_gather_single`, with another way through gloo: see `gloo_all_gather`."""
    if async_op or x.nbytes < _FEWEST_BYTES or not (_is_on_gloo(out, x, group) and _is_on_one_machine()):
        return _all_gather(out, x, group=group, async_op=async_op)
    gloo_all_gather(out, x, register_group(group))
    return None


def reduce_scatter_single(
    out: torch.Tensor,
    x: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.reduce_scatter_single`, with another way through gloo: see `gloo_reduce_scatter`."""
    if async_op or op != dist.ReduceOp.SUM or not _is_on_gloo(out, x, group):
        return _reduce_scatter(out, x, op=op, group=group, async_op=async_op)
    gloo_reduce_scatter(out, x, register_group(group))
    return None


def _is_on_gloo(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return x.device.type == "cpu" and out.dtype == x.dtype and dist.get_backend(group) == "gloo"


def _is_on_one_machine() -> bool:
    """True if all ranks of the run are. Between machines gloo's rings send each piece over only once."""
    num_ranks = dist.get_world_size()
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) == num_ranks


@torch.library.custom_op("titanlite::gloo_all_gather", mutates_args=("out",))
def gloo_all_gather(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    """Send `x` to every rank, straight into its place in `out` there.

    gloo's own passes pieces on from rank to rank and copies the whole once more: on 4 ranks of one machine it takes
    2 to 3 times the CPU time for a whole of 40 MB.
    """
    ranks, rank = _groups[group], _groups[group].rank()
    pieces = out.view(ranks.size(), *x.shape)
    works = []
    for distance in range(1, ranks.size()):
        source, target = (rank - distance) % ranks.size(), (rank + distance) % ranks.size()
        works.append(dist.irecv(pieces[source], group=ranks, group_src=source))
        works.append(dist.isend(x, group=ranks, group_dst=target))
    pieces[rank].copy_(x)
    for work in works:
        work.wait()


@torch.library.custom_op("titanlite::gloo_reduce_scatter", mutates_args=("out",))
def gloo_reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    """Exchange the pieces, and sum those of this rank.

    gloo's own reduces the whole on every rank and keeps a piece: on 4 ranks of one machine it takes 2.5 to 5 times the
    CPU time. The sum of bfloat16 pieces is rounded once here, there after every addition. Between machines it is taken
    too, though gloo's ring would send less over: the bits of a sum must not depend on where the ranks are.
    """
    pieces = torch.empty_like(x)
    dist.all_to_all_single(pieces, x, group=_groups[group])
    torch.sum(pieces.view(_groups[group].size(), *out.shape), dim=0, dtype=out.dtype, out=out)


@torch.library.custom_op("titanlite::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Concatenate the ranks' equal pieces along `dim`; the gradient is reduce-scattered."""
    size = _groups[group].size()
    pieces = x.new_empty(size, *x.shape)
    with timers.collective():
        all_gather_single(pieces.flatten(0, 1), x.contiguous(), group=_groups[group])
    return pieces.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@torch.library.custom_op("titanlite::reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Sum over the ranks and keep this rank's equal piece along `dim`; the gradient is all-gathered."""
    size = _groups[group].size()
    pieces = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(pieces[0])
    with timers.collective():
        reduce_scatter_single(out, pieces.flatten(0, 1), group=_groups[group])
    return out


@torch.library.custom_op("titanlite::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum over the ranks; the gradient, of which each rank holds a part, is summed as well."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=_groups[group])
    return out


@torch.library.custom_op("titanlite::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> torch.Tensor:
    """Send `input_splits[r]` rows of x to each rank r, receive `output_splits[r]`; the gradient goes the way back."""
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    with timers.collective():
        dist.all_to_all_single(out, x.contiguous(), list(output_splits), list(input_splits), group=_groups[group])
    return out


@gloo_all_gather.register_fake
@gloo_reduce_scatter.register_fake
def _(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    pass


@all_gather.register_fake
def _(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= _groups[group].size()
    return x.new_empty(shape)


@reduce_scatter.register_fake
def _(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] //= _groups[group].size()
    return x.new_empty(shape)


@all_reduce.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@all_to_all.register_fake
def _(x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> torch.Tensor:
    return x.new_empty(sum(output_splits), *x.shape[1:])


def _save_dim(ctx, inputs, output) -> None:
    _, ctx.dim, ctx.group = inputs


def _save_group(ctx, inputs, output) -> None:
    _, ctx.group = inputs


def _save_splits(ctx, inputs, output) -> None:
    _, ctx.output_splits, ctx.input_splits, ctx.group = inputs


all_gather.register_autograd(
    lambda ctx, grad: (reduce_scatter(grad, ctx.dim, ctx.group), None, None), setup_context=_save_dim
)
reduce_scatter.register_autograd(
    lambda ctx, grad: (all_gather(grad, ctx.dim, ctx.group), None, None), setup_context=_save_dim
)
all_reduce.register_autograd(lambda ctx, grad: (all_reduce(grad, ctx.group), None), setup_context=_save_group)
all_to_all.register_autograd(
    lambda ctx, grad: (all_to_all(grad, ctx.input_splits, ctx.output_splits, ctx.group), None, None, None),
    setup_context=_save_splits,
)
