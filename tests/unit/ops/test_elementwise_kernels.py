"""Fused kernels of norms, rotation and SwiGLU against the composed operators in float64: on a GPU
as compiled, without one in Triton's interpreter.
"""

import pytest
import torch
from triton_interpreter import DEVICE, NEEDS_KERNELS, ON_GPU

from titanlite.ops import elementwise

pytestmark = [NEEDS_KERNELS, *ON_GPU]
DTYPES = [torch.float32, torch.bfloat16]
# Relative Frobenius errors; rounding of a result alone gives 1.7e-3 in bfloat16.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
EPS = 1e-5


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Take the kernels on the CPU, too, but for float64."""
    choose = lambda x, *others: x.dtype != torch.float64  # noqa: E731
    monkeypatch.setattr(elementwise, "takes_kernels", choose)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE)


def check(function, inputs, dtype, *, ends=None):
    """Compare results and all gradients of `function` with those in float64 of the same values;
    `ends` names the results that a loss reads.
    """
    bases = [x.detach().to(dtype).requires_grad_() for x in inputs]
    found = []
    for leaves in (bases, [x.detach().double().requires_grad_() for x in bases]):
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        torch.manual_seed(1)
        douts = [torch.randn(x.shape).to(x) for x in results]
        read = range(len(results)) if ends is None else ends
        grads = torch.autograd.grad([results[i] for i in read], leaves, [douts[i] for i in read])
        found.append((*results, *grads))
    for place, (actual, expected) in enumerate(zip(*found, strict=True)):
        assert actual.dtype == dtype
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < BOUNDS[dtype], (place, error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ends", "rows", "offset"), [((0, 1), (2, 7), 0.0), ((1,), (1, 3), 1.0)])
def test_residual_and_norm(dtype, ends, rows, offset):
    x, update, weight = draw(*rows, 100), draw(*rows, 100), draw(100)

    def add(x, update, weight):
        return elementwise.add_rms_norm(x, update, weight, EPS, offset)

    check(add, (x, update, weight), dtype, ends=ends)
    check(lambda x, weight: add(x, None, weight), (x, weight), dtype, ends=ends)


def test_a_sum_alone_has_gradients():
    x, update, weight = (draw(3, 8).float().requires_grad_() for _ in range(3))
    total, _ = elementwise.add_rms_norm(x, update, weight[0], EPS)
    grads = torch.autograd.grad(total.sum(), (x, update))
    assert all(grad.eq(1).all() for grad in grads)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (2, 9, 2, 3, 12)), (torch.bfloat16, (1, 1, 1, 1, 64))],
)
def test_norm_and_gate(dtype, shape):
    *outer, repeats, width = shape
    x, projected, weight = draw(*shape), draw(*outer, 5 + repeats * width), draw(width)

    def norm(x, projected, weight):
        z = projected[..., 5:].unflatten(-1, (repeats, width))  # as the projection stores it
        return elementwise.gated_rms_norm(x, z, weight, EPS)

    check(norm, (x, projected, weight), dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rotated", "offset", "dtype"),
    [
        (20, 3, 16, 16, None, torch.float32),
        (5, 1, 24, 8, 1.0, torch.float32),
        (5, 1, 24, 8, None, torch.bfloat16),
        (3, 3, 12, 12, 1.0, torch.bfloat16),
    ],
)
def test_norm_and_rotation(heads, kv_heads, width, rotated, offset, dtype):
    batch, size = 2, 5
    q, k = draw(batch, size, heads, 2 * width), draw(batch, size, kv_heads, width)
    positions = torch.randint(1000, (batch, size), device=DEVICE)
    frequencies = elementwise.inverse_frequencies(rotated, 10000.0).to(DEVICE)
    angles = elementwise.rope_cos_sin(frequencies, positions, dtype)
    weights = () if offset is None else (draw(width), draw(width))

    def rotate(q, k, *weights):
        cos_sin = tuple(x.to(q.dtype) for x in angles)
        q = q[..., :width]  # a gate follows each query
        return elementwise.rotate_heads(q, k, cos_sin, weights or None, EPS, offset or 0.0)

    check(rotate, (q, k, *weights), dtype)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (2, 3, 150)), (torch.bfloat16, (1, 64))]
)
def test_gate_and_up_apart(dtype, shape):
    check(elementwise.swiglu_apart, (draw(*shape), draw(*shape)), dtype)


def test_operators_without_data_have_the_shapes_of_those_with():
    x, y, weight = draw(2, 3, 2, 8).float(), draw(2, 3, 2, 8).float(), draw(8).float()
    angles, z = draw(2, 3, 1, 8).float(), draw(2, 3, 2, 2, 8).float()
    ops, tests = torch.ops.titanlite, ("test_schema", "test_faketensor")
    for op, operands in {
        ops.add_norm: (x, y, weight, EPS, 0.0),
        ops.add_norm_backward: (x, y, x, weight, EPS, 0.0),
        ops.gated_norm: (z, z.clone(), weight, EPS),
        ops.gated_norm_backward: (z, z.clone(), z.clone(), weight, EPS),
        ops.rotate_heads: (x, y, None, None, angles, angles, EPS, 0.0),
        ops.rotate_heads_backward: (x, y, x, y, weight, weight, angles, angles, EPS, 0.0),
        ops.swiglu_apart: (x, y),
        ops.swiglu_apart_backward: (x, y, x),
    }.items():
        torch.library.opcheck(op.default, operands, test_utils=tests)
