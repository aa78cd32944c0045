"""A step of AdamW (arXiv:1711.05101) whose results in bfloat16 are rounded stochastically: up or
down with the probabilities that make the mean exact (arXiv:2010.06192).

The random bits are a hash of a key, the parameter's step and the element's position in the whole
tensor. So a shard is rounded as in the whole tensor, on any mesh and after a resume.

Shapes: R rows, C columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from titanlite.ops.kernels import define_operator, has_triton

_AT_ONCE = 1 << 18  # elements; more do not fit the caches of a CPU core
_LOW = 0xFFFF
# odd, with irregular bits
STEP_FACTOR = 0x9E3779B1
HIGH_FACTOR = 0x85EBCA6B
# of `lowbias32` (Wellons, 2018)
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B


class Rates(NamedTuple):
    """Numbers of an AdamW step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


_kernel = define_operator(
    "adamw_rounded(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq,"
    " Tensor step, Tensor? found_inf, float[] rates, int[] key, int first, int row) -> ()",
    "titanlite.features.rounded_adamw.adamw_triton",
    lambda *_: None,
)


def adamw_rounded(
    param_RC: torch.Tensor,
    grad_RC: torch.Tensor,
    exp_avg_RC: torch.Tensor,
    exp_avg_sq_RC: torch.Tensor,
    step: torch.Tensor,
    found_inf: torch.Tensor | None,
    rates: Rates,
    key: tuple[int, int],
    first: int,
    row: int,
) -> None:
    """Make a step of contiguous tensors in place; those in bfloat16 are rounded stochastically.

    Args:
        step: number of this step, counted from 1, a scalar.
        found_inf: 1.0 means that nothing changes.
        key: the parameter's key, int32.
        first: position of the first element in the whole tensor; `row`: distance from one row to
            the next.
    """
    tensors = (param_RC, grad_RC, exp_avg_RC, exp_avg_sq_RC)
    if has_triton(param_RC.device):
        _kernel(*tensors, step, found_inf, list(rates), list(key), first, row)
        return
    if found_inf is not None and bool(found_inf):
        return
    count = int(step)
    rows = max(_AT_ONCE // param_RC.shape[1], 1)
    for top in range(0, len(param_RC), rows):
        chunk = [tensor[top : top + rows] for tensor in tensors]
        place = first + top * row
        _step_chunk(*chunk, count=count, rates=rates, key=key, first=place, row=row)


def _step_chunk(
    param_RC: torch.Tensor,
    grad_RC: torch.Tensor,
    exp_avg_RC: torch.Tensor,
    exp_avg_sq_RC: torch.Tensor,
    count: int,
    rates: Rates,
    key: tuple[int, int],
    first: int,
    row: int,
) -> None:
    # One rounded operation at a time: fused operations would round vectors and their last elements
    # differently, and so also a shard and the whole tensor.
    param, grad, mean, square = (
        tensor.float() for tensor in (param_RC, grad_RC, exp_avg_RC, exp_avg_sq_RC)
    )
    param = param * (1 - rates.lr * rates.weight_decay)
    mean = mean * rates.beta1 + grad * (1 - rates.beta1)
    square = square * rates.beta2 + grad * (1 - rates.beta2) * grad
    size = (square / (1 - rates.beta2**count)).sqrt_().add_(rates.eps)
    param -= mean / size * (rates.lr / (1 - rates.beta1**count))
    places = first + torch.arange(len(param), device=param.device).unsqueeze(1) * row
    bits = random_bits(places + torch.arange(param.shape[1], device=param.device), key, count)
    _write(exp_avg_RC, mean, bits & _LOW)
    _write(exp_avg_sq_RC, square, _shift(bits, 16))
    more = _mix(bits) & _LOW if param_RC.dtype == torch.bfloat16 else bits
    _write(param_RC, param, more)


def random_bits(places: torch.Tensor, key: Sequence[int], count: int) -> torch.Tensor:
    """Return 32 bits, int32, for each position (int64) in the tensor that `key` identifies."""
    scalars = torch.tensor([_signed(key[0] + count * STEP_FACTOR), _signed(key[1])])
    salt = _mix(scalars.to(places.device, torch.int32))
    mixed = _mix(places.to(torch.int32) ^ salt[0])
    high = (places >> 32).to(torch.int32) * _signed(HIGH_FACTOR)
    return _mix(mixed + (high ^ salt[1]))


def _signed(bits: int) -> int:
    return (bits + 2**31) % 2**32 - 2**31


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift int32 to the right; the bits on the left become 0."""
    return (bits >> by) & ((1 << (32 - by)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift(bits, 16)) * FIRST_FACTOR
    bits = (bits ^ _shift(bits, 15)) * _signed(SECOND_FACTOR)
    return bits ^ _shift(bits, 16)


def _write(out: torch.Tensor, values: torch.Tensor, bits: torch.Tensor) -> None:
    """Write float32 `values` to `out`; bfloat16 is rounded with 16 random bits."""
    if out.dtype == torch.bfloat16:
        values = ((values.view(torch.int32) + bits) & ~_LOW).view(torch.float32)
    out.copy_(values)
