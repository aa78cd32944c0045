"""Triton kernels of `elementwise.py`, each of which replaces several passes over memory, and their
launchers.

Backward reads the inputs of forward and recomputes `1 / rms`. A weight's gradient is the sum of
parts: each of a constant number of programs sums the rows that it processes, so that the bits are
the same in every run and on every device.

Shapes: T tokens or rows, D width, H query heads, G key or value heads, K head width, R <= K rotated
part of it, P programs.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.ops.launchers import INTERPRETED, cdiv, launch, next_power_of_2

PROGRAMS = 4 if INTERPRETED else 528  # 4 for each multiprocessor of an H100
SWIGLU_BLOCK = 64 if INTERPRETED else 1024  # columns at once
NORM_ROWS = 16  # rows of `gated_norm` at once
HEAD_VALUES = 1024  # values of `rotate_heads` at once


@triton.jit
def _load(pointer, place, mask):
    return tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, place, mask, value):
    tl.store(pointer + place, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def add_norm_kernel(
    x_ptr, update_ptr, w_ptr, total_ptr, y_ptr, D, eps, offset, BLOCK: tl.constexpr
):
    """Write total = x + update, rounded as torch does, and total / rms(total) * (offset + w)."""
    row = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, BLOCK)
    total = _load(x_ptr, row + d, d < D)
    w = _load(w_ptr, d, d < D) + offset
    total += _load(update_ptr, row + d, d < D)
    rounded = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row + d, rounded, mask=d < D)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    _store(y_ptr, row + d, d < D, total * scale * w)


@triton.jit
def add_norm_backward_kernel(
    dtotal_ptr, dy_ptr, total_ptr, w_ptr, dx_ptr, dw_ptr, T, D, eps, offset, BLOCK: tl.constexpr
):
    """Write dx = dtotal + the norm's gradient, which is the gradient of both summands, and parts of
    dw, (P, D).
    """
    d = tl.arange(0, BLOCK)
    w = _load(w_ptr, d, d < D) + offset
    dw = tl.zeros((BLOCK,), tl.float32)
    for t in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        place = tl.cast(t, tl.int64) * D + d
        total, dy = _load(total_ptr, place, d < D), _load(dy_ptr, place, d < D)
        scale = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
        normed = total * scale
        dw += dy * normed
        dy *= w
        dx = (dy - normed * (tl.sum(dy * normed, 0) / D)) * scale
        dx += _load(dtotal_ptr, place, d < D)
        _store(dx_ptr, place, d < D, dx)
    tl.store(dw_ptr + tl.program_id(0) * D + d, dw, mask=d < D)


@triton.jit
def _gated_rows(block, T, G, R, D, stride_t, stride_h, BLOCK, BR):
    """Return the positions in x and in z, and a mask of valid ones. z has a stride per token and
    one per key head, which has R value heads.
    """
    row = (block * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    gate = row // G * stride_t + row % G // R * stride_h + row % R * D
    return row * D + d, gate + d, (row < T) & (d < D)


@triton.jit
def gated_norm_kernel(
    x_ptr,
    z_ptr,
    w_ptr,
    y_ptr,
    T,
    G,
    R,
    D,
    stride_t,
    stride_h,
    eps,
    BLOCK: tl.constexpr,
    BR: tl.constexpr,
):
    """Write x / rms(x) * w * silu(z) of BR rows."""
    place, gate, mask = _gated_rows(tl.program_id(0), T, G, R, D, stride_t, stride_h, BLOCK, BR)
    d = tl.arange(0, BLOCK)
    x = _load(x_ptr, place, mask)
    z = _load(z_ptr, gate, mask)
    w = _load(w_ptr, d, d < D)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    _store(y_ptr, place, mask, x * scale * w[None, :] * (z * tl.sigmoid(z)))


@triton.jit
def gated_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    z_ptr,
    w_ptr,
    dx_ptr,
    dz_ptr,
    dw_ptr,
    T,
    G,
    R,
    D,
    stride_t,
    stride_h,
    eps,
    BLOCK: tl.constexpr,
    BR: tl.constexpr,
):
    """Write gradients of x and z, contiguous, and parts of dw, (P, D)."""
    d = tl.arange(0, BLOCK)
    w = _load(w_ptr, d, d < D)[None, :]
    dw = tl.zeros((BLOCK,), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(T, BR), tl.num_programs(0)):
        place, gate, mask = _gated_rows(block, T, G, R, D, stride_t, stride_h, BLOCK, BR)
        x, z, dy = _load(x_ptr, place, mask), _load(z_ptr, gate, mask), _load(dy_ptr, place, mask)
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        normed = x * scale
        sigmoid = tl.sigmoid(z)
        silu = z * sigmoid
        _store(dz_ptr, place, mask, dy * w * normed * (sigmoid + silu * (1.0 - sigmoid)))
        dy *= silu
        dw += tl.sum(dy * normed, 0)
        dy *= w
        mean = (tl.sum(dy * normed, 1) / D)[:, None]
        _store(dx_ptr, place, mask, (dy - normed * mean) * scale)
    tl.store(dw_ptr + tl.program_id(0) * D + d, dw, mask=d < D)


@triton.jit
def _head_rows(q_ptr, k_ptr, stride_t, stride_h, t, H, G, K, BH):
    """Return pointers (BH, 1) to heads of token t, and which of them exist. Blocks of queries come
    first; keys are contiguous.
    """
    h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    t = tl.cast(t, tl.int64)
    rows = q_ptr + t * stride_t + h * stride_h
    count = H
    if tl.program_id(1) * BH >= H:
        h -= tl.cdiv(H, BH) * BH
        rows = k_ptr + t * G * K + h * K
        count = G
    return rows, h < count


@triton.jit
def _load_head(rows, real, K, R, HALF, REST):
    """Load both halves of the rotated part, and the rest."""
    i, j = tl.arange(0, HALF)[None, :], tl.arange(0, REST)[None, :]
    is_rotated = real & (i < R // 2)
    is_rest = real & (j < K - R)
    a = _load(rows, i, is_rotated)
    b = _load(rows, R // 2 + i, is_rotated)
    return a, b, _load(rows, R + j, is_rest)


@triton.jit
def _store_head(rows, real, a, b, c, K, R, HALF, REST):
    i, j = tl.arange(0, HALF)[None, :], tl.arange(0, REST)[None, :]
    is_rotated = real & (i < R // 2)
    is_rest = real & (j < K - R)
    _store(rows, i, is_rotated, a)
    _store(rows, R // 2 + i, is_rotated, b)
    _store(rows, R + j, is_rest, c)


@triton.jit
def _load_weights(qw_ptr, kw_ptr, H, offset, K, R, HALF, REST, BH):
    w_ptr = qw_ptr
    if tl.program_id(1) * BH >= H:
        w_ptr = kw_ptr
    a, b, c = _load_head(w_ptr, tl.arange(0, 1)[:, None] < H, K, R, HALF, REST)
    return a + offset, b + offset, c + offset


@triton.jit
def _load_angles(cos_ptr, sin_ptr, t, R, HALF):
    """Return cosines and sines (1, R / 2); both halves of `rope_cos_sin` are equal."""
    i = tl.arange(0, HALF)[None, :]
    place = tl.cast(t, tl.int64) * R + i
    return _load(cos_ptr, place, i < R // 2), _load(sin_ptr, place, i < R // 2)


@triton.jit
def rotate_heads_kernel(
    q_ptr,
    k_ptr,
    qw_ptr,
    kw_ptr,
    cos_ptr,
    sin_ptr,
    q_out,
    k_out,
    stride_t,
    stride_h,
    H,
    G,
    eps,
    offset,
    K: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BH: tl.constexpr,
):
    """Normalize each of BH heads if there are weights, then rotate its first R values."""
    t = tl.program_id(0)
    rows, real = _head_rows(q_ptr, k_ptr, stride_t, stride_h, t, H, G, K, BH)
    a, b, c = _load_head(rows, real, K, R, HALF, REST)
    if qw_ptr is not None:
        wa, wb, wc = _load_weights(qw_ptr, kw_ptr, H, offset, K, R, HALF, REST, BH)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / K + eps)[:, None]
        a, b, c = a * scale * wa, b * scale * wb, c * scale * wc
    cos, sin = _load_angles(cos_ptr, sin_ptr, t, R, HALF)
    rows, _ = _head_rows(q_out, k_out, H * K, K, t, H, G, K, BH)
    _store_head(rows, real, a * cos - b * sin, b * cos + a * sin, c, K, R, HALF, REST)


@triton.jit
def rotate_heads_backward_kernel(
    dq_ptr,
    dk_ptr,
    q_ptr,
    k_ptr,
    qw_ptr,
    kw_ptr,
    cos_ptr,
    sin_ptr,
    dq_out,
    dk_out,
    dw_ptr,
    stride_t,
    stride_h,
    T,
    H,
    G,
    eps,
    offset,
    K: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BH: tl.constexpr,
):
    """Write the gradients of q and k from contiguous dq and dk, and parts of the weights'
    gradients, (P, blocks, K).
    """
    dwa, dwb = tl.zeros((1, HALF), tl.float32), tl.zeros((1, HALF), tl.float32)
    dwc = tl.zeros((1, REST), tl.float32)
    wa, wb, wc = _load_weights(qw_ptr, kw_ptr, H, offset, K, R, HALF, REST, BH)
    for t in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        rows, real = _head_rows(dq_ptr, dk_ptr, H * K, K, t, H, G, K, BH)
        da, db, dc = _load_head(rows, real, K, R, HALF, REST)
        cos, sin = _load_angles(cos_ptr, sin_ptr, t, R, HALF)
        da, db = da * cos + db * sin, db * cos - da * sin
        rows, _ = _head_rows(q_ptr, k_ptr, stride_t, stride_h, t, H, G, K, BH)
        a, b, c = _load_head(rows, real, K, R, HALF, REST)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / K + eps)[:, None]
        a, b, c = a * scale, b * scale, c * scale
        dwa += tl.sum(da * a, 0)[None, :]
        dwb += tl.sum(db * b, 0)[None, :]
        dwc += tl.sum(dc * c, 0)[None, :]
        da, db, dc = da * wa, db * wb, dc * wc
        mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1) + tl.sum(dc * c, 1)) / K)[:, None]
        da, db, dc = (da - a * mean) * scale, (db - b * mean) * scale, (dc - c * mean) * scale
        rows, _ = _head_rows(dq_out, dk_out, H * K, K, t, H, G, K, BH)
        _store_head(rows, real, da, db, dc, K, R, HALF, REST)
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    _store_head(dw_ptr + part * K, tl.arange(0, 1)[:, None] < T, dwa, dwb, dwc, K, R, HALF, REST)


@triton.jit
def swiglu_apart_kernel(gate_ptr, up_ptr, out_ptr, D, BLOCK: tl.constexpr):
    """Write silu(gate) * up."""
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * D + d
    gate, up = _load(gate_ptr, place, d < D), _load(up_ptr, place, d < D)
    _store(out_ptr, place, d < D, gate * tl.sigmoid(gate) * up)


@triton.jit
def swiglu_apart_backward_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, D, BLOCK: tl.constexpr
):
    """Write the gradients of gate and up."""
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * D + d
    gate, up = _load(gate_ptr, place, d < D), _load(up_ptr, place, d < D)
    dh = _load(dh_ptr, place, d < D)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    _store(dup_ptr, place, d < D, dh * silu)
    _store(dgate_ptr, place, d < D, dh * up * (sigmoid + silu * (1.0 - sigmoid)))


@cache
def norm_options(width: int, itemsize: int) -> dict[str, int]:
    """Return the options of the two kernels whose programs hold a whole row: with more values per
    thread, registers spill.
    """
    block = next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(min(block * itemsize // 1024, 16), 1)}


@cache
def head_options(width: int, rotated: int, heads: int) -> dict[str, int]:
    """Return the options of `rotate_heads`; `heads` is the number of query or key heads, whichever
    is larger.
    """
    sizes = {"K": width, "R": rotated, "HALF": next_power_of_2(rotated // 2)}
    sizes["REST"] = next_power_of_2(max(width - rotated, 1))
    at_once = HEAD_VALUES // next_power_of_2(width)  # with more, registers spill
    block = min(at_once // (1 if width == rotated else 2), next_power_of_2(heads))
    return sizes | {"BH": max(block, 1), "num_warps": 1}


def add_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float, offset: float):
    """Return x + update and its norm."""
    width = x.shape[-1]
    y = torch.empty_like(x)
    total = torch.empty_like(x)
    operands = (x, update, weight, total, y, width, eps, offset)
    options = norm_options(width, weight.itemsize)
    launch(add_norm_kernel, (x.numel() // width,), *operands, **options)
    return total, y


def add_norm_backward(
    dtotal: Tensor, dy: Tensor, total: Tensor, weight: Tensor, eps: float, offset: float
):
    """Return the gradients of both summands, which are equal, and of the weight."""
    width = dy.shape[-1]
    dx = torch.empty_like(dy)
    rows = dy.numel() // width
    parts = _make_parts(dy, min(PROGRAMS, rows), width)
    operands = (dtotal, dy, total, weight, dx, parts, rows, width, eps, offset)
    options = norm_options(width, weight.itemsize)
    launch(add_norm_backward_kernel, (len(parts),), *operands, **options)
    return dx, parts.sum(0).to(weight.dtype)


def _make_parts(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=like.device)


def _gate_sizes(z: Tensor) -> dict[str, Any]:
    heads, repeats, width = z.shape[2:]
    sizes = {"T": z.numel() // width, "G": heads * repeats, "R": repeats, "D": width}
    sizes |= {"stride_t": z.stride(1), "stride_h": z.stride(2)}
    return sizes | {"BLOCK": next_power_of_2(width), "BR": NORM_ROWS}


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of contiguous x, times silu(z)."""
    sizes = _gate_sizes(z)
    y = torch.empty_like(x)
    blocks = cdiv(sizes["T"], NORM_ROWS)
    launch(gated_norm_kernel, (blocks,), x, z, weight, y, eps=eps, **sizes)
    return y


def gated_norm_backward(dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float):
    """Return the gradients of x, z and the weight."""
    sizes = _gate_sizes(z)
    dx = torch.empty_like(x)
    dz = torch.empty_like(x)
    programs = min(PROGRAMS, cdiv(sizes["T"], NORM_ROWS))
    parts = _make_parts(x, programs, x.shape[-1])
    operands = (dy, x, z, weight, dx, dz, parts)
    launch(gated_norm_backward_kernel, (programs,), *operands, eps=eps, **sizes)
    return dx, dz, parts.sum(0).to(weight.dtype)


def _head_sizes(q: Tensor, k: Tensor, cos: Tensor) -> tuple[dict[str, Any], int]:
    """Return the sizes that both kernels take, and the number of blocks of heads."""
    heads, kv_heads = q.shape[2], k.shape[2]
    sizes = {"H": heads, "G": kv_heads, "stride_t": q.stride(1), "stride_h": q.stride(2)}
    sizes |= head_options(q.shape[3], cos.shape[-1], max(heads, kv_heads))
    return sizes, cdiv(heads, sizes["BH"]) + cdiv(kv_heads, sizes["BH"])


def rotate_heads(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Return the rotated heads; k is contiguous, and q has a single stride over all tokens."""
    sizes, blocks = _head_sizes(q, k, cos)
    results = q.new_empty(q.shape), torch.empty_like(k)
    operands = (q, k, q_weight, k_weight, cos, sin, *results)
    grid = (q.shape[0] * q.shape[1], blocks)
    launch(rotate_heads_kernel, grid, *operands, eps=eps, offset=offset, **sizes)
    return results


def rotate_heads_backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and the weights."""
    (sizes, blocks) = _head_sizes(q, k, cos)
    tokens = q.shape[0] * q.shape[1]
    programs = min(tokens, max(8 * PROGRAMS // blocks, 1))
    parts = _make_parts(q, programs, blocks, q.shape[3])
    results = torch.empty_like(dq), torch.empty_like(dk)
    operands = (dq, dk, q, k, q_weight, k_weight, cos, sin, *results, parts)
    sizes |= {"T": tokens, "eps": eps, "offset": offset}
    launch(rotate_heads_backward_kernel, (programs, blocks), *operands, **sizes)
    sums = parts.sum(0)
    queries = cdiv(sizes["H"], sizes["BH"])
    dweights = (part.sum(0).to(q_weight.dtype) for part in (sums[:queries], sums[queries:]))
    return *results, *dweights


def _launch_columns(kernel: Any, *tensors: Tensor) -> None:
    width = tensors[0].shape[-1]
    grid = (tensors[0].numel() // width, cdiv(width, SWIGLU_BLOCK))
    launch(kernel, grid, *tensors, width, BLOCK=SWIGLU_BLOCK)


def swiglu_apart(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of contiguous tensors."""
    out = torch.empty_like(gate)
    _launch_columns(swiglu_apart_kernel, gate, up, out)
    return out


def swiglu_apart_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both."""
    results = (torch.empty_like(gate), torch.empty_like(up))
    _launch_columns(swiglu_apart_backward_kernel, dh, gate, up, *results)
    return results
