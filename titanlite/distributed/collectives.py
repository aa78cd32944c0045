"""Differentiable collectives as torch operators: gather and scatter along a dim, all-to-all of rows.

As operators (`titanlite::...`) with fake kernels they can be kept by selective activation checkpointing, and do not
break a compiled graph. A process group is passed by name, for operators take no objects.

Collectives: every rank of the group must call, in the same order.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from titanlite import timers

# torch 2.13 renamed both and warns about the old names; 2.11 has only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups: dict[str, dist.ProcessGroup] = {}


def register_group(group: dist.ProcessGroup) -> str:
    """Make `group` known to the operators; returns its name."""
    _groups[group.group_name] = group
    return group.group_name


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


@torch.library.custom_op("titanlite::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> torch.Tensor:
    """Send `input_splits[r]` rows of x to each rank r, receive `output_splits[r]`; the gradient goes the way back."""
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    with timers.collective():
        dist.all_to_all_single(out, x.contiguous(), list(output_splits), list(input_splits), group=_groups[group])
    return out


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


@all_to_all.register_fake
def _(x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> torch.Tensor:
    return x.new_empty(sum(output_splits), *x.shape[1:])


def _save_dim(ctx, inputs, output) -> None:
    _, ctx.dim, ctx.group = inputs


def _save_splits(ctx, inputs, output) -> None:
    _, ctx.output_splits, ctx.input_splits, ctx.group = inputs


all_gather.register_autograd(
    lambda ctx, grad: (reduce_scatter(grad, ctx.dim, ctx.group), None, None), setup_context=_save_dim
)
reduce_scatter.register_autograd(
    lambda ctx, grad: (all_gather(grad, ctx.dim, ctx.group), None, None), setup_context=_save_dim
)
all_to_all.register_autograd(
    lambda ctx, grad: (all_to_all(grad, ctx.input_splits, ctx.output_splits, ctx.group), None, None, None),
    setup_context=_save_splits,
)
