"""The fused experts on the host against a float64 loop, in slices of any size, and against the composed operators."""

import pytest
import torch
from expert_layer import NAMES, ExpertLayer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from titanlite.features.cpu import experts as moe_experts_cpu
from titanlite.ops.moe_experts import moe_experts

BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}  # relative, of the norm


def layer_of(sizes: list[int], top_k: int, dtype: torch.dtype = torch.float32) -> ExpertLayer:
    return ExpertLayer(sizes, top_k, dtype, spare_tokens=1)  # at least top_k rows belong to no expert


def assert_right(layer: ExpertLayer, results: list[torch.Tensor]) -> None:
    for name, got, want in zip(NAMES, results, layer.expected(), strict=True):
        assert got.isfinite().all(), name
        assert (got.double() - want).norm() <= BOUNDS[layer.dout.dtype] * want.norm(), name


@pytest.mark.parametrize("slice_bytes", [1, 700, 1 << 20], ids=["rows", "few_rows", "whole"])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("sizes", [[5, 0, 17, 1], [0, 0, 40], [1, 0], [64, 64]], ids=str)
def test_equals_a_float64_loop(monkeypatch, sizes, top_k, dtype, slice_bytes):
    monkeypatch.setattr(moe_experts_cpu, "_SLICE_BYTES", slice_bytes)
    layer = layer_of(sizes, top_k, dtype)
    assert_right(layer, layer.results(layer.run("torch")))


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6), top_k=st.integers(1, 5))
def test_any_sizes(sizes, top_k):
    layer = layer_of(sizes, top_k, torch.float64)
    assert_right(layer, layer.results(layer.run("torch")))


@pytest.mark.parametrize("top_k", [1, 2])
def test_rows_of_no_expert_reach_nothing(top_k):
    layer = layer_of([6, 3], top_k)
    layer.ids[-2:] = 2
    alone = (layer.ids == 2).all(dim=1)
    with torch.no_grad():
        layer.inputs[0][alone] = torch.nan
        layer.dout[alone] = torch.nan
    out, dx, *weights = layer.results(layer.run("torch"))
    assert out.isfinite().all() and not out[alone].any() and not dx[alone].any()
    assert all(grad.isfinite().all() for grad in weights)


def test_equals_the_composed_operators():
    layer = layer_of([30, 0, 50, 9], 4)
    for name, fused, composed in zip(
        NAMES, layer.results(layer.run("torch")), layer.results(layer.run("reference")), strict=True
    ):
        assert (fused - composed).norm() <= 1e-6 * composed.norm(), name


def test_only_wanted_gradients_and_nothing_kept_without():
    layer = layer_of([9, 4], 2)
    kept: list[int] = []
    with torch.no_grad():
        plain = layer.run("torch")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = layer.run("torch")
    assert torch.equal(out, plain)
    rows, hidden, inner = layer.ids.numel(), 24, 20
    # z alone has a number per row and column; neither the permuted tokens (rows, hidden) nor h (rows, inner).
    assert kept.count(rows * 2 * inner) == 1 and rows * hidden not in kept and rows * inner not in kept
    expected = layer.expected()
    for tensor in layer.inputs[1:]:
        tensor.requires_grad_(False)
    (dx,) = torch.autograd.grad(layer.run("torch"), layer.inputs[:1], layer.dout)
    assert (dx.double() - expected[1]).norm() <= 2e-6 * expected[1].norm()


def test_recomputed_under_activation_checkpointing():
    layer = layer_of([9, 4], 2)
    again = checkpoint(layer.run, "torch", use_reentrant=False)
    for one, two in zip(layer.results(layer.run("torch")), layer.results(again), strict=True):
        assert torch.equal(one, two)


def test_opcheck_and_one_graph():
    layer = layer_of([5, 0, 9], 2)
    x, gate_up, down, weight, token, rows, offsets = (t.detach() for t in layer.arguments())
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weight)]
    torch.library.opcheck(moe_experts_cpu.moe_experts_forward, (*leaves, token, rows, offsets, True))
    compiled = torch.compile(layer.run, fullgraph=True, backend="aot_eager")("torch")
    for one, two in zip(layer.results(layer.run("torch")), layer.results(compiled), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("top_k", [1, 3])
def test_tokens_with_fewer_rows_than_others(top_k):
    """As those that came from other ranks have: rows from R on are none."""
    layer, torch_R = ExpertLayer([4, 0, 3], top_k, torch.float64, hidden=3, inner=2), torch.arange(7)
    x, gate_up, down, weight, *_ = layer.arguments()
    token, rows = torch.tensor([0, 1, 3, 4, 0, 2, 4]), torch.full((5, 3), 9)
    rows[0, :2], rows[1, 0], rows[2, 1], rows[3, 2], rows[4, 1:] = torch.tensor([0, 4]), 1, 5, 2, torch.tensor([3, 6])
    if top_k == 1:
        token, rows = torch.tensor([0, 1, 3, 4, 6, 2, 5]), torch.tensor([[0], [1], [5], [2], [3], [6], [4]])
    x, weight = torch.randn(rows.shape[0], x.shape[1]).double().requires_grad_(), weight[:7].detach().requires_grad_()
    offsets = torch.tensor([4, 4, 7], dtype=torch.int32)
    leaves, dout = (x, gate_up, down, weight), torch.randn_like(x)
    found = []
    for backend in ("torch", "reference"):
        out = moe_experts(*leaves, token.int(), rows.int(), offsets, backend)
        found.append([out, *torch.autograd.grad(out, leaves, dout)])
    expert_R = (torch_R >= 4) * 2
    z = torch.einsum("rd,rnd->rn", x[token], gate_up[expert_R])
    h = torch.nn.functional.silu(z[:, :2]) * z[:, 2:] * weight.unsqueeze(1)
    out = torch.zeros_like(x).index_add(0, token, torch.einsum("ri,rdi->rd", h, down[expert_R]))
    for results in found:
        for one, two in zip(results, [out, *torch.autograd.grad(out, leaves, dout, retain_graph=True)], strict=True):
            assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    layer = ExpertLayer([4, 0, 3], 2, torch.float64, hidden=3, inner=2, spare_tokens=1)
    _, _, _, weight, token, rows, offsets = layer.arguments()
    inputs = [*layer.inputs, weight.detach().requires_grad_()]
    assert torch.autograd.gradcheck(lambda *args: moe_experts(*args, token, rows, offsets, "torch"), inputs)
