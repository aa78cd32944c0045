"""The cost of operators in a plan: matmuls, bytes to memory and between ranks, memory inside of
CUDA kernels.
"""

import math
from dataclasses import dataclass
from functools import cache
from operator import add
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

import titanlite.ops.attention
import titanlite.ops.delta_inputs
import titanlite.ops.moe_experts  # noqa: F401 - defines its operators and their formulas
from titanlite.distributed import collectives  # noqa: F401 - defines torch.ops.titanlite.all_gather and others

_aten, _own = torch.ops.aten, torch.ops.titanlite
_c10d, _functional = torch.ops.c10d, torch.ops._c10d_functional


@dataclass(frozen=True)
class Work:
    """The work of one or several calls."""

    # multiplications and additions of matmuls, as kernels do them: half of them for causal ones
    flops: int = 0
    nbytes: int = 0  # read from and written to memory; for collectives, the bytes of their tensors
    launches: int = 0  # kernels
    syncs: int = 0  # number of times that the host waits for the device

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, factor: int) -> "Work":
        return Work(*(factor * count for count in vars(self).values()))


class Call(NamedTuple):
    """The facts on which the time of one call depends."""

    rate: str  # key of `hardware.RATES`
    # Set for matmuls, which take the longer of both times. The time of other calls follows from all
    # their bytes.
    flops: int = 0
    nbytes: int = 0


_WIDE_EXPERTS = 1024


def _grouped(packet: Any, args: tuple[Any, ...]) -> str:
    """Return the key of the rate for an experts' matmul, which depends on the smaller dim of each
    expert's matrix.
    """
    first, second = (tensor.shape for tensor in args[:2])
    if packet is _own.gather_swiglu:
        narrow = min(second[2], second[1] // 2)
    elif packet in (_own.grouped_mm_wgrad, _own.grouped_mm_wgrad_into):
        narrow = min(first[1], second[1])
    else:
        narrow = min(second[1:])
    return "grouped wide" if narrow >= _WIDE_EXPERTS else "grouped"


_FLASH = _aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_EFFICIENT = _aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
_HOST_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default
_HOST_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_VARLEN = torch.ops.torch_attn._varlen_attn.default
_VARLEN_BACKWARD = torch.ops.torch_attn._varlen_attn_backward.default
_SINKS, _SINKS_BACKWARD = _own.sink_attention.default, _own.sink_attention_backward.default
GROUPED_OPS = {
    _own.grouped_mm,
    _own.grouped_mm_wgrad,
    _own.grouped_mm_wgrad_into,
    _own.gather_swiglu,
    _own.gather_swiglu_backward,
}
ATTENTION_OPS = {
    _FLASH: "flash",
    _FLASH_BACKWARD: "flash",
    _VARLEN: "flash",
    _VARLEN_BACKWARD: "flash",
    _SINKS: "flash",
    _SINKS_BACKWARD: "flash",
    _HOST_FLASH: "flash",
    _HOST_FLASH_BACKWARD: "flash",
    _EFFICIENT: "masked",
    _EFFICIENT_BACKWARD: "masked",
}


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of one call by name, without defaults."""
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def _attention_flops(given: dict[str, Any], is_backward: bool) -> int:
    """Return the FLOPs of attention: two matmuls over all pairs in forward, five in backward.

    Each query head counts with its own keys, and each document with the maximal length. Causal
    kernels skip blocks above the diagonal; kernels with a window also skip the keys before it.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    longest = given["max_q"] if query.dim() == 3 else key.shape[2]
    pairs = query.numel() // query.shape[-1] * longest
    width, value_width = query.shape[-1], value.shape[-1]
    widths = 3 * width + 2 * value_width if is_backward else width + value_width
    flops = 2 * pairs * widths
    before, after = given.get("window_size") or (-1, -1)
    if before >= 0:
        window = min(before + 1, longest)
        return flops * window * (2 * longest - window) // (2 * longest**2)
    return flops - flops // 2 if given.get("is_causal") or after == 0 else flops


def count_flops(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[str, int]:
    """Return the rate and the FLOPs of one call; 0 for operators that multiply no matrices."""
    packet = getattr(func, "_overloadpacket", None)
    if func in ATTENTION_OPS:
        given = _arguments(func, args, kwargs)
        return ATTENTION_OPS[func], _attention_flops(given, "backward" in func.name())
    # The first argument may be broadcast, and is not multiplied.
    factors = args[1:3] if packet in (_aten.addmm, _aten.addmm_) else args
    if packet in (_aten.addmm, _aten.addmm_):
        flops = 2 * factors[0].shape[0] * factors[0].shape[1] * factors[1].shape[1]
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
    else:
        return "", 0
    if tensors_of(factors)[0].dtype.itemsize > 2:
        return "float32", flops
    return _grouped(packet, args) if packet in GROUPED_OPS else "dense", flops


# Operators that read as much as they write, whatever the size of their source.
_PICKING = {
    _aten.embedding.default,
    _aten.index_select.default,
    _aten.index.Tensor,
    _aten.gather.default,
}
_OVERWRITING = {
    _aten.copy_.default,
    _aten._foreach_copy_.default,
    _aten.fill_.Scalar,
    _aten.zero_.default,
}
_OVERWRITING |= {torch.ops.fsdp.split_with_sizes_copy.default, torch.ops.fsdp.chunk_cat.default}
# Operators that are as fast for two-byte dtypes as for others.
_MOVING = (_OVERWRITING | _PICKING) - {torch.ops.fsdp.chunk_cat.default}
_MOVING |= {_aten._to_copy.default, _aten.clone.default, _aten.cat.default}
# fused kernels: close to the memory's rate
_FUSED = {
    "titanlite::gather_sum",
    "titanlite::add_norm",
    "titanlite::add_norm_backward",
    "titanlite::gated_norm",
    "titanlite::gated_norm_backward",
    "titanlite::rotate_heads",
    "titanlite::rotate_heads_backward",
    "titanlite::swiglu_apart",
    "titanlite::swiglu_apart_backward",
    "titanlite::delta_inputs",
    "titanlite::delta_inputs_backward",
}
_ADAMW = {"aten::_fused_adamw_", "titanlite::adamw_rounded"}
_WITHOUT_KERNEL = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
    torch.ops.fsdp.all_gather_copy_in,  # the copy of a shard is small
}


@cache
def _written(func: Any) -> dict[str, bool]:
    """Return the arguments that `func` writes, by name; True means that it does not read the old
    content.
    """
    names = [a.name for a in func._schema.arguments if getattr(a.alias_info, "is_write", False)]
    overwrites = func in _OVERWRITING
    return {name: overwrites or name in ("out", "grad_input") for name in names}


# Numbers of kernels, for operators that launch several. A kernel over many tensors counts as one.
_KERNELS = {
    "titanlite::gather_swiglu_backward": 2,  # the second sums over columns
    "titanlite::grouped_mm_wgrad_into": 2,  # the second copies rows
    "titanlite::planned_rms_norm_backward": 2,
    "titanlite::add_norm_backward": 2,  # the second sums the weight's parts
    "titanlite::gated_norm_backward": 2,
    "titanlite::delta_inputs_backward": 2,
    "titanlite::rotate_heads_backward": 4,
    "titanlite::group_rows": 2,  # the first counts
    "torch_attn::_varlen_attn_backward": 3,
    "titanlite::sink_attention": 5,
    "titanlite::sink_attention_backward": 9,
}


def measure(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, inside: int
) -> tuple[Call, Work] | None:
    """Return the work of one call that is not a collective; None for views, which launch nothing.

    `inside` is the number of bytes that the kernel holds while it runs; it writes and reads them.
    """
    without_time = func.is_view
    without_time |= func.namespace in (*_COLLECTIVE_NAMESPACES, "profiler", "prim")
    if without_time or getattr(func, "_overloadpacket", None) in _WITHOUT_KERNEL:
        return None
    if func is _aten._local_scalar_dense.default:
        return Call("memory"), Work(syncs=1)
    product, flops = count_flops(func, args, kwargs, out)
    written = _written(func)
    read = list(tensors_of((args, kwargs)))
    made = list(tensors_of(out))
    if func in _PICKING:
        nbytes = 2 * sum(map(_held, made))
    else:
        given = _arguments(func, args, kwargs)
        changed = {name: sum(map(_held, tensors_of(given.get(name)))) for name in written}
        nbytes = sum(map(_held, read)) + (
            sum(changed.values()) if written else sum(map(_held, made))
        )
        nbytes -= sum(changed[name] for name, is_overwritten in written.items() if is_overwritten)
        if func is _aten._fused_adamw_.default:
            nbytes -= changed["grads"]  # gradients are written only to unscale them
    nbytes += 2 * inside
    name = func.name()
    launches = _KERNELS.get(name, 1)
    if flops:
        call = Call(product, flops, nbytes)
    elif name in _ADAMW:
        call = Call("optimizer")
    elif func in _MOVING or name in _FUSED or all(t.dtype.itemsize != 2 for t in (*read, *made)):
        call = Call("memory")
    else:
        call = Call("elementwise")
    return call, Work(flops=flops, nbytes=nbytes, launches=launches)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """List the tensors in nested arguments or results."""
    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]


def _held(tensor: torch.Tensor) -> int:
    # an expanded tensor has more elements than memory
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class Moved(NamedTuple):
    """One collective."""

    kind: str  # one of the values of `_KINDS`, after `BESIDE` if the collective overlaps
    group: str  # name of the process group
    # of the whole tensor that is gathered, scattered or reduced; for an all-to-all, of the part
    # that this rank sends
    nbytes: int


BESIDE = "overlapped "
"""Prefix of the kind of a collective that overlaps with kernels, whatever its axis is."""

# Part of an operator's name, without underscores -> kind of collective.
_KINDS = {
    "allgather": "all_gather",
    "gatherparts": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}
# the bytes are counted on the sender
_WITHOUT_BYTES = {_functional.wait_tensor.default, _c10d.barrier.default, _c10d.recv_.default}
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


def moved_by(func: Any, args: tuple[Any, ...], out: Any) -> Moved | None:
    """Return the collective that a call of an operator makes; None for most operators.

    Raises:
        NotImplementedError: its kind or its tensor is not known. It would be silently left out.
    """
    is_own = func.namespace == "titanlite"
    if not (is_own or func.namespace in _COLLECTIVE_NAMESPACES) or func in _WITHOUT_BYTES:
        return None
    name = func.name().replace("_", "")
    kind = next((kind for part, kind in _KINDS.items() if part in name), None)
    if kind is None and is_own:
        return None
    given = _arguments(func, args, {})
    sent = [given[key] for key in ("input", "input_tensor", "tensors", "x") if key in given]
    moved = tensors_of(out if kind == "all_gather" else sent)
    if kind is None or len(moved) != 1:
        raise NotImplementedError(
            f"plan: the collective {func} is not in titanlite.features.estimate.operators."
        )
    (group,) = (given[key] for key in ("group", "group_name", "process_group") if key in given)
    if not isinstance(group, str):
        group = dist.ProcessGroup.unbox(group).group_name
    # `start_all_to_all` is the only caller of this operator
    beside = BESIDE if func is _c10d.alltoall_base_.default else ""
    return Moved(beside + kind, group, moved[0].nbytes)


def cuda_workspace(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that CUDA's kernel of `func` holds only while it runs, in addition to its
    arguments and its result.
    """
    return _INSIDE[func](args, out) if func in _INSIDE else 0


def _pieces(args: tuple[Any, ...], out: Any) -> int:
    """Count the bytes of the reordered copy that a gather into, or a scatter from, a later dim
    makes.
    """
    whole = max(args[0].nbytes, out.nbytes)
    # Along the first dim with more than one element, both orders are the same.
    return 0 if math.prod(args[0].shape[: args[1]]) == 1 else whole


def _flash_backward_inside(args: tuple[Any, ...], out: Any) -> int:
    """Count the bytes of q's gradient and row sums in float32, and of the gradients of shared heads
    for each query head.
    """
    _, q, k, *_ = args
    if q.dim() == 3:  # (tokens of all documents, heads, width)
        q, k = (x.transpose(0, 1).unsqueeze(0) for x in (q, k))
    batch, heads, queries, width = q.shape
    rounded = -(-queries // 128) * 128
    shared = 2 * batch * heads * k.shape[2] * width * q.element_size() if heads != k.shape[1] else 0
    return batch * heads * rounded * (width + 1) * 4 + shared


def _efficient_backward_inside(args: tuple[Any, ...], out: Any) -> int:
    """Count the bytes of row sums and, for heads wider than 64, of float32 sums of gradients."""
    _, q, k, *_ = args
    batch, heads, queries, width = q.shape
    sums = batch * heads * (queries + 2 * k.shape[2]) * width * 4 if width > 64 else 0
    return batch * heads * queries * 4 + sums


def _copied_rows(args: tuple[Any, ...], out: Any) -> int:
    """Count the bytes of operands whose rows are copied, as on Hopper."""
    gathered = zip(args[:2], args[5:], strict=False)  # rows are optional
    return sum(
        rows.numel() * t.shape[1] * t.element_size() for t, rows in gathered if rows is not None
    )


_INSIDE = {
    _own.grouped_mm_wgrad_into.default: _copied_rows,
    _own.all_gather.default: _pieces,
    _own.reduce_scatter.default: _pieces,
    _FLASH_BACKWARD: _flash_backward_inside,
    _VARLEN_BACKWARD: _flash_backward_inside,
    _SINKS_BACKWARD: _flash_backward_inside,
    _EFFICIENT_BACKWARD: _efficient_backward_inside,
}
