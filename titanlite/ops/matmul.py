"""Products of matrices: torch's, or those of a kernel (`linear`, `product`) that is faster on the tensors' device.

Shapes: M rows (tokens), K reduction, N columns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from titanlite.ops.kernels import find_kernel, kernel_device


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, (..., N), of x (..., K); the kernel `linear` takes and returns the same."""
    kernel = find_kernel("linear", x.device)
    y = None if kernel is None else kernel(x, weight_NK, bias_N)
    return F.linear(x, weight_NK, bias_N) if y is None else y


def multiply(x_MK: torch.Tensor, weight_KN: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight`, (M, N), for use inside operators: not differentiable."""
    y_MN = _multiply_by_kernel(x_MK, weight_KN, x_MK.shape[0])
    if y_MN is None:
        return torch.mm(x_MK, weight_KN, out=out)
    return y_MN if out is None else out.copy_(y_MN)


def sum_over_rows(
    dy_MN: torch.Tensor, x_MK: torch.Tensor, out_NK: torch.Tensor, *, accumulate: bool = False
) -> torch.Tensor:
    """Write or add `dy.T @ x`, the gradient of a weight, to `out`, which may have a wider dtype; not differentiable."""
    product_NK = _multiply_by_kernel(dy_MN.T, x_MK, x_MK.shape[0])
    if product_NK is None and out_NK.dtype == x_MK.dtype:
        return out_NK.addmm_(dy_MN.T, x_MK) if accumulate else torch.mm(dy_MN.T, x_MK, out=out_NK)
    if product_NK is None and kernel_device(x_MK.device) == "cuda" and accumulate:  # never rounded to two bytes
        return torch.addmm(out_NK, dy_MN.T, x_MK, out_dtype=out_NK.dtype, out=out_NK)
    if product_NK is None:
        product_NK = dy_MN.T @ x_MK
    return out_NK.add_(product_NK) if accumulate else out_NK.copy_(product_NK)


def wide_linear(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Return `x.float() @ weight.float().T`, (..., N) float32, of x (..., K).

    On CUDA two-byte operands are multiplied as they are, which is exact, and kept as they are for backward.
    """
    if kernel_device(x.device) == "cuda" and x.dtype == weight_NK.dtype and x.dtype.itemsize == 2:
        return _WideLinear.apply(x, weight_NK)
    return linear(x.float(), weight_NK.float())


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight_NK)
        return _multiply_wide(x.flatten(0, -2), weight_NK.T).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split dy into two parts of two bytes, 16 bits of bfloat16 together, and multiply both in one product."""
        x, weight_NK = ctx.saved_tensors
        dy_MN, x_MK = dy.flatten(0, -2), x.flatten(0, -2)
        parts_M2N = x.new_empty(dy_MN.shape[0], 2 * dy_MN.shape[1])
        high_MN, low_MN = parts_M2N.chunk(2, dim=1)
        low_MN.copy_(dy_MN - high_MN.copy_(dy_MN))
        dx_MK = parts_M2N @ torch.cat([weight_NK, weight_NK])
        dweights = _multiply_wide(parts_M2N.T, x_MK).chunk(2)
        return dx_MK.view_as(x), torch.add(*dweights, out=torch.empty_like(weight_NK))


def _multiply_wide(a: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Return `a.float() @ b.float()`; torch multiplies narrow operands into a wide result on CUDA alone."""
    if kernel_device(a.device) == "cuda":
        return torch.mm(a, b_KN, out_dtype=torch.float32)
    return a.float() @ b_KN.float()


def _multiply_by_kernel(a: torch.Tensor, b_KN: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Return `a @ b` by the kernel `product`, which is also told the number of tokens, `rows`: the size that varies."""
    kernel = find_kernel("product", a.device)
    return None if kernel is None else kernel(a, b_KN, rows)
