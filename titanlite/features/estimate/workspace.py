"""Memory that kernels on CUDA hold only while they run; no operator outside sees it."""

import math
from typing import Any

import torch

import titanlite.ops.attention
import titanlite.ops.moe_experts  # noqa: F401
from titanlite.distributed import collectives  # noqa: F401 - defines torch.ops.titanlite.all_gather and others

_aten, _own = torch.ops.aten, torch.ops.titanlite


def cuda_workspace(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes inside one call of `func`, beside its arguments and its result; 0 where it is nothing of weight."""
    count = _INSIDE.get(func)
    return 0 if count is None else count(args, out)


def _moe_experts_forward(args: tuple[Any, ...], out: Any) -> int:
    """Tensors h (R, I), and the results per row (R, D); see `ops.moe_experts`."""
    x, gate_up, _, _, token, *_ = args
    inner = gate_up.shape[1] // 2
    return token.shape[0] * (inner + x.shape[1]) * x.element_size()


def _moe_experts_backward(args: tuple[Any, ...], out: Any) -> int:
    """Tensors dz (R, 2 I) with h (R, I) first, then with the gradients per row (R, D)."""
    _, x, gate_up, _, _, token, *_ = args
    two_inner = gate_up.shape[1]
    return token.shape[0] * (two_inner + max(two_inner // 2, x.shape[1])) * x.element_size()


def _pieces(args: tuple[Any, ...], out: Any) -> int:
    """The tensor in the order of the ranks, before it is gathered into, or scattered from, the order of its dim."""
    whole = max(args[0].nbytes, out.nbytes)
    # Along the first dim that has more than one element the orders are the same.
    return 0 if math.prod(args[0].shape[: args[1]]) == 1 else whole


def _flash_backward(args: tuple[Any, ...], out: Any) -> int:
    """The gradient of q is summed in float32, its row sums too; those of shared heads are made for every query head."""
    _, q, k, *_ = args
    batch, heads, queries, width = q.shape
    rounded = -(-queries // 128) * 128
    shared = 2 * batch * heads * k.shape[2] * width * q.element_size() if heads != k.shape[1] else 0
    return batch * heads * rounded * (width + 1) * 4 + shared


def _efficient_backward(args: tuple[Any, ...], out: Any) -> int:
    """Row sums, and float32 sums of gradients where heads are wider than 64."""
    _, q, k, *_ = args
    batch, heads, queries, width = q.shape
    sums = batch * heads * (queries + 2 * k.shape[2]) * width * 4 if width > 64 else 0
    return batch * heads * queries * 4 + sums


_INSIDE = {
    _own.moe_experts_forward.default: _moe_experts_forward,
    _own.moe_experts_backward.default: _moe_experts_backward,
    _own.all_gather.default: _pieces,
    _own.reduce_scatter.default: _pieces,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
