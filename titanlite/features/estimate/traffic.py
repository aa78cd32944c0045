"""Which operators are collectives, and how much they move: c10d's own, the functional ones of DTensor, titanlite's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titanlite.distributed import collectives  # noqa: F401 - defines torch.ops.titanlite.all_gather and others

_c10d, _functional, _own = torch.ops.c10d, torch.ops._c10d_functional, torch.ops.titanlite


class Moved(NamedTuple):
    """One collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast" or "send".
        group: name of the process group.
        tensor: the whole: what is gathered, scattered or reduced; of an all-to-all what this rank sends.
    """

    kind: str
    group: str
    tensor: torch.Tensor


def _name(group: Any) -> str:
    return group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name


def _of_list(kind: str) -> Callable[[Any, Any], list[Moved]]:
    return lambda args, out: [Moved(kind, _name(args[1]), tensor) for tensor in args[0]]


# Operator -> (arguments, result) -> what it moves.
_COLLECTIVES: dict[Any, Callable[[Any, Any], list[Moved]]] = {
    _c10d._allgather_base_.default: lambda args, out: [Moved("all_gather", _name(args[2]), args[0])],
    _c10d._reduce_scatter_base_.default: lambda args, out: [Moved("reduce_scatter", _name(args[2]), args[1])],
    _c10d.allreduce_.default: _of_list("all_reduce"),
    _c10d.broadcast_.default: _of_list("broadcast"),
    _c10d.send.default: _of_list("send"),
    _c10d.alltoall_base_.default: lambda args, out: [Moved("all_to_all", _name(args[2]), args[1])],
    _functional.all_gather_into_tensor.default: lambda args, out: [Moved("all_gather", _name(args[2]), out)],
    _functional.reduce_scatter_tensor.default: lambda args, out: [Moved("reduce_scatter", _name(args[3]), args[0])],
    _functional.all_reduce.default: lambda args, out: [Moved("all_reduce", _name(args[2]), args[0])],
    _functional.all_reduce_.default: lambda args, out: [Moved("all_reduce", _name(args[2]), args[0])],
    _functional.all_to_all_single.default: lambda args, out: [Moved("all_to_all", _name(args[3]), args[0])],
    _functional.broadcast.default: lambda args, out: [Moved("broadcast", _name(args[2]), args[0])],
    _own.host_all_gather.default: lambda args, out: [Moved("all_gather", args[2], args[0])],
    _own.host_reduce_scatter.default: lambda args, out: [Moved("reduce_scatter", args[2], args[1])],
    _own.all_gather.default: lambda args, out: [Moved("all_gather", args[2], out)],
    _own.reduce_scatter.default: lambda args, out: [Moved("reduce_scatter", args[2], args[0])],
    _own.all_reduce.default: lambda args, out: [Moved("all_reduce", args[1], args[0])],
    _own.gather_parts.default: lambda args, out: [Moved("all_gather", args[2], out)],
    _own.all_to_all.default: lambda args, out: [Moved("all_to_all", args[3], args[0])],
}
_WITHOUT_BYTES = {_functional.wait_tensor.default, _c10d.barrier.default, _c10d.recv_.default}  # sent by others
EXCHANGES = {
    *(_own.all_gather.default, _own.reduce_scatter.default, _own.all_reduce.default, _own.all_to_all.default),
    _own.gather_parts.default,
    *(_functional.all_gather_into_tensor.default, _functional.reduce_scatter_tensor.default),
    _functional.all_to_all_single.default,
}
"""Operators whose results are activations that came from other ranks."""


def moved_by(func: Any, args: tuple[Any, ...], out: Any) -> list[Moved]:
    """What one call of an operator moves between ranks; mostly nothing.

    Raises:
        NotImplementedError: a collective that is not in the table, which would be left out in silence.
    """
    known = _COLLECTIVES.get(func)
    if known is not None:
        return known(args, out)
    if func.namespace in ("c10d", "_c10d_functional") and func not in _WITHOUT_BYTES:
        raise NotImplementedError(f"plan: the collective {func} is not in titanlite.features.estimate.traffic.")
    return []
