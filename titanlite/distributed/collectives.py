"""Differentiable collectives as torch operators: gather and scatter along a dim, sum, all-to-all of rows.

As operators (`titanlite::...`) with fake kernels they can be kept by selective activation checkpointing, and do not
break a compiled graph. A process group is passed by name, because operators take no objects. FSDP2 gathers and reduces
with `all_gather_single` and `reduce_scatter_single`; these and `all_reduce_sum` are not differentiable.

Collectives: every rank of the group must call, in the same order.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlite.base import timers
from titanlite.ops.kernels import find_kernel

# torch 2.13 renamed both and warns about the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DEFAULT_TIMEOUT_S = 1800.0  # that of gloo's groups

_FEW_BYTES = 64 << 10
"""Up to here, every rank sums all of a tensor."""


class Transport(Protocol):
    """An exchange of contiguous host tensors between the ranks of one group, in place of gloo's.

    The kernel `transport`, called with a group and a timeout in seconds, opens one, or returns None. It is collective,
    and so are all methods. Sums are those of `sum_pieces`.
    """

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None: ...
    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None: ...
    def all_reduce(self, x: torch.Tensor) -> None: ...
    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None: ...
    def close(self) -> None: ...


_groups: dict[str, dist.ProcessGroup] = {}
_transports: dict[dist.ProcessGroup, Transport | None] = {}
_timeout_s = DEFAULT_TIMEOUT_S


def register_group(group: dist.ProcessGroup) -> str:
    """Make `group` known to the operators; returns its name."""
    _groups[group.group_name] = group
    return group.group_name


def limit_waiting(timeout_s: float) -> None:
    """Set how long ranks wait for each other in collectives of all ranks on the host."""
    global _timeout_s
    _timeout_s = timeout_s


def forget_groups() -> None:
    """Forget all groups: they keep connections and threads as long as they are referenced."""
    for transport in _transports.values():
        if transport is not None:
            transport.close()
    _transports.clear()
    _groups.clear()


def all_gather_single(
    out: torch.Tensor, x: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Call `torch.distributed.all_gather_single`; on the host see `host_all_gather`."""
    if async_op or not _is_on_gloo(out, x, group):
        return _all_gather(out, x, group=group, async_op=async_op)
    host_all_gather(out, x, register_group(group))
    return None


def reduce_scatter_single(
    out: torch.Tensor, x: torch.Tensor, *, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> dist.Work | None:
    """Call `torch.distributed.reduce_scatter_single`; sums on the host see `host_reduce_scatter`."""
    if async_op or op != dist.ReduceOp.SUM or not _is_on_gloo(out, x, group):
        return _reduce_scatter(out, x, op=op, group=group, async_op=async_op)
    host_reduce_scatter(out, x, register_group(group))
    return None


def all_reduce_sum(x: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """Sum `x` over the ranks of `group`, or all, in place: on the host contiguous, and in the order of the ranks.

    On the host, every rank sums a small tensor completely, for which gloo takes several times as long. Of a larger one
    each rank sums a part, and the parts are gathered. The bits are the same either way.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if not _is_on_gloo(x, x, group):
        dist.all_reduce(x, group=group)
    elif group.size() > 1:
        _host_all_reduce(x, group)


def _host_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    size, name = group.size(), register_group(group)
    if x.nbytes > _FEW_BYTES:
        flat, missing = x.view(-1), -x.numel() % size
        whole = F.pad(flat, (0, missing)) if missing else flat
        part = whole.new_empty(whole.numel() // size)
        host_reduce_scatter(part, whole, name)
        host_all_gather(whole, part, name)
        if missing:
            flat.copy_(whole[:-missing])
    elif (transport := _transport(group)) is not None:
        transport.all_reduce(x)
    else:
        pieces = x.new_empty(size, *x.shape)
        _all_gather(pieces.view(-1), x.view(-1), group=group)
        sum_pieces(x, pieces)


def all_to_all_single(
    out: torch.Tensor,
    x: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    *,
    group: dist.ProcessGroup,
) -> None:
    """Call `torch.distributed.all_to_all_single` on contiguous tensors; through a `Transport` where there is one."""
    transport = _transport(group) if _is_on_gloo(out, x, group) else None
    if transport is None:
        dist.all_to_all_single(out, x, list(output_splits), list(input_splits), group=group)
    else:
        transport.all_to_all(out, x, output_splits, input_splits)


def _is_on_gloo(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    # Not `get_backend`: for a group with a backend per type of device, it names none of them.
    return x.device.type == "cpu" and out.dtype == x.dtype and "cpu:gloo" in dist.get_backend_config(group).split(",")


def _transport(group: dist.ProcessGroup) -> Transport | None:
    """Return the transport between the ranks of `group`, or None. Collective at the first call for a group."""
    if group not in _transports:
        timeout_s = _timeout_s if group is dist.group.WORLD else DEFAULT_TIMEOUT_S
        open_transport = find_kernel("transport", torch.device("cpu"))
        _transports[group] = None if open_transport is None else open_transport(group, timeout_s)
    return _transports[group]


def sum_pieces(out: torch.Tensor, pieces: torch.Tensor) -> None:
    """Write the sum over the first dim of `pieces` to `out`, in order. Two-byte floats are added in float32."""
    narrow = out.is_floating_point() and out.itemsize < 4
    total = torch.empty_like(out, dtype=torch.float32) if narrow else out
    total.copy_(pieces[0])
    for piece in pieces[1:]:
        total += piece
    if narrow:
        out.copy_(total)


@torch.library.custom_op("titanlite::host_all_gather", mutates_args=("out",))
def host_all_gather(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    """Gather host tensors, through a `Transport` where there is one, otherwise as gloo does."""
    transport, x = _transport(_groups[group]), x.contiguous()
    if transport is None:
        _all_gather(out, x, group=_groups[group])
    else:
        transport.all_gather(out, x)


@torch.library.custom_op("titanlite::host_reduce_scatter", mutates_args=("out",))
def host_reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    """Exchange the pieces of host tensors, and sum those of this rank in the order of the ranks.

    gloo reduces the whole on every rank and rounds bfloat16 after every addition; here it is rounded once. The bits do
    not depend on where the ranks are.
    """
    transport, x = _transport(_groups[group]), x.contiguous()
    if transport is not None:
        transport.reduce_scatter(out, x)
        return
    pieces = torch.empty_like(x)
    dist.all_to_all_single(pieces, x, group=_groups[group])
    sum_pieces(out, pieces.view(_groups[group].size(), *out.shape))


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
    with timers.collective():
        all_reduce_sum(out, group=_groups[group])
    return out


@torch.library.custom_op("titanlite::gather_parts", mutates_args=())
def gather_parts(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Concatenate the ranks' equal pieces along `dim`, for what every rank then computes alike.

    All ranks know the one gradient of the result, and each keeps its piece.
    """
    return all_gather(x, dim, group)


@torch.library.custom_op("titanlite::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> torch.Tensor:
    """Send `input_splits[r]` rows of x to each rank r, receive `output_splits[r]`; the gradient goes back alike."""
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    with timers.collective():
        all_to_all_single(out, x.contiguous(), output_splits, input_splits, group=_groups[group])
    return out


def start_all_to_all(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> tuple[torch.Tensor, dist.Work | None]:
    """Start an `all_to_all` that overlaps with kernels: read the result after `wait` of the second, if there is one."""
    out, x = x.new_empty(sum(output_splits), *x.shape[1:]), x.contiguous()
    if _is_on_gloo(out, x, _groups[group]):
        return all_to_all(x, output_splits, input_splits, group), None
    splits = (list(output_splits), list(input_splits))
    return out, dist.all_to_all_single(out, x, *splits, group=_groups[group], async_op=True)


def own_part(x: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    """Return the piece of rank `rank` of `x`, which `size` ranks have alike, split evenly along `dim`; a view."""
    return x.unflatten(dim, (size, -1)).select(dim, rank)


@gather_parts.register_fake
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


def _save(ctx, inputs, output) -> None:
    ctx.inputs = inputs[1:]


def _keep_part(ctx, grad: torch.Tensor):
    dim, group = ctx.inputs
    return own_part(grad, dim, _groups[group].size(), _groups[group].rank()), None, None


all_gather.register_autograd(lambda ctx, dy: (reduce_scatter(dy, *ctx.inputs), None, None), setup_context=_save)
reduce_scatter.register_autograd(lambda ctx, dy: (all_gather(dy, *ctx.inputs), None, None), setup_context=_save)
all_reduce.register_autograd(lambda ctx, dy: (all_reduce(dy, *ctx.inputs), None), setup_context=_save)
gather_parts.register_autograd(_keep_part, setup_context=_save)
all_to_all.register_autograd(
    lambda ctx, dy: (all_to_all(dy, ctx.inputs[1], ctx.inputs[0], ctx.inputs[2]), None, None, None), setup_context=_save
)
