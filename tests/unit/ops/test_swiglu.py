"""`swiglu` with and without a weight per row against autograd's own gradient."""

import pytest
import torch

from titanlite.ops import clamped_swiglu, swiglu

# float32: a handful of roundings of 6e-8 each. bfloat16: results are rounded to 8 bits a few times
# (3.9e-3 each).
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1.5e-2}


def assert_close(actual, expected, bound):
    assert (actual.double() - expected.double()).norm() <= bound * expected.double().norm()


@pytest.mark.parametrize(("dtype", "weighted"), [(torch.float32, False), (torch.bfloat16, True)])
def test_compiled_it_is_one_graph_and_keeps_its_input_alone(dtype, weighted):
    """Partitioned as the inductor does it, and run operation by operation."""
    gate_up = torch.randn(40, 64, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.rand(40, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    inputs = (gate_up, weight) if weighted else (gate_up,)
    kept = []
    compiled = torch.compile(swiglu, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
    ):
        out = compiled(*inputs)
    assert out.dtype == dtype and sorted(shape for shape in kept if len(shape) == 2) == [(40, 64)]
    dout, expected = torch.randn_like(out), swiglu(*inputs)
    assert_close(out, expected, BOUNDS[dtype])
    pairs = zip(
        *(torch.autograd.grad(result, inputs, dout) for result in (out, expected)), strict=True
    )
    for actual, eager in pairs:
        assert_close(actual, eager, BOUNDS[dtype])


def test_clamped_swiglu_is_its_definition():
    """Values inside of both limits, at them, and beyond."""
    z = torch.randn(9, 12, dtype=torch.float64) * 6
    z[0, :4] = torch.tensor([7.0, 7.0, 9.0, -7.0])
    weight = torch.rand(9, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (z, weight)]
    gate, up = z.unflatten(-1, (-1, 2)).unbind(-1)
    # At a limit the gradient passes; `clamp` stops it there since torch 2.15.
    gate = torch.where(gate > 7, 7.0, gate)
    up = torch.where(up.abs() > 7, up.sign() * 7, up)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1) * weight[:, None]
    actual = clamped_swiglu(z, weight)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    upstream = torch.randn(9, 6, dtype=torch.float64)
    found, wanted = (torch.autograd.grad(x, leaves, upstream) for x in (actual, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    assert (z[:, 1::2].detach().abs() > 7).any() and (z[:, ::2].detach() > 7).any()
