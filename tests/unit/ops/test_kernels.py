"""The Triton kernels against float64: on a GPU as compiled, without one in Triton's interpreter."""

import gc
import itertools
import weakref
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from expert_layer import NAMES, ExpertLayer, grouped_products
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensors import Watch
from torch.utils._pytree import tree_leaves
from triton_interpreter import DEVICE, NEEDS_KERNELS, ON_GPU

from titanlite.config.schema import ActivationCheckpointSection
from titanlite.distributed.fsdp import WeightCopies
from titanlite.distributed.parallelize import checkpoint_operations
from titanlite.models.moe import Experts
from titanlite.ops import grouped_gemm
from titanlite.ops import launchers as kernels
from titanlite.ops.matmul import grouped_mm_wgrad
from titanlite.ops.moe_experts import moe_experts

pytestmark = [NEEDS_KERNELS, *ON_GPU]
UNEVEN = [33, 0, 1, 64, 17]
ONE_ROW = [0, 0, 1, 0, 0]
TILES = [32, 64, 32, 0, 32]
TILES_AND_ONE = [31, 33, 63, 65, 1]
SMALL = [1, 2, 0, 0, 5, 1, 0, 7]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative Frobenius error against float64 of the same inputs. float32: 1.8e-8 * sqrt(K) was
# measured for a sum in sequence; two-byte floats: rounding of the result alone gives 1.7e-3 and
# 2.1e-4.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh memory is NaN, so that an element that a kernel does not write is found."""
    new_empty, empty = torch.Tensor.new_empty, torch.empty

    @torch.no_grad()  # torch 2.11 makes leaves with it, for checkpoints
    def poison(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *args, **kw: poison(new_empty(self, *args, **kw))
    )
    monkeypatch.setattr(torch, "empty", lambda *args, **kw: poison(empty(*args, **kw)))


def error(actual, expected):
    difference = (actual.double() - expected).norm().item()
    return difference / max(expected.norm().item(), 1e-30) if difference else 0.0  # NaN is not 0


def slices(sizes):
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def check(
    sizes,
    tail,
    k,
    n,
    dtype,
    k_major,
    tma,
    seed=0,
):
    """Forward, input gradient and weight gradient, as a whole and expert by expert; `tail` rows of
    NaN behind them.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    rows, num_experts = sum(sizes), len(sizes)
    x, dy = draw(rows + tail, k), draw(rows + tail, n)
    x[rows:] = dy[rows:] = float("nan")
    stored = draw(num_experts, n, k) if k_major else draw(num_experts, k, n)
    weight = stored.mT if k_major else stored
    offsets = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=DEVICE)

    with patch.object(kernels, "_tma_fits", lambda *tensors: tma):
        y = kernels.row_grouped_gemm(x, weight, offsets)
        dx = kernels.row_grouped_gemm(dy, weight.mT, offsets)
        dw = grouped_mm_wgrad(x, dy, offsets, k_major, "triton")
    bound = max(BOUNDS[dtype], 2.5e-8 * max(k, n, *sizes) ** 0.5)
    expected_y, expected_dx, expected_dw = grouped_products(x, weight, dy, sizes)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, weight.shape)
    assert (dw.mT if k_major else dw).is_contiguous()
    assert not y[rows:].any() and not dx[rows:].any()
    for e, where in enumerate(slices(sizes)):
        assert error(y[where], expected_y[where]) <= 2 * bound, f"y of expert {e}"
        assert error(dx[where], expected_dx[where]) <= 2 * bound, f"dx of expert {e}"
        assert error(dw[e], expected_dw[e]) <= 2 * bound, f"dw of expert {e}"
    assert error(y[:rows], expected_y[:rows]) <= bound


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize(
    ("sizes", "tail", "k", "n", "dtype", "k_major"),
    [
        ([0, 0, 0], 0, 32, 64, torch.float32, True),
        (ONE_ROW, 0, 32, 64, torch.float32, True),
        ([0, 0, 97], 0, 32, 64, torch.bfloat16, True),
        (TILES, 0, 32, 64, torch.bfloat16, False),
        (SMALL, 0, 32, 64, torch.float32, True),
        (TILES_AND_ONE, 5, 40, 24, torch.float32, False),
        (TILES_AND_ONE, 5, 40, 24, torch.float16, True),
        (UNEVEN, 40, 24, 72, torch.bfloat16, True),
        (UNEVEN, 40, 24, 72, torch.float16, False),
    ],
)
def test_forward_and_gradients(sizes, tail, k, n, dtype, k_major, tma):
    """Whole tiles of columns, and sizes that are no multiple of a tile, with NaN behind the last
    group.
    """
    check(sizes, tail, k, n, dtype, k_major, tma)


@settings(max_examples=6 if kernels.INTERPRETED else 100, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    tail=st.integers(0, 40),
    k=st.integers(1, 3),
    n=st.integers(1, 3),
    odd=st.integers(0, 7),
    dtype=st.sampled_from(DTYPES),
    k_major=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_sizes(sizes, tail, k, n, odd, dtype, k_major, seed):
    check(sizes, tail, 16 * k + odd, 16 * n + odd, dtype, k_major, tma=False, seed=seed)


def test_strided_input_and_weight():
    x = torch.randn(40, 64, device=DEVICE)[:, :32]
    weight = torch.randn(3, 48, 64, device=DEVICE)[:, :, 16:48]
    offsets = torch.tensor([10, 10, 40], dtype=torch.int32, device=DEVICE)
    y = kernels.row_grouped_gemm(x, weight.mT, offsets)
    expected = torch.cat(
        [x[:10].double() @ weight[0].double().T, x[10:].double() @ weight[2].double().T]
    )
    assert error(y, expected) <= BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("top_k", "index", "dtype"),
    [
        (1, torch.int32, torch.float16),
        (4, torch.int64, torch.float32),
        (8, torch.int32, torch.bfloat16),
    ],
)
def test_gather_sum(top_k, index, dtype):
    y = torch.randn(24 * top_k, 72, device=DEVICE).to(dtype)
    rows = torch.randperm(24 * top_k, device=DEVICE).view(24, top_k).to(index)
    assert error(kernels.gather_sum(y, rows), y.double()[rows.long()].sum(1)) <= BOUNDS[dtype]
    fewer = torch.cat(
        [y[:30].double(), torch.zeros(24 * top_k, 72, device=DEVICE, dtype=torch.float64)]
    )
    assert error(kernels.gather_sum(y[:30], rows), fewer[rows.long()].sum(1)) <= BOUNDS[dtype], (
        "rows from M on"
    )


def layer_of(sizes, top_k, dtype=torch.float32, **widths):
    """Two tiles of rows for some experts; by default, one tile of columns."""
    return ExpertLayer(sizes, top_k, dtype, **widths, device=DEVICE)


@pytest.mark.parametrize(
    ("sizes", "top_k", "dtype"),
    [
        (UNEVEN, 4, torch.float32),
        (ONE_ROW, 1, torch.bfloat16),
        (TILES, 8, torch.bfloat16),
        (SMALL, 2, torch.float32),
        ([0, 0], 1, torch.float32),
    ],
)
def test_the_fused_experts_equal_a_float64_loop(sizes, top_k, dtype):
    """With several tiles of columns and of the reduction where there are few of rows."""
    wide = {"hidden": 48, "inner": 40} if sizes in (UNEVEN, ONE_ROW) else {}
    layer = layer_of(sizes, top_k, dtype, **wide)
    # three roundings to bfloat16 in a row
    bound = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2}[dtype]
    if sizes == ONE_ROW:
        bound *= 2  # one number, a sum in which products cancel: nothing averages out
    for name, mine, reference in zip(
        NAMES, layer.results(layer.run("triton")), layer.expected(), strict=True
    ):
        assert error(mine, reference) <= bound, name


def test_frozen_weights_get_no_gradient_and_inference_keeps_nothing():
    layer = layer_of([5, 0, 9], 2)
    with torch.no_grad():
        assert torch.equal(layer.run("triton"), layer.run("triton"))
    expected = layer.expected()[1]
    x, gate_up, down = layer.inputs
    gate_up.requires_grad_(False)
    down.requires_grad_(False)
    out = layer.run("triton")
    (dx,) = torch.autograd.grad(out, [x], layer.dout)
    assert error(dx, expected) <= 5e-6


class Alive(Watch):
    """Storages that operators make, with whose they are."""

    def __init__(self):
        super().__init__()
        self._made = []

    def look(self, func, args, out):
        tensors = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        self._made += [
            (func.__name__, tensor.shape, weakref.ref(tensor.untyped_storage()))
            for tensor in tensors
        ]

    def of(self, name):
        """Shapes of what is left of the results of an operator; the interpreter leaves cycles."""
        gc.collect()
        return [
            shape for func, shape, storage in self._made if func == name and storage() is not None
        ]


def test_selective_checkpointing_keeps_nothing_of_the_second_product():
    layer = layer_of(UNEVEN, 4)
    x, gate_up, down, *routed = layer.arguments()
    config = SimpleNamespace(
        num_experts=5,
        hidden_size=24,
        moe_intermediate_size=20,
        initializer_range=0.02,
        biased_experts=False,
    )
    experts = Experts(config)
    experts.grouped_gemm_backend = "triton"
    for parameter, value in ((experts.gate_up_proj, gate_up), (experts.down_proj, down)):
        vars(parameter)["copies"] = SimpleNamespace(read=lambda _, value=value: value)
    model = SimpleNamespace(modules=lambda: [experts], draws_random=lambda: False)
    checkpoint_operations(
        model, ActivationCheckpointSection(mode="selective", selective_ac_option="op")
    )
    with Alive() as alive:
        out = experts(x, *routed)
    assert alive.of("gather_swiglu.default") == [(116, 40)] and not alive.of("grouped_mm.default")
    for mine, reference in zip(layer.results(out), layer.results(layer.run("triton")), strict=True):
        assert torch.equal(mine, reference)


def test_rows_that_are_copied_before_give_the_same(monkeypatch):
    """As with a Triton that leaves out fences on Hopper."""
    layer = layer_of([33, 0, 17], 4, torch.bfloat16)
    copied = []
    gathered = layer.results(layer.run("triton"))
    index_select = torch.Tensor.index_select
    monkeypatch.setattr(
        torch.Tensor, "index_select", lambda *a: (copied.append(a[0].dim()), index_select(*a))[1]
    )
    monkeypatch.setattr(kernels, "_is_unfenced", lambda x: True)
    for one, other in zip(layer.results(layer.run("triton")), gathered, strict=True):
        assert torch.equal(one, other)
    assert copied.count(2) == 4, (
        "tokens, gradients of the results, and both for the gradients of the weights"
    )


def test_opcheck():
    layer = ExpertLayer([5, 0, 9], 2, hidden=16, inner=16, device=DEVICE)
    x, gate_up, down, weight, token, rows, offsets = layer.arguments()
    x, gate_up, down, weight, token, rows = (
        t.detach() for t in (x, gate_up, down, weight, token.int(), rows.int())
    )
    torch.library.opcheck(
        torch.ops.titanlite.gather_swiglu.default, (x, gate_up, weight, token, offsets, True)
    )
    _, z = torch.ops.titanlite.gather_swiglu(x, gate_up, weight, token, offsets, True)
    args = (torch.randn_like(x), down, weight, token, offsets, z)
    torch.library.opcheck(torch.ops.titanlite.gather_swiglu_backward.default, args)
    args = (torch.randn(14, 16, device=DEVICE), gate_up.mT, offsets, "triton")
    torch.library.opcheck(torch.ops.titanlite.grouped_mm.default, args)


def test_grouped_gemm_takes_the_backend():
    x, weight = torch.randn(6, 16, device=DEVICE), torch.randn(2, 16, 32, device=DEVICE)
    offsets = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)
    y = grouped_gemm(x, weight, offsets, "triton")
    assert error(y, grouped_gemm(x, weight, offsets, "torch").double()) <= 1e-6
    with pytest.raises(
        ValueError, match=r"grouped_gemm: backend 'triton' has no torch\.float64\. Use 'auto'"
    ):
        grouped_gemm(x.double(), weight.double(), offsets, "triton")


@pytest.mark.parametrize("tma", [False, True])
def test_experts_add_gradients_to_those_of_their_parameters(monkeypatch, tma):
    """As three micro-batches do, against sums of what each gives alone."""
    monkeypatch.setattr(kernels, "_tma_fits", lambda *tensors: tma)
    dtype = torch.bfloat16
    layer = layer_of([33, 0, 17], 2, dtype, inner=24)  # TMA wants 16 bytes
    x, *stored = (tensor.detach() for tensor in layer.inputs)
    params = [torch.nn.Parameter(weight.float()) for weight in stored]
    read, found = WeightCopies(dtype).read, []
    for _ in range(3):
        weights = [read(param) for param in params]
        out = moe_experts(x, *weights, *layer.arguments()[3:], "triton")
        out.backward(layer.dout)
        found.append([param.grad.clone() for param in params])
    alone = [weight.clone().requires_grad_() for weight in stored]
    out = moe_experts(x, *alone, *layer.arguments()[3:], "triton")
    grads = torch.autograd.grad(out, alone, layer.dout)
    for count, sums in enumerate(found, 1):
        for actual, grad in zip(sums, grads, strict=True):
            assert actual.dtype == torch.float32
            assert error(actual, count * grad.double()) <= BOUNDS[dtype]
    for first, last in zip(found[0], found[2], strict=True):
        assert error(last, 3 * first.double()) <= 1e-6, "bfloat16 sums would be rounded"
