"""Triton kernel of `adamw.py`, and its launcher: one pass over memory."""

import math
import sys

import triton
import triton.language as tl
from torch import Tensor

from titanlite.features.rounded_adamw.adamw import (
    FIRST_FACTOR,
    HIGH_FACTOR,
    SECOND_FACTOR,
    STEP_FACTOR,
)
from titanlite.ops.launchers import INTERPRETED, cdiv, launch

BLOCK = 64 if INTERPRETED else 1024
WARPS = 4
FACTORS = {"STEP": STEP_FACTOR, "HIGH": HIGH_FACTOR, "ONE": FIRST_FACTOR, "TWO": SECOND_FACTOR}


@triton.jit
def _mix(bits, ONE: tl.constexpr, TWO: tl.constexpr):
    bits = (bits ^ (bits >> 16)) * tl.full((), ONE, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full((), TWO, tl.uint32)
    return bits ^ (bits >> 16)


@triton.jit
def _write(pointer, place, mask, value, bits):
    if pointer.dtype.element_ty == tl.bfloat16:
        # the lower 16 bits are zero now, so the cast to bfloat16 is exact
        raw = (value.to(tl.uint32, bitcast=True) + bits) & tl.full((), 0xFFFF0000, tl.uint32)
        value = raw.to(tl.float32, bitcast=True)
    tl.store(pointer + place, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _one_minus_exp(x):
    """Return 1 - exp(x) for x < 0, without cancellation for small x."""
    small = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    return tl.where(x > -0.25, small, 1 - tl.exp(x))


# Specialized, it would be compiled again for some keys and positions.
@triton.jit(do_not_specialize=["N", "C", "first", "row", "key0", "key1"])
def adamw_kernel(
    param_ptr,
    grad_ptr,
    mean_ptr,
    square_ptr,
    step_ptr,
    found_inf_ptr,
    N,
    C,
    first,
    row,
    key0,
    key1,
    lr,
    decay,
    beta1,
    rest1,
    log1,
    beta2,
    rest2,
    log2,
    eps,
    STEP: tl.constexpr,
    HIGH: tl.constexpr,
    ONE: tl.constexpr,
    TWO: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step N elements in rows of C, which are `row` apart in the whole tensor, beginning at
    `first`.
    """
    if found_inf_ptr is not None:  # noqa: SIM102  constant: without a pointer nothing is loaded
        if tl.load(found_inf_ptr) != 0.0:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    inside = tl.arange(0, BLOCK)
    place = start + inside
    mask = place < N
    count = tl.load(step_ptr)
    grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + place, mask=mask, other=0.0).to(tl.float32)
    square = tl.load(square_ptr + place, mask=mask, other=0.0).to(tl.float32)
    param = tl.load(param_ptr + place, mask=mask, other=0.0).to(tl.float32)
    param *= decay
    mean = mean * beta1 + grad * rest1
    square = square * beta2 + grad * rest2 * grad
    size = tl.sqrt(square / _one_minus_exp(count * log2)) + eps
    param -= mean / size * (lr / _one_minus_exp(count * log1))
    if WHOLE_ROWS:
        whole = first + place
    else:
        # a 64-bit division of vectors would take as long as the memory access
        column = (start % C).to(tl.int32) + inside
        whole = first + (start // C + column // C) * row + column % C
    steps = count.to(tl.int64).to(tl.uint32) * tl.full((), STEP, tl.uint32)
    salt0 = _mix(key0.to(tl.uint32) + steps, ONE, TWO)
    salt1 = _mix(key1.to(tl.uint32), ONE, TWO)
    bits = _mix(whole.to(tl.uint32) ^ salt0, ONE, TWO)
    high = (whole >> 32).to(tl.uint32) * tl.full((), HIGH, tl.uint32)
    bits = _mix(bits + (high ^ salt1), ONE, TWO)
    _write(mean_ptr, place, mask, mean, bits & 0xFFFF)
    _write(square_ptr, place, mask, square, bits >> 16)
    _write(param_ptr, place, mask, param, _mix(bits, ONE, TWO) & 0xFFFF)


def adamw_rounded(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    found_inf: Tensor | None,
    rates: list[float],
    key: list[int],
    first: int,
    row: int,
) -> None:
    """Launch the kernel with the operator's arguments."""
    lr, beta1, beta2, eps, weight_decay = rates
    numbers = [lr, 1 - lr * weight_decay]
    for beta in (beta1, beta2):
        numbers += [beta, 1 - beta, math.log(max(beta, sys.float_info.min))]
    tensors = (param, grad, exp_avg, exp_avg_sq, step, found_inf)
    columns = param.shape[1]
    count = param.numel()
    options = {**FACTORS, "WHOLE_ROWS": columns == row, "BLOCK": BLOCK, "num_warps": WARPS}
    operands = (*tensors, count, columns, first, row, *key, *numbers, eps)
    launch(adamw_kernel, (cdiv(count, BLOCK),), *operands, **options)
