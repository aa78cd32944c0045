"""`grouped_gemm` against a float64 loop: values, gradients, layouts, rows beyond the groups,
compile, error texts.
"""

import itertools

import pytest
import torch
from expert_layer import grouped_products
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.ops import cross_entropy, grouped_gemm
from titanlite.ops.kernels import plan_for_device, use_triton
from titanlite.ops.matmul import (
    grouped_mm,
    grouped_mm_wgrad,
    is_blackwell,
    resolve_backend,
    triton_problem,
)

# Relative Frobenius error against float64 of the same rounded inputs. float32: 1.8e-8 * sqrt(K) was
# measured for a sequential sum; bfloat16: rounding of the result alone gives 1.7e-3.
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is NaN, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)  # only then torch fills uninitialized memory
    yield
    torch.use_deterministic_algorithms(False)


def make_offsets(sizes):
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)


def make_inputs(sizes, tail, k, n, dtype, k_major, seed=0):
    """x with `tail` NaN rows beyond the groups, a weight (E, K, N) stored as (E, N, K) if
    `k_major`, and offsets.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    x = torch.randn(rows + tail, k, generator=generator, dtype=torch.float64).to(dtype)
    x[rows:] = float("nan")
    shape = (len(sizes), n, k) if k_major else (len(sizes), k, n)
    stored = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), stored.requires_grad_(), make_offsets(sizes)


def relative_error(actual, expected, scale):
    difference = (actual.double() - expected).norm().item()
    return difference / max(scale.norm().item(), 1e-30) if difference else 0.0


def check(sizes, tail, k, n, dtype, k_major, seed=0, *, may_cancel=False):
    """`may_cancel`: of results so few that all may be sums near 0, errors are relative to the sums
    of magnitudes.
    """
    x, stored, offsets = make_inputs(sizes, tail, k, n, dtype, k_major, seed)
    weight = stored.mT if k_major else stored
    y = grouped_gemm(x, weight, offsets)
    dy = torch.randn(
        y.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
    ).to(dtype)
    dy[sum(sizes) :] = float("nan")
    y.backward(dy)
    expected_y, expected_dx, expected_dw = expected = grouped_products(x, weight, dy, sizes)
    scale_y, scale_dx, scale_dw = (
        grouped_products(x.abs(), weight.abs(), dy.abs(), sizes) if may_cancel else expected
    )

    bound = BOUNDS[dtype]
    assert y.dtype == dtype
    assert y.shape == expected_y.shape
    assert relative_error(y, expected_y, scale_y) <= bound
    assert relative_error(x.grad, expected_dx, scale_dx) <= bound
    dw = stored.grad.mT if k_major else stored.grad
    for e in range(len(sizes)):  # one bad group must not drown in the others
        assert relative_error(dw[e], expected_dw[e], scale_dw[e]) <= 2 * bound
    rows = sum(sizes)
    assert torch.equal(y[rows:], torch.zeros_like(y[rows:]))
    assert torch.equal(x.grad[rows:], torch.zeros_like(x.grad[rows:]))
    assert x.grad.dtype == stored.grad.dtype == dtype
    if min(k, n) > 1:  # a dim of size 1 may have any stride
        assert stored.grad.stride() == stored.stride()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("sizes", [[0, 0, 0], [33, 0, 1, 64, 17]])
def test_equals_float64_loop(sizes, dtype):
    """Rows of 80 bytes and more; those of the next test are often no multiple of 16 bytes, which
    torch's own operator needs.
    """
    check(sizes, tail=3, k=40, n=56, dtype=dtype, k_major=True)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    tail=st.integers(0, 4),
    k=st.integers(1, 9),
    n=st.integers(1, 9),
    k_major=st.booleans(),
    dtype=st.sampled_from(list(BOUNDS)),
    seed=st.integers(0, 2**20),
)
def test_any_layout(sizes, tail, k, n, k_major, dtype, seed):
    check(sizes, tail, k, n, dtype, k_major, seed, may_cancel=True)


def test_opcheck_of_both_operators():
    for k_major in [True, False]:
        x, stored, offsets = make_inputs([2, 0, 3], 0, 4, 6, torch.float32, k_major)
        weight = stored.detach().mT if k_major else stored.detach()
        torch.library.opcheck(grouped_mm.default, (x.detach(), weight, offsets, "auto"))
        torch.library.opcheck(
            grouped_mm_wgrad.default, (x.detach(), torch.randn(5, 6), offsets, k_major, "auto")
        )


OFFSETS = torch.tensor([1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("x", "weight", "offsets"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 3, 4), OFFSETS),
        (torch.zeros(2, 3), torch.zeros(2, 3, 4), OFFSETS.long()),
        (torch.zeros(2, 3).bfloat16(), torch.zeros(2, 3, 4), OFFSETS),
    ],
)
def test_arguments_that_do_not_fit_are_refused(x, weight, offsets):
    with pytest.raises(ValueError, match=r"^grouped_gemm: shapes, strides and dtypes do not fit"):
        grouped_gemm(x, weight, offsets)


@pytest.mark.parametrize(
    ("capability", "triton", "sound"),
    [
        ((10, 0), "3.6.0", False),
        ((10, 3), "3.7.0+git1234", False),
        ((10, 0), "3.10.0", True),
        ((9, 0), "3.6.0", True),
    ],
)
def test_blackwell_gets_no_triton_that_leaves_out_fences(capability, triton, sound, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("triton.__version__", triton)
    is_blackwell.cache_clear()
    cuda = torch.device("cuda")
    try:
        assert (triton_problem() is None) == sound
        assert resolve_backend("auto", cuda, torch.bfloat16) == ("triton" if sound else "torch")
        if sound:
            assert resolve_backend("triton", cuda, torch.bfloat16) == "triton"
        else:
            with pytest.raises(
                ValueError,
                match=r"Triton 3\..* leaves out .* 3\.7\.1 .* newer torch",
            ):
                resolve_backend("triton", cuda, torch.bfloat16)
    finally:
        is_blackwell.cache_clear()


def test_triton_can_be_left_out():
    cuda = torch.device("cuda")
    try:
        use_triton(False)
        assert resolve_backend("auto", cuda, torch.bfloat16) == "torch"
        with plan_for_device("cuda"):
            assert not cross_entropy._use_kernels(torch.empty(1, dtype=torch.bfloat16))
            use_triton(True)
            assert cross_entropy._use_kernels(torch.empty(1, dtype=torch.bfloat16))
    finally:
        use_triton(True)
