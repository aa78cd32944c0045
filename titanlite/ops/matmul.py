"""Products of matrices: torch's, or those of a kernel (`linear`, `product`) that is faster on the tensors' device.

Shapes: M rows (tokens), K reduction, N columns.
"""

import torch
import torch.nn.functional as F

from titanlite.ops.kernels import find_kernel


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, (..., N), of x (..., K); the kernel `linear` takes and returns the same."""
    kernel = find_kernel("linear", x.device)
    y = None if kernel is None else kernel(x, weight_NK, bias_N)
    return F.linear(x, weight_NK, bias_N) if y is None else y


def multiply(x_MK: torch.Tensor, weight_KN: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight`, (M, N), for use inside operators: not differentiable."""
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
    if product_NK is None:
        product_NK = dy_MN.T @ x_MK
    return out_NK.add_(product_NK) if accumulate else out_NK.copy_(product_NK)


def _multiply_by_kernel(a: torch.Tensor, b_KN: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Return `a @ b` by the kernel `product`, which is also told the number of tokens, `rows`: the size that varies."""
    kernel = find_kernel("product", a.device)
    return None if kernel is None else kernel(a, b_KN, rows)
