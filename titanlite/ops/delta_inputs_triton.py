"""Triton kernels of `delta_inputs.py`, forward and backward, with their launchers.

A program has some tokens and one block of a key head's columns: its query, its key, or a part of
its values with the same width. Backward recomputes the sums of every token that reads its own, so
no tensor of the inputs' size goes through memory between two kernels. The gradient of the taps is
the sum of parts, one of each program, in order.

Shapes: B batch, S sequence, H key heads, K width of a key, J inputs of a key head, W taps.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.ops.delta_inputs import empty_heads
from titanlite.ops.launchers import cdiv, launch

TOKENS = 32  # tokens of one program
# with 4 warps, backward spills 0.6 KB of registers per thread
WARPS = 4
BACKWARD_WARPS = 8


@triton.jit
def _place(x_ptr, taps_ptr, documents_ptr, S, H, J, stride_b, stride_h, W, K, BT):
    """Return a program's row, head, block, tokens and columns, the starts of its head's inputs and
    taps, and its row's documents.
    """
    block, program = tl.program_id(1), tl.program_id(2)
    b = (program // H).to(tl.int64)
    head = program % H
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    columns = block * K + tl.arange(0, K)
    x = x_ptr + b * stride_b + head * stride_h
    documents = documents_ptr + b * S
    return b, head, block, t, columns, x, taps_ptr + head * J * W, documents


@triton.jit
def _result(q_ptr, k_ptr, v_ptr, b, head, block, t, columns, S, H, J, K):
    """Return the position of the result for these columns, in the queries, keys or values."""
    pointer = q_ptr
    if block == 1:
        pointer = k_ptr
    if block > 1:
        pointer = v_ptr
    width = tl.where(block < 2, K, J - 2 * K)
    first = tl.minimum(block, 2) * K
    return pointer + ((b * S + t)[:, None] * H + head) * width + (columns - first)[None, :]


@triton.jit
def _read(x, documents, t, i, columns, S, J, stride):
    """Load the inputs i tokens before t, float32 (BT, K); zeros if they are in a different document
    than t.
    """
    seen = (t < S) & (t >= i)
    here = tl.load(documents + t, mask=seen, other=0)
    seen &= tl.load(documents + t - i, mask=seen, other=0) == here
    place = x + (t - i)[:, None] * stride + columns[None, :]
    return tl.load(place, mask=seen[:, None] & (columns < J)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _tap(taps, columns, J, i, W):
    return tl.load(taps + columns * W + W - 1 - i, mask=columns < J, other=0.0).to(tl.float32)


@triton.jit
def _convolve(x, taps, documents, t, columns, S, J, stride, W):
    """Return the sums before SiLU; 0 outside of the row."""
    total = 0.0
    for i in tl.static_range(W):
        value = _read(x, documents, t, i, columns, S, J, stride)
        total += value * _tap(taps, columns, J, i, W)[None, :]
    return total


@triton.jit
def _norm(y, block, K):
    """Return 1 / norm of queries and keys, times K ** -0.5 of queries."""
    scale = tl.rsqrt(tl.sum(y * y, 1) + 1e-6)
    return scale, scale * tl.where(block == 0, K**-0.5, 1.0)


@triton.jit
def delta_inputs_kernel(
    x_ptr,
    taps_ptr,
    documents_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    S,
    H,
    J,
    stride_b,
    stride_t,
    stride_h,
    W: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
):
    """Write silu(convolution), normalized for queries and keys."""
    b, head, block, t, columns, x, taps, documents = _place(
        x_ptr, taps_ptr, documents_ptr, S, H, J, stride_b, stride_h, W, K, BT
    )
    y = _convolve(x, taps, documents, t, columns, S, J, stride_t, W)
    y *= tl.sigmoid(y)
    if block < 2:
        _, scale = _norm(y, block, K)
        y *= scale[:, None]
    place = _result(q_ptr, k_ptr, v_ptr, b, head, block, t, columns, S, H, J, K)
    mask = (t < S)[:, None] & (columns < J)[None, :]
    tl.store(place, y.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def delta_inputs_backward_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    x_ptr,
    taps_ptr,
    documents_ptr,
    dx_ptr,
    dtaps_ptr,
    S,
    H,
    J,
    stride_b,
    stride_t,
    stride_h,
    W: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
):
    """Write dx (B, S, H, J) and parts of the taps' gradient, (B, tiles, H, W, J)."""
    b, head, block, t, columns, x, taps, documents = _place(
        x_ptr, taps_ptr, documents_ptr, S, H, J, stride_b, stride_h, W, K, BT
    )
    real = (columns < J)[None, :]
    here = tl.load(documents + t, mask=t < S, other=0)
    dx = 0.0
    for i in tl.static_range(W):  # gradient of the token that reads t as its i-th
        reader = t + i
        total = _convolve(x, taps, documents, reader, columns, S, J, stride_t, W)
        sigmoid = tl.sigmoid(total)
        y = total * sigmoid
        place = _result(dq_ptr, dk_ptr, dv_ptr, b, head, block, reader, columns, S, H, J, K)
        dy = tl.load(place, mask=(reader < S)[:, None] & real, other=0.0).to(tl.float32)
        if block < 2:
            inverse, scale = _norm(y, block, K)
            along = tl.sum(y * dy, 1) * inverse * inverse
            dy = (dy - y * along[:, None]) * scale[:, None]
        dtotal = dy * (sigmoid + y * (1.0 - sigmoid))
        same = tl.load(documents + reader, mask=reader < S, other=0) == here
        tap = _tap(taps, columns, J, i, W)[None, :]
        dx += tl.where(same[:, None], dtotal * tap, 0.0)
        if i == 0:
            part = (b * tl.num_programs(0) + tl.program_id(0)) * H + head
            for j in tl.static_range(W):
                value = _read(x, documents, t, j, columns, S, J, stride_t)
                to = dtaps_ptr + (part * W + W - 1 - j) * J + columns
                tl.store(to, tl.sum(dtotal * value, 0), mask=columns < J)
    place = dx_ptr + ((b * S + t)[:, None] * H + head) * J + columns[None, :]
    tl.store(place, dx.to(dx_ptr.dtype.element_ty), mask=(t < S)[:, None] & real)


def _launch_heads(
    kernel: Any, warps: int, x: Tensor, taps: Tensor, key_width: int, operands: Any
) -> None:
    batch, size, heads, inputs = x.shape
    grid = (cdiv(size, TOKENS), cdiv(inputs, key_width), batch * heads)
    sizes = (size, heads, inputs, *x.stride()[:3], taps.shape[2])
    launch(kernel, grid, *operands, *sizes, K=key_width, BT=TOKENS, num_warps=warps)


def delta_inputs(x: Tensor, taps: Tensor, documents: Tensor, key_width: int):
    """Return queries, keys and values of x, whose last dim has stride 1."""
    results = empty_heads(x, taps, documents, key_width)
    _launch_heads(delta_inputs_kernel, WARPS, x, taps, key_width, (x, taps, documents, *results))
    return results


def delta_inputs_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    x: Tensor,
    taps: Tensor,
    documents: Tensor,
    key_width: int,
):
    """Return the gradients of x and taps, contiguous."""
    batch, size, heads, inputs = x.shape
    dx = x.new_empty(x.shape)
    tiles = cdiv(size, TOKENS)
    shape = (batch, tiles, heads, taps.shape[2], inputs)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    operands = (dq, dk, dv, x, taps, documents, dx, parts)
    _launch_heads(delta_inputs_backward_kernel, BACKWARD_WARPS, x, taps, key_width, operands)
    return dx, parts.sum((0, 1)).mT.to(taps.dtype).contiguous()
