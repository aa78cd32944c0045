"""Matrix multiplications: single ones, and one per expert over consecutive groups of rows (grouped
GEMM).

A grouped GEMM is `y[m] = x[m] @ weight[e]` for the rows m of group e, where group e owns rows
offsets[e - 1] to offsets[e], differentiable once. It and its gradient of weights are operators with
fake kernels, so that meta tensors, torch.compile and selective activation checkpointing support
them. Backends:

- `triton`: titanlite's own kernels (`kernels_triton.py`), two-byte floats and float32, no
  synchronization.
- `torch`: `F.grouped_mm` on CUDA for the tensors that it supports; else a loop of matmuls that
  write into the output. `F.grouped_mm` on CPU leaves rows beyond offsets[-1] uninitialized,
  requires 16-byte strides, has no float64, and rejects float32 under compile; on Blackwell experts
  without rows get gradients (pytorch #172439, open with torch 2.13).
- `auto`: `triton` on CUDA, unless there is a `triton_problem` or `use_triton(False)`; `torch` on
  other devices.

Shapes: M rows (tokens), E experts, K reduction, N columns. Weights of experts are usually stored as
(E, N, K) and passed as `weight.mT`.
"""

import re
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from titanlite.base.log import warn_once
from titanlite.base.process import read_variable, remove_variable
from titanlite.ops.kernels import (
    define_operator,
    differentiate,
    has_triton,
    kernel_device,
    operator,
)

# torch takes its initial setting from the first variable; cuBLAS reads the second one when it
# starts, and then ignores all other settings.
_TF32_VARIABLES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")


def keep_float32() -> None:
    """Compute float32 matmuls and convolutions in this process in float32, not in TF32.

    TF32 has 11 significant bits: a transformers class that multiplies rotary positions by
    frequencies would confuse positions beyond 2,048. cuDNN uses TF32 by default; cuBLAS uses it if
    a container image sets one of `_TF32_VARIABLES`. Call this before CUDA starts: afterwards, the
    second variable decides.
    """
    torch.set_float32_matmul_precision("highest")
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = False  # first: it resets the two below to the common setting
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    for name in _TF32_VARIABLES:
        if (value := read_variable(name)) in (None, "", "0"):
            continue
        remove_variable(name)
        effect = "is ignored: float32 is not made TF32"
        if name == "NVIDIA_TF32_OVERRIDE" and torch.cuda.is_initialized():
            effect = "may make float32 TF32, because CUDA has started. Unset it"
        warn_once(f"float32: {name}={value}, which some images set, {effect}.")


def sum_over_rows(
    dy_MN: torch.Tensor, x_MK: torch.Tensor, out_NK: torch.Tensor, *, accumulate: bool = False
) -> torch.Tensor:
    """Write or add `dy.T @ x`, the gradient of a weight, to `out`, which may have a wider dtype;
    not differentiable.
    """
    if out_NK.dtype == x_MK.dtype:
        return out_NK.addmm_(dy_MN.T, x_MK) if accumulate else torch.mm(dy_MN.T, x_MK, out=out_NK)
    if kernel_device(x_MK.device) == "cuda" and accumulate:  # never rounded to two bytes
        return torch.addmm(out_NK, dy_MN.T, x_MK, out_dtype=out_NK.dtype, out=out_NK)
    product_NK = dy_MN.T @ x_MK
    return out_NK.add_(product_NK) if accumulate else out_NK.copy_(product_NK)


def wide_linear(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Return `x.float() @ weight.float().T`, (..., N) float32, of x (..., K).

    On CUDA two-byte operands are multiplied without a cast, which is exact, and saved uncast for
    backward.
    """
    if kernel_device(x.device) == "cuda" and x.dtype == weight_NK.dtype and x.dtype.itemsize == 2:
        return _wide_linear(x, weight_NK)
    return F.linear(x.float(), weight_NK.float())


def _apply_wide_linear(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    return _multiply_wide(x.flatten(0, -2), weight_NK.T).unflatten(0, x.shape[:-1])


def _wide_linear_backward(
    dy: torch.Tensor, x: torch.Tensor, weight_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split dy into two parts of two bytes, 16 bits of bfloat16 together, and multiply both in one
    matmul.
    """
    dy_MN, x_MK = dy.flatten(0, -2), x.flatten(0, -2)
    parts_M2N = x.new_empty(dy_MN.shape[0], 2 * dy_MN.shape[1])
    high_MN, low_MN = parts_M2N.chunk(2, dim=1)
    low_MN.copy_(dy_MN - high_MN.copy_(dy_MN))
    dx_MK = parts_M2N @ torch.cat([weight_NK, weight_NK])
    dweights = _multiply_wide(parts_M2N.T, x_MK).chunk(2)
    return dx_MK.view_as(x), torch.add(*dweights, out=torch.empty_like(weight_NK))


_wide_linear = differentiate(_apply_wide_linear, _wide_linear_backward)


def linear_each(x: torch.Tensor, *weights_NK: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return `x @ weight.T` for each weight; the gradients of x (..., K) are summed inside of the
    matmuls.
    """
    return _LinearEach.apply(x, *weights_NK)


class _LinearEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights_NK: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights_NK)
        x_MK = x.flatten(0, -2)
        return tuple((x_MK @ weight.T).view(*x.shape[:-1], -1) for weight in weights_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights_NK = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad
        x_MK = x.flatten(0, -2)
        flat = [dy.flatten(0, -2) for dy in dys]
        dx = None
        if needs_x:
            dx_MK = flat[0] @ weights_NK[0]
            for dy_MN, weight in zip(flat[1:], weights_NK[1:], strict=True):
                torch.addmm(dx_MK, dy_MN, weight, out=dx_MK)
            dx = dx_MK.view_as(x)
        pairs = zip(flat, needed, strict=True)
        return dx, *(dy_MN.T @ x_MK if need else None for dy_MN, need in pairs)


def _multiply_wide(a: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Return `a.float() @ b.float()`; only on CUDA, torch multiplies narrow operands into a wide
    result.
    """
    if kernel_device(a.device) == "cuda":
        return torch.mm(a, b_KN, out_dtype=torch.float32)
    return a.float() @ b_KN.float()


GroupedGemmBackend = Literal["auto", "triton", "torch"]

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLACKWELL = (10, 11)  # major compute capabilities
_TRITON_WITH_FENCES = (3, 7, 1)


def grouped_gemm(
    x_MK: torch.Tensor,
    weight_EKN: torch.Tensor,
    offsets_E: torch.Tensor,
    backend: GroupedGemmBackend = "auto",
) -> torch.Tensor:
    """Multiply each group of rows by its own matrix; return (M, N) in the dtype of x.

    Rows from offsets[-1] on are zero, whatever x holds there, and get zero gradient.

    Args:
        x_MK: (M, K) rows, grouped by expert.
        weight_EKN: (E, K, N), same dtype; K or N has stride 1. Its gradient has the same memory
            layout.
        offsets_E: (E,) int32 end of each group, non-decreasing, on the device of x; offsets[-1] <=
            M.
        backend: see the module's docstring.

    Raises ValueError: shapes, dtypes or layout do not fit, or the backend does not run here.
    """
    rows_fit = x_MK.dim() == 2 and (x_MK.shape[1] <= 1 or x_MK.stride(1) == 1)
    weight_fits = (
        weight_EKN.dim() == 3
        and weight_EKN.shape[1] == x_MK.shape[-1]
        and 1 in weight_EKN.stride()[1:]
    )
    offsets_fit = offsets_E.shape == weight_EKN.shape[:1] and offsets_E.dtype == torch.int32
    if not (rows_fit and weight_fits and offsets_fit and x_MK.dtype == weight_EKN.dtype):
        found = [(tuple(t.shape), t.stride(), t.dtype) for t in (x_MK, weight_EKN, offsets_E)]
        raise ValueError(f"grouped_gemm: shapes, strides and dtypes do not fit: {found}.")
    return _GroupedProduct.apply(
        x_MK, weight_EKN, offsets_E, resolve_backend(backend, x_MK.device, x_MK.dtype)
    )


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, offsets: Any, backend: str) -> torch.Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None, offsets)
        ctx.k_major = weight.stride(1) == 1
        ctx.backend = backend
        return grouped_mm(x, weight, offsets, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, offsets = ctx.saved_tensors
        dy = dy.contiguous()  # a sum's gradient is expanded, with strides of 0
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grouped_mm(dy, weight.mT, offsets, ctx.backend)
        if ctx.needs_input_grad[1]:
            dw = grouped_mm_wgrad(x, dy, offsets, ctx.k_major, ctx.backend)
        return dx, dw, None, None


def resolve_backend(
    backend: GroupedGemmBackend, device: torch.device, dtype: torch.dtype
) -> GroupedGemmBackend:
    """Return the backend that supports tensors of `dtype` on `device`.

    Raises ValueError: `triton` was requested and cannot run there.
    """
    where = kernel_device(device)
    if backend == "auto":
        return (
            "triton"
            if has_triton(device) and dtype in _TRITON_DTYPES and triton_problem() is None
            else "torch"
        )
    if backend == "triton":
        interpreted = read_variable("TRITON_INTERPRET") == "1"
        if where not in ("cuda", "meta") and not interpreted:
            raise ValueError(
                f"grouped_gemm: backend 'triton' needs a CUDA device, the tensors are on {where}. "
                "Use 'auto' or, to test the kernels slowly on the CPU, set TRITON_INTERPRET=1 "
                "before the program starts."
            )
        if dtype not in _TRITON_DTYPES:
            raise ValueError(f"grouped_gemm: backend 'triton' has no {dtype}. Use 'auto'.")
        if where == "cuda" and (problem := triton_problem()) is not None:
            raise ValueError(
                f"grouped_gemm: backend 'triton': {problem} Install a newer torch, or use 'torch'."
            )
    return backend


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if titanlite's Triton kernels serve tensors of `dtype` on `device` by default."""
    return resolve_backend("auto", device, dtype) == "triton"


@torch.compiler.assume_constant_result  # it would break a compiled graph
def triton_problem() -> str | None:
    """Return the reason, a sentence, why Triton's code for this machine's GPU cannot be trusted;
    None if it can be trusted, or if there is no GPU.
    """
    if not is_blackwell():
        return None
    import triton

    if has_fences(version := triton.__version__):
        return None
    wanted = ".".join(map(str, _TRITON_WITH_FENCES))
    return (
        f"Triton {version} leaves out fences between memory accesses on this GPU, {wanted} does "
        "not (triton #9610)."
    )


def has_fences(version: str) -> bool:
    """Return True if that Triton makes the tensor cores wait for writes of `cp.async`
    (scripts/compile_kernels.py).
    """
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3])) >= _TRITON_WITH_FENCES


@cache
def is_blackwell() -> bool:
    """Return True if there is a data-centre Blackwell GPU: its tensor cores read memory
    asynchronously.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in _BLACKWELL


@operator(fake=lambda x, weight, *rest: x.new_empty(x.shape[0], weight.shape[2]))
def grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, backend: str
) -> torch.Tensor:
    """Compute `grouped_gemm` without argument checks and gradients."""
    if backend == "triton":
        return get_launchers().row_grouped_gemm(x, weight, offsets)
    if _use_torch_kernel(x, weight):
        is_tail_M = torch.arange(x.shape[0], device=x.device) >= offsets[-1]
        return F.grouped_mm(x, weight, offs=offsets).masked_fill_(is_tail_M.unsqueeze(-1), 0.0)
    y = x.new_empty(x.shape[0], weight.shape[2])
    groups = _get_groups(offsets)
    y[groups[-1][1] if groups else 0 :] = 0
    for expert, (start, end) in enumerate(groups):
        _multiply_into(x[start:end], weight[expert], y[start:end])
    return y


grouped_mm_wgrad_into = define_operator(
    "grouped_mm_wgrad_into(Tensor x, Tensor dy, Tensor offsets, Tensor(a!) total, bool adds,"
    " Tensor? x_rows, Tensor? dy_rows) -> ()",
    "titanlite.ops.launchers",
    lambda *operands: None,
)


def _empty_gradient(x: Any, dy: Any, offsets: Any, k_major: bool, backend: str) -> Any:
    num_experts, k, n = offsets.shape[0], x.shape[1], dy.shape[1]
    return x.new_empty(num_experts, n, k).mT if k_major else x.new_empty(num_experts, k, n)


@operator(fake=_empty_gradient)
def grouped_mm_wgrad(
    x: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor, k_major: bool, backend: str
) -> torch.Tensor:
    """Return dweight[e] = x_e^T @ dy_e, (E, K, N); stored as (E, N, K) with `k_major`, as the
    weight is.
    """
    if backend == "triton":
        dw = _empty_gradient(x, dy, offsets, k_major, backend)
        get_launchers().grouped_mm_wgrad_into(x, dy, offsets, dw.mT, adds=False)
        return dw
    left, right = (dy, x) if k_major else (x, dy)
    if _use_torch_kernel(x, dy):
        dw = F.grouped_mm(left.mT, right, offs=offsets)
        return dw.mT if k_major else dw
    # a matmul over no rows gives zeros
    dw = x.new_empty(len(offsets), left.shape[1], right.shape[1])
    for expert, (start, end) in enumerate(_get_groups(offsets)):
        _multiply_into(left[start:end].T, right[start:end], dw[expert])
    return dw.mT if k_major else dw


def get_launchers() -> Any:
    """Import the Triton kernels on use: nothing else needs triton, and its import takes a while."""
    from titanlite.ops import launchers

    return launchers


def _use_torch_kernel(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if F.grouped_mm supports x: bfloat16 on CUDA with 16-byte rows and at least one
    row.
    """
    if not x.is_cuda or is_blackwell():
        return False
    return (
        x.dtype == torch.bfloat16
        and x.shape[1] % 8 == 0
        and other.shape[-1] % 8 == 0
        and x.shape[0] > 0
    )


def _multiply_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write `a @ b` to `out`. CPUs multiply two-byte floats 16 to 50 times slower than float32."""
    if a.is_cuda or a.dtype.itemsize != 2:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a.float() @ b.float())


def _get_groups(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Return (start, end) of each group. Copies the offsets to the host: a synchronization point on
    CUDA.
    """
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@register_flop_formula(torch.ops.titanlite.grouped_mm)
def _(x: Any, weight: Any, *rest: Any, **options: Any) -> int:
    return 2 * x[0] * x[1] * weight[2]


@register_flop_formula([torch.ops.titanlite.grouped_mm_wgrad, grouped_mm_wgrad_into])
def _(x: Any, dy: Any, *rest: Any, **options: Any) -> int:
    return 2 * max(x[0], dy[0]) * x[1] * dy[1]  # either operand may be the one with gathered rows
