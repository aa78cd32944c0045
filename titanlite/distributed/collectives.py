"""Differentiable collectives as torch operators: gather and scatter along a dim, sum, all-to-all of
rows.

Because they are operators (`titanlite::...`) with fake kernels, selective activation checkpointing
can save their results, and they do not break a compiled graph. A process group is passed by name,
because operators take no objects.

Collectives: every rank of the group must call, in the same order.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from titanlite.ops.kernels import like, operator

# torch 2.13 renamed both and warns about the old names; 2.11 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Weak references: a group keeps connections and threads as long as it is referenced.
_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def register_group(group: dist.ProcessGroup) -> str:
    """Register `group` for the operators and return its name."""
    _groups[group.group_name] = group
    return group.group_name


def _gathered(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= _groups[group].size()
    return x.new_empty(shape)


def _scattered(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] //= _groups[group].size()
    return x.new_empty(shape)


def _exchanged(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> torch.Tensor:
    return x.new_empty(sum(output_splits), *x.shape[1:])


@operator(fake=_gathered)
def all_gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Concatenate the ranks' pieces of equal size along `dim`; the gradient is reduce-scattered."""
    size = _groups[group].size()
    pieces = x.new_empty(size, *x.shape)
    all_gather_single(pieces.flatten(0, 1), x.contiguous(), group=_groups[group])
    return pieces.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@operator(fake=_scattered)
def reduce_scatter(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Sum over the ranks and return this rank's piece of equal size along `dim`; the gradient is
    all-gathered.
    """
    size = _groups[group].size()
    pieces = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(pieces[0])
    reduce_scatter_single(out, pieces.flatten(0, 1), group=_groups[group])
    return out


@operator(fake=like(0))
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum over the ranks; the gradient, a partial sum on each rank, is summed as well."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=_groups[group])
    return out


@operator(fake=_gathered)
def gather_parts(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Concatenate the ranks' pieces of equal size along `dim`. Use it if all ranks compute the same
    values from the result.

    All ranks then have the same gradient of the result, so backward selects the rank's piece of it,
    without communication.
    """
    return all_gather(x, dim, group)


@operator(fake=_exchanged)
def all_to_all(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> torch.Tensor:
    """Send `input_splits[r]` rows of x to each rank r, and receive `output_splits[r]` rows from it;
    the gradient takes the reverse way.
    """
    out, _ = start_all_to_all(x, output_splits, input_splits, group, overlaps=False)
    return out


def start_all_to_all(
    x: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: str,
    *,
    overlaps: bool = True,
) -> tuple[torch.Tensor, dist.Work | None]:
    """Start an `all_to_all`. If it `overlaps` with kernels, the result may be read after `wait` of
    the returned work.
    """
    out = _exchanged(x, output_splits, input_splits, group)
    splits = list(output_splits), list(input_splits)
    return out, dist.all_to_all_single(
        out, x.contiguous(), *splits, group=_groups[group], async_op=overlaps
    )


def own_part(x: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    """Return the piece of rank `rank`, a view, if `size` ranks split `x` evenly along `dim`."""
    return x.unflatten(dim, (size, -1)).select(dim, rank)


def _save(ctx, inputs, output) -> None:
    ctx.inputs = inputs[1:]


def _keep_part(ctx, grad: torch.Tensor):
    dim, group = ctx.inputs
    return own_part(grad, dim, _groups[group].size(), _groups[group].rank()), None, None


def _send_back(ctx, dy: torch.Tensor):
    output_splits, input_splits, group = ctx.inputs
    return all_to_all(dy, input_splits, output_splits, group), None, None, None


_BACKWARDS = {
    "all_gather": lambda ctx, dy: (reduce_scatter(dy, *ctx.inputs), None, None),
    "reduce_scatter": lambda ctx, dy: (all_gather(dy, *ctx.inputs), None, None),
    "all_reduce": lambda ctx, dy: (all_reduce(dy, *ctx.inputs), None),
    "gather_parts": _keep_part,
    "all_to_all": _send_back,
}
for _name, _backward in _BACKWARDS.items():
    torch.library.register_autograd(f"titanlite::{_name}", _backward, setup_context=_save)
