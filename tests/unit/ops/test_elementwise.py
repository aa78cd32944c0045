"""RMS norm against a float64 formula."""

import pytest
import torch

from titanlite.ops import rms_norm

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32,), (3, 32), (2, 5, 4, 32)])
def test_value_and_gradients(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = (
        (torch.randn(shape, generator=generator, dtype=torch.float64) * 3)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    dout = torch.randn(shape, generator=generator, dtype=torch.float64)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = exact[0] * (exact[0].square().mean(-1, keepdim=True) + EPS).rsqrt() * exact[1]
    out = rms_norm(x, weight, EPS)
    bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    mine = [out, *torch.autograd.grad(out, (x, weight), dout.to(dtype))]
    reference = [expected, *torch.autograd.grad(expected, exact, dout)]
    for got, want in zip(mine, reference, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got.double() - want).norm() <= bound * want.norm()
