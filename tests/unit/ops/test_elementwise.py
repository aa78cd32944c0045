"""RMS norm against a float64 formula."""

import pytest
import torch

from titanlite.ops import rms_norm

EPS = 1e-6


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_value_and_gradients(dtype, bound):
    x, weight, dout = (
        torch.randn(shape, dtype=torch.float64) for shape in [(2, 5, 32), (32,), (2, 5, 32)]
    )
    x, weight = ((3 * x).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_())
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = exact[0] * (exact[0].square().mean(-1, keepdim=True) + EPS).rsqrt() * exact[1]
    out = rms_norm(x, weight, EPS)
    mine = [out, *torch.autograd.grad(out, (x, weight), dout.to(dtype))]
    reference = [expected, *torch.autograd.grad(expected, exact, dout)]
    for got, want in zip(mine, reference, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got.double() - want).norm() <= bound * want.norm()
