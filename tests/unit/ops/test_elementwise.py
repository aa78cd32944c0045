"""RMS norm: a float64 formula, torch's own in every dtype, and what is kept for backward."""

import pytest
import torch
import torch.nn.functional as F

from titanlite.ops import rms_norm

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32,), (3, 32), (2, 5, 4, 32)])
def test_value_and_gradients(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
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


def test_gradcheck():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, EPS), (x, weight))


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e18])
def test_extremes(value):
    x = torch.full((2, 8), value, requires_grad=True)
    out = rms_norm(x, torch.ones(8), EPS)
    assert torch.equal(out, F.rms_norm(x, (8,), torch.ones(8), EPS))
    out.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_only_the_wanted_gradient():
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    assert torch.autograd.grad(rms_norm(x, weight, EPS).sum(), weight)[0].shape == (8,)
    x.requires_grad_()
    assert torch.autograd.grad(rms_norm(x, weight.detach(), EPS).sum(), x)[0].shape == (3, 8)


def test_little_is_kept_for_backward():
    kept = []
    x, weight = torch.randn(64, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        rms_norm(x, weight, EPS)
    assert sorted(kept) == [32, 64, 64 * 32]  # weight, statistics, x itself
