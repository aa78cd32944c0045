"""The gated delta rule in chunks against the recurrence that defines it, in float64; its Triton
kernels on a GPU as compiled, without one in Triton's interpreter.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from triton_interpreter import DEVICE, NEEDS_KERNELS, ON_GPU

from titanlite.ops import gated_delta, launchers
from titanlite.ops.delta_inputs import delta_inputs
from titanlite.ops.gated_delta import (
    find_triton_problem,
    gated_delta_rule,
    gated_delta_step,
    l2_norm,
    log_decay,
)
from titanlite.ops.kernels import plan_for_device

H, G, K, V = 2, 4, 16, 12
LENGTHS = {
    "one": [150],
    "odd": [5, 1, 70, 64, 9],
    "chunks": [64, 64],
    "edges": [63, 1, 64, 2],
    "tokens": [1] * 20,
}


def recurrence(q, k, v, g, beta, documents=None, state=None):
    """Token by token, as the paper has it."""
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    outs = []
    for t in range(v.shape[1]):
        if t and documents is not None:
            goes_on = documents[:, t] == documents[:, t - 1]
            state = torch.where(goes_on[:, None, None, None], state, 0.0)
        state = state * g[:, t].exp()[..., None, None]
        new = v[:, t] - torch.einsum("bgkv,bgk->bgv", state, k[:, t])
        state = state + torch.einsum("bgk,bgv,bg->bgkv", k[:, t], new, beta[:, t])
        outs.append(torch.einsum("bgkv,bgk->bgv", state, q[:, t]))
    return torch.stack(outs, 1), state


def documents_of(lengths):
    """Documents of two rows that hold them in another order."""
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.stack([row, row.flip(0)])


def draw(lengths, gate, dtype=torch.float64, batch=2, heads=H, value_heads=G, widths=(K, V)):
    """Inputs, and their documents."""
    width, value_width = widths
    rows = (batch, sum(lengths))
    q, k = (l2_norm(torch.randn(*rows, heads, width, dtype=torch.float64)) for _ in range(2))
    v = torch.randn(*rows, value_heads, value_width, dtype=torch.float64)
    g, beta = (torch.rand(*rows, value_heads, dtype=torch.float64) for _ in range(2))
    inputs = (q * width**-0.5, k, v, -gate * g, beta)
    return [x.to(dtype).requires_grad_() for x in inputs], documents_of(lengths)[:batch]


def run(function, inputs, documents=None, **options):
    """Outputs and every gradient, of a loss that weighs both outputs; a sixth input is the first
    state.
    """
    out, last = function(*inputs[:5], documents, *inputs[5:], **options)
    torch.manual_seed(1)
    douts = [torch.randn(x.shape).bfloat16().to(x) for x in (out, last)]
    return [out, last, *torch.autograd.grad((out, last), inputs, douts)]


def assert_equal(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("gate", [0.05, 25.0])  # with a fast decay, a leak hides in noise
def test_chunks_equal_the_recurrence(monkeypatch, lengths, chunk, gate):
    monkeypatch.setattr(gated_delta, "CHUNK", chunk)
    inputs, documents = draw(lengths, gate)
    assert_equal(*(run(rule, inputs, documents) for rule in (gated_delta_rule, recurrence)))


def test_a_row_goes_on_from_a_state():
    inputs, documents = draw([20, 70], 0.05)
    inputs.append(torch.randn(2, G, K, V, dtype=torch.float64, requires_grad=True))
    assert_equal(*(run(rule, inputs, documents) for rule in (gated_delta_rule, recurrence)))


def test_each_output_alone_has_gradients():
    inputs, _ = draw([70], 0.05)
    for which in (0, 1):
        ours, expected = (f(*inputs)[which].square().sum() for f in (gated_delta_rule, recurrence))
        assert_equal(*(torch.autograd.grad(x, inputs[1:]) for x in (ours, expected)))


def test_steps_go_on_from_a_padded_prompt():
    """Padding without gates and keys leaves the state as it is."""
    inputs, _ = draw([100], 0.05)
    q, k, v, g, beta = (x.detach() for x in inputs)
    expected, last = recurrence(q, k, v, g, beta)
    is_prompt = torch.arange(100) < torch.tensor([90, 70])[:, None]
    padded_g, padded_beta = (x * is_prompt[..., None] for x in (g, beta))
    out, state = gated_delta_rule(
        q[:, :90], k[:, :90], v[:, :90], padded_g[:, :90], padded_beta[:, :90]
    )
    for row, length in enumerate((90, 70)):
        assert_equal(out[row, :length], expected[row, :length])
        row_state = state[row : row + 1]
        for t in range(length, 100):
            token = (x[row : row + 1, t : t + 1] for x in (q, k, v, g, beta))
            step, row_state = gated_delta_step(*token, row_state)
            assert_equal(step[0, 0], expected[row, t])
        assert_equal(row_state[0], last[row])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_narrow_inputs_are_summed_in_float32(dtype, bound):
    inputs, documents = draw(LENGTHS["odd"], 0.05, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours, expected = run(gated_delta_rule, inputs, documents), run(recurrence, exact, documents)
    assert [x.dtype for x in ours] == [dtype, torch.float32, *[dtype] * 5]
    for actual, wanted in zip(ours, expected, strict=True):
        assert (actual.double() - wanted).norm() < bound * wanted.norm()


def test_operators_without_data_have_the_shapes_and_layouts_of_those_with():
    inputs, documents = draw([70], 0.05, torch.float32)
    state = torch.zeros(()).expand(2, G, K, V)
    given = [*(x.detach() for x in inputs), state, documents.int()]
    torch.library.opcheck(torch.ops.titanlite.gated_delta.default, (*given, "torch"))
    inverse = torch.ops.titanlite.gated_delta(*given, "torch")[2]
    dout, dlast = torch.randn(2, 70, G, V), torch.randn(2, G, K, V)
    backward = (dout, dlast, *given, inverse, "torch")
    torch.library.opcheck(torch.ops.titanlite.gated_delta_backward.default, backward)


def test_flops_are_those_of_the_recurrence():
    inputs, documents = draw([70], 0.05)
    with FlopCounterMode(display=False) as counter:
        gated_delta_rule(*inputs, documents)[0].sum().backward()
    assert counter.get_total_flops() == 3 * 6 * 2 * 70 * G * K * V


def test_backends_that_do_not_run_here_are_named(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    wide, narrow = draw_for_kernels([5], torch.bfloat16, 0.05)[0], draw([5], 0.05)[0]
    wide = [x.detach().cpu() for x in wide[:5]]
    with pytest.raises(ValueError, match=r"'triton': keys are 16 wide and values 12;"):
        gated_delta_rule(*narrow, backend="triton")
    with pytest.raises(ValueError, match=r"needs a CUDA device, and the tensors are on cpu\. Use"):
        gated_delta_rule(*wide, backend="triton")
    with (
        plan_for_device("cuda"),
        pytest.raises(ValueError, match=r"wants bfloat16 and not torch\.fl"),
    ):
        gated_delta_rule(*(x.float() for x in wide), backend="triton")
    monkeypatch.setattr("triton.__version__", "3.7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with plan_for_device("cuda"), pytest.raises(ValueError, match=r"Triton 3\.7\.0 gives wrong"):
        gated_delta_rule(*wide, backend="triton")
    with pytest.raises(ValueError, match="'fla' needs the package flash-linear-attention"):
        gated_delta_rule(*narrow, backend="fla")


def test_a_plan_for_cuda_takes_the_kernels():
    inputs = [x.detach() for x in draw_for_kernels([70], torch.bfloat16, 0.05)[0]]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, plan_for_device("cuda"):
        fakes = [mode.from_tensor(x).requires_grad_() for x in inputs]
        out, last = gated_delta_rule(*fakes[:5], None, fakes[5])
        kept = out.grad_fn.saved_tensors[-1]
        grads = torch.autograd.grad((out.float().sum() + last.sum()), fakes)
    expected = torch.bfloat16 if find_triton_problem() is None else torch.float32
    assert (kept.dtype, kept.shape) == (expected, (2, 2, 2, 2, 64, 64))
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in inputs]


def test_gates_and_norms_are_those_of_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

    x, A_log, dt_bias = torch.randn(2, 5, G), torch.rand(G).log(), torch.ones(G)
    expected = -A_log.exp() * torch.nn.functional.softplus(x + dt_bias)
    torch.testing.assert_close(log_decay(x, A_log, dt_bias), expected, rtol=0, atol=0)
    assert log_decay(x.bfloat16(), A_log, dt_bias).dtype == torch.float32
    torch.testing.assert_close(l2_norm(x), l2norm(x, dim=-1, eps=1e-6), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(l2_norm(x, 0.5), 0.5 * l2_norm(x))


# Relative Frobenius errors were 5e-7 in float32 (1e-5 for dg with a fast decay, whose sums reach
# -1600) and 3.6e-3 in bfloat16, which only the latter is compiled for.
CASES = [pytest.param(torch.bfloat16, 0.05, [5, 1, 70, 9], 6e-3, marks=ON_GPU)]
if launchers.INTERPRETED:
    CASES += [(torch.float32, 0.05, [64, 2, 9], 1e-6), (torch.float32, 25.0, [70], 3e-5)]


def draw_for_kernels(lengths, dtype, gate, **sizes):
    """Inputs of the kernels' width on their device, with a first state."""
    inputs, documents = draw(lengths, gate, torch.float32, widths=(128, 128), **sizes)
    q, k, v, g, beta = (x.detach() for x in inputs)
    state = torch.randn(v.shape[0], v.shape[2], 128, 128)
    inputs = [*(x.to(dtype) for x in (q, k, v)), g, beta, state]
    return [x.to(DEVICE).requires_grad_() for x in inputs], documents.to(DEVICE)


@NEEDS_KERNELS
@pytest.mark.parametrize(("dtype", "gate", "lengths", "bound"), CASES)
def test_kernels_equal_the_recurrence(dtype, gate, lengths, bound):
    heads = 2 if gate > 1 else 1  # of keys: which one a value head reads, and rows in their place
    options = {"batch": 3 - heads, "heads": heads, "value_heads": 2 * heads}
    inputs, documents = draw_for_kernels(lengths, dtype, gate, **options)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours = run(gated_delta_rule, inputs, documents, backend="triton")
    names = ("out", "last", "q", "k", "v", "g", "beta", "state")
    for name, actual, wanted in zip(names, ours, run(recurrence, exact, documents), strict=True):
        error = ((actual.double() - wanted).norm() / wanted.norm()).item()
        assert error < bound, (name, error)


# Relative Frobenius errors were 2e-7 in float32 and 1.7e-3 in bfloat16, that of rounding.
INPUT_CASES = [pytest.param(torch.bfloat16, [30, 1, 2, 9], 3e-3, marks=ON_GPU)]
if launchers.INTERPRETED:
    INPUT_CASES += [(torch.float32, None, 1e-6)]


@NEEDS_KERNELS
@pytest.mark.parametrize(("dtype", "lengths", "bound"), INPUT_CASES)
def test_kernels_of_the_inputs_equal_composed_operators(dtype, lengths, bound):
    heads, key_width, value_width, taps, beside = 2, 128, 64, 4, 24
    inputs = 2 * key_width + 3 * value_width  # the last block of columns is not whole
    documents = None if lengths is None else documents_of(lengths).to(DEVICE)
    size = sum(lengths or [1])
    bases = torch.randn(2, size, heads, inputs + beside), torch.randn(heads, inputs, taps)
    bases = [x.to(dtype).to(DEVICE).requires_grad_() for x in bases]
    found = []
    for backend in ("triton", "torch"):
        leaves = bases if backend == "triton" else [x.detach().double() for x in bases]
        projected, weight = (x.requires_grad_() for x in leaves)
        mixed = projected.split([inputs, beside], dim=3)[0]
        results = delta_inputs(mixed, weight, documents, key_width, value_width, backend)
        torch.manual_seed(1)
        douts = [torch.randn(x.shape).to(x) for x in results]
        found.append([*results, *torch.autograd.grad(results, leaves, douts)])
    for name, actual, wanted in zip(("q", "k", "v", "x", "taps"), *found, strict=True):
        assert (actual.shape, actual.dtype) == (wanted.shape, dtype)
        assert (actual.double() - wanted).norm() < bound * wanted.norm(), name


def run_as_fla(q, k, v, g, beta, *, scale, output_final_state, initial_state=None, cu_seqlens=None):
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule` of fla-core 0.6.0, as far as it is used:
    one row of sequences, each with a state of its own.
    """
    assert output_final_state
    q = q * scale
    if cu_seqlens is None:
        return recurrence(q, k, v, g, beta, None, initial_state)
    assert q.shape[0] == 1 and cu_seqlens.dtype == torch.int64 and initial_state is None
    sizes = cu_seqlens.diff().tolist()
    cut = (x.split(sizes, 1) for x in (q, k, v, g, beta))
    parts = [recurrence(*each) for each in zip(*cut, strict=True)]
    outs, states = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(states)


@pytest.fixture
def fla(monkeypatch):
    package = ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = run_as_fla
    monkeypatch.setitem(sys.modules, package.__name__, package)


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("lengths", [[9, 1, 20], [7, 7, 7]])
def test_fla_gets_packed_documents_one_by_one(lengths):
    inputs, documents = draw(lengths, 0.05)
    found = run(gated_delta_rule, inputs, documents, backend="fla")
    assert_equal(found, run(recurrence, inputs, documents))


@pytest.mark.usefixtures("fla")
def test_fla_goes_on_from_a_state_of_whole_rows():
    inputs, documents = draw([12], 0.05)
    state = torch.randn(2, G, K, V, dtype=torch.float64)
    found = gated_delta_rule(*inputs, None, state, backend="fla")
    assert_equal(found, recurrence(*inputs, None, state))
    with pytest.raises(ValueError, match="documents or a first state, and not both"):
        gated_delta_rule(*inputs, documents, state, backend="fla")
