"""Products with oneDNN, on any machine whose torch has it: values, gradients, and which products go there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expert_layer import NAMES, ExpertLayer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.schema import ActivationCheckpointSection
from titanlite.distributed.parallelize import checkpoint_operations
from titanlite.features.cpu import experts
from titanlite.features.cpu.experts import get_onednn_op, prefers_onednn
from titanlite.features.estimate.operators import count_flops
from titanlite.models.interface import Model
from titanlite.models.layers import FeedForward
from titanlite.ops import linear, linear_cross_entropy
from titanlite.ops.kernels import plan_for_device
from titanlite.ops.matmul import multiply, sum_over_rows

BOUND = 2e-6  # relative Frobenius error of float32
AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"

pytestmark = pytest.mark.skipif(get_onednn_op() is None, reason="this torch has no oneDNN")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Shapes (M, K, N) of the products with oneDNN, on a machine where that is faster and every product worth it."""
    shapes = []

    def multiply_and_note(a: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
        shapes.append((a.numel() // a.shape[-1], a.shape[-1], b_KN.shape[1]))
        return original(a, b_KN)

    original = experts._multiply_by_onednn
    monkeypatch.setattr(experts, "_multiply_by_onednn", multiply_and_note)
    monkeypatch.setattr(experts, "prefers_onednn", lambda: True)
    monkeypatch.setattr(experts, "_WORTHWHILE", 1)
    return shapes


class Executed(TorchDispatchMode):
    """Counts the products with oneDNN, but those inside of operators, and those that checkpointing has kept."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is get_onednn_op()
        return func(*args, **(kwargs or {}))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == torch.float32
    assert (got.double() - want).norm() <= BOUND * want.norm()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 32), (2, 48, 96), (3, 1, 32, 64)], ids=str)
def test_linear_equals_float64(seen, shape, with_bias):
    width = 40
    inputs = [draw(*shape), draw(width, shape[-1]), draw(width) if with_bias else None]
    inputs = [None if tensor is None else tensor.requires_grad_() for tensor in inputs]
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    dy = draw(*shape[:-1], width)
    y = linear(*inputs)
    y.backward(dy)
    expected = F.linear(*wide)
    expected.backward(dy.double())
    assert_close(y.detach(), expected.detach())
    for one, two in zip(inputs, wide, strict=True):
        if one is not None:
            assert_close(one.grad, two.grad)
    rows = y.numel() // width
    # The gradient of x sums over 40 columns, which the weight has and no batch changes.
    assert seen == [(rows, shape[-1], width), (rows, width, shape[-1]), (width, rows, shape[-1])]


def test_gradients_that_are_not_wanted_are_not_computed(seen):
    x, weight = draw(64, 32).requires_grad_(), draw(96, 32)
    linear(x, weight).sum().backward()
    assert len(seen) == 2
    seen.clear()
    with torch.no_grad():
        assert linear(x, weight.requires_grad_()).grad_fn is None
    assert len(seen) == 1


def test_gradients_of_gradients(seen):
    def second(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x, weight = draw(64, 32).requires_grad_(), draw(96, 32).requires_grad_()
        grads = torch.autograd.grad(function(x, weight).square().sum(), (x, weight), create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in grads), (x, weight)))

    for one, two in zip(second(linear), second(F.linear), strict=True):
        assert (one - two).norm() <= 1e-5 * two.norm()


def test_only_what_backward_needs_is_kept(seen):
    def count_kept(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Size]:
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            linear(x, weight)
        return kept

    x, weight = draw(64, 32), draw(96, 32)
    assert count_kept(x, weight) == []
    assert count_kept(x.requires_grad_(), weight) == [weight.shape]  # a frozen weight has no gradient
    assert count_kept(x.detach(), weight.requires_grad_()) == [x.shape]
    assert count_kept(x, weight) == [x.shape, weight.shape]
    assert len(seen) == 4


def test_views(seen):
    a, b = draw(96, 64), draw(96, 32)
    inner = draw(160, 70)[32:, 3:67]  # no dimension is dense
    assert_close(multiply(inner, a.T), inner.double() @ a.double().T)
    assert_close(multiply(a, inner.T), a.double() @ inner.double().T)
    out = torch.full((96, 96), torch.nan)
    assert multiply(a, a.T, out=out).data_ptr() == out.data_ptr()
    assert_close(out, a.double() @ a.double().T)
    assert_close(sum_over_rows(inner, draw(128, 32), torch.empty(64, 32)), inner.double().T @ draw(128, 32).double())
    assert_close(sum_over_rows(a, b, torch.full((64, 32), torch.nan)), a.double().T @ b.double())
    assert len(seen) == 5


@pytest.mark.parametrize("rows", [96, 97])
def test_sums_go_on(seen, rows):
    a, b = draw(rows, 64), draw(rows, 32)
    out = torch.ones(64, 32)
    assert sum_over_rows(a, b, out, accumulate=True).data_ptr() == out.data_ptr()
    assert_close(out, 1 + a.double().T @ b.double())
    assert len(seen) == (rows == 96)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sum_may_be_wider_than_its_products(accumulate):
    total, a, b = torch.ones(4, 5), draw(8, 4, dtype=torch.bfloat16), draw(8, 5, dtype=torch.bfloat16)
    sum_over_rows(a, b, total, accumulate=accumulate)
    assert torch.equal(total, accumulate + (a.T @ b).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_left_to_torch(seen, dtype):
    x, weight = draw(64, 32, dtype=dtype), draw(96, 32, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(multiply(x, weight.T), x @ weight.T)
    assert seen == []


@pytest.mark.parametrize(("rows", "taken"), [(1, 0), (31, 0), (33, 0), (480, 1), (512, 1), (544, 0), (1024, 1)])
def test_few_numbers_of_rows(seen, rows, taken):
    x, weight = draw(rows, 30), draw(50, 30)
    assert_close(linear(x, weight), x.double() @ weight.double().T)
    assert len(seen) == taken
    sum_over_rows(draw(rows, 50), x, torch.empty(50, 30))
    assert len(seen) == 2 * taken


def test_left_to_torch_where_it_is_not_worth_it_or_not_wanted(seen, monkeypatch):
    x, weight = draw(64, 32), draw(96, 32)
    with plan_for_device("cuda"):
        linear(x, weight)
    linear(x.to("meta"), weight.to("meta"))
    linear(x[:0], weight)
    linear(x[:, :0], weight[:, :0])
    monkeypatch.setattr(experts, "_WORTHWHILE", 64 * 32 * 96 + 1)
    linear(x, weight)
    monkeypatch.setattr(experts, "_WORTHWHILE", 1)
    monkeypatch.setattr(experts, "prefers_onednn", lambda: False)
    linear(x, weight)
    assert seen == []


@pytest.mark.usefixtures("seen")
def test_compiled_graphs_have_torchs_own_product(monkeypatch):
    x, weight = draw(64, 32).requires_grad_(), draw(96, 32).requires_grad_()
    # No dispatch mode may be active while something is compiled.
    monkeypatch.setattr(experts, "_multiply_by_onednn", None)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), F.linear(x, weight))


def test_flops_are_counted():
    x, weight = draw(2, 64, 32), draw(96, 32)
    flops = count_flops(get_onednn_op(), (x, weight, None, "none", [], ""), {}, None)
    assert flops == {"float32": 2 * 128 * 32 * 96}


@pytest.mark.parametrize(
    ("capability", "cpuinfo", "expected"),
    [("AVX512", AMD, True), ("AVX512", INTEL, False), ("AVX2", AMD, False), ("AVX512", None, False)],
)
def test_which_machines(monkeypatch, capability, cpuinfo, expected):
    def read(path: Path) -> str:
        assert path == Path("/proc/cpuinfo")
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(experts, "_is_onednn_faster", experts._is_onednn_faster.__wrapped__)
    assert prefers_onednn() is expected
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not prefers_onednn()


@pytest.mark.parametrize("slice_bytes", [20_000, 1 << 20], ids=["slices", "whole"])
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("sizes", [[5, 0, 117, 1, 64], [33, 200, 31, 32]], ids=str)
def test_experts_fill_slices_up_with_zeros(seen, monkeypatch, sizes, top_k, slice_bytes):
    monkeypatch.setattr(experts, "_SLICE_BYTES", slice_bytes)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN, so that what is not written shows
    try:
        layer = ExpertLayer(sizes, top_k, hidden=64, inner=32, spare_tokens=1)
        results = layer.results(layer.run("torch"))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, got, want in zip(NAMES, results, layer.expected(), strict=True):
        assert got.isfinite().all(), name
        assert (got.double() - want).norm() <= BOUND * want.norm(), name
    assert len(seen) >= 6 * sum(size >= 32 for size in sizes)
    assert all(rows % 32 == 0 and width % 32 == 0 for rows, width, _ in seen)


@pytest.mark.usefixtures("seen")
def test_another_experts_nan_stays_its_own():
    layer = ExpertLayer([40, 50], 1, hidden=64, inner=32, spare_tokens=1)
    with torch.no_grad():
        layer.inputs[0][(layer.ids == 1).any(dim=1)] = torch.nan
    out, _, dgate_up, ddown, _ = layer.results(layer.run("torch"))
    assert out[(layer.ids == 0).any(dim=1)].isfinite().all()
    assert dgate_up[0].isfinite().all() and ddown[0].isfinite().all() and dgate_up[1].isnan().any()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_cross_entropy(seen, reduction):
    hidden, weight = draw(128, 32).requires_grad_(), draw(96, 32, seed=1).requires_grad_()
    labels = torch.arange(128) % 96
    labels[::7] = -100
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    linear_cross_entropy(hidden, weight, labels, 64, reduction=reduction).sum().backward()
    F.cross_entropy(F.linear(*wide), labels, reduction="sum").backward()
    for one, two in zip((hidden, weight), wide, strict=True):
        assert_close(one.grad, two.grad)
    assert len(seen) == (6 if reduction == "sum" else 8)


@pytest.mark.usefixtures("seen")
def test_selective_checkpointing_keeps_the_products():
    class OneLayer(Model):
        def draws_random(self) -> bool:
            return False

    layer = FeedForward(64, 96, std=0.1)
    for param in layer.parameters():
        nn.init.normal_(param, std=0.1)
    model = OneLayer()
    model.layer = layer
    checkpoint_operations(model, ActivationCheckpointSection(mode="selective", selective_ac_option="op"))
    with Executed() as executed:
        layer(draw(64, 64).requires_grad_()).sum().backward()
    assert executed.products == 9  # three in forward, six in backward
