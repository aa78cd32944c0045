"""Tests that need a CUDA device; they are skipped without one."""

import math
import os
import threading

import pytest
import torch
import torch.distributed as dist

from titanlite.assemble import assemble
from titanlite.base.errors import ConfigError
from titanlite.config.model import ModelConfig
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import Batch
from titanlite.distributed.fsdp import WeightCopies
from titanlite.features.generate.generate import choose_tokens
from titanlite.ops import (
    elementwise,
    group_by_expert,
    linear_cross_entropy,
    permute_tokens,
    routing,
)
from titanlite.ops import launchers as kernels
from titanlite.ops.attention import attention, build_attention_mask
from titanlite.ops.delta_inputs import delta_inputs
from titanlite.ops.gated_delta import find_triton_problem, gated_delta_rule, l2_norm
from titanlite.ops.matmul import (
    grouped_mm_wgrad,
    keep_float32,
    linear_each,
    sum_over_rows,
    wide_linear,
)
from titanlite.ops.moe_experts import gather_sum

# torch reads this variable once in a process, at the first matmul, which may be in a test without
# determinism.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Warnings of compilers and drivers must not fail a test.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def _flags():
    """Restore the flags that `training.deterministic` switches for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)


def randn(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def results_of(function, inputs):
    """Return the results of `function`, and the gradients of `inputs` for random ones of the
    results.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(1)
    douts = [torch.randn(x.shape, device="cuda").bfloat16().to(x) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, douts)]


def assert_exact(function, inputs, bound, exact=None):
    """Compare `results_of(function, inputs)` with float64: of `exact`, or of the function itself.
    Return the results.
    """
    found = results_of(function, inputs)
    expected = results_of(exact or function, [x.double() for x in inputs])
    for place, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(actual, wanted) < bound, place
    return found


def assert_same_bits(run, expected, runs=20):
    for number in range(runs):
        pairs = zip(run(), expected, strict=True)
        different = [place for place, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        assert different == [], f"run {number}"


@pytest.fixture
def losses_of(checked):
    """`losses_of(*overrides)`: the losses of 5 steps on one GPU, in this process (forked ranks
    cannot use CUDA).
    """

    def run(*overrides):
        configuration = checked(Degrees(), *overrides)
        trainer = assemble(configuration)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        losses = []
        for step in range(5):
            batches = [
                batch.to(trainer.parts.run.device)
                for batch in trainer.parts.loader.micro_batches(step)
            ]
            losses.append(trainer.parts.stepper.train_step(batches).loss.item())
        trainer.metrics.close()
        dist.destroy_process_group()
        return losses

    return run


def test_precision_attention_and_offload_train_alike(losses_of):
    float32 = "--training.mixed_precision_param=float32"
    exact = losses_of(float32)
    # AdamW on the CPU rounds in another order.
    assert losses_of(float32, "--training.enable_cpu_offload=true") == pytest.approx(
        exact, rel=1e-5
    )
    bfloat16 = "--training.mixed_precision_param=bfloat16"
    varlen = losses_of(bfloat16)  # "auto"
    # bfloat16 rounds activations and weights to 8 bits: 0.4 % each, averaged over thousands of
    # tokens.
    assert varlen == pytest.approx(exact, rel=1e-2)
    sdpa = losses_of(bfloat16, "--model.attention_backend=sdpa")
    assert varlen == pytest.approx(sdpa, rel=5e-3)  # both round to bfloat16, at other places
    assert varlen != sdpa


def test_varlen_attention_takes_no_float32(checked):
    configuration = checked(
        Degrees(), "--training.mixed_precision_param=float32", "--model.attention_backend=varlen"
    )
    with pytest.raises(
        ConfigError, match=r"activations are float32 on cuda\. Set it to 'sdpa', or training\.mixed"
    ):
        assemble(configuration)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_deterministic_runs_have_the_same_bits(losses_of, attention):
    """In bfloat16, with titanlite's kernels."""
    settings = "--training.deterministic=true", f"--model.attention_backend={attention}"
    first = losses_of(*settings)
    assert all(math.isfinite(loss) for loss in first)
    assert losses_of(*settings) == first
    assert (
        torch.are_deterministic_algorithms_enabled()
        and not torch.backends.cuda.mem_efficient_sdp_enabled()
    )


def test_sums_of_two_byte_products_are_float32():
    """The head's weight gradient and the router's logits are accumulated inside of the matmul."""
    dy, x, total = randn(3000, 96), randn(3000, 64), randn(96, 64).float()
    expected = total.double() + dy.double().T @ x.double()
    # H200: 1.5e-6
    assert relative_error(sum_over_rows(dy, x, total, accumulate=True), expected) < 5e-6
    weight = randn(128, 64).requires_grad_()
    logits = wide_linear(x.requires_grad_(), weight)
    assert logits.dtype == torch.float32
    assert relative_error(logits, x.double() @ weight.double().T) < 5e-6
    dlogits = torch.randn_like(logits)
    logits.backward(dlogits)
    assert relative_error(x.grad, dlogits.double() @ weight.double()) < 3e-3  # bfloat16 once
    assert relative_error(weight.grad, dlogits.double().T @ x.double()) < 3e-3


def test_projections_add_up_the_gradient_of_their_input():
    inputs = [randn(2, 512, 256), *(randn(width, 256) for width in (512, 64, 64))]
    # the input's gradient is rounded three times
    assert_exact(linear_each, inputs, 4e-3, lambda x, *weights: tuple(x @ w.T for w in weights))


@pytest.mark.parametrize("top_k", [1, 8])
def test_rows_are_summed_without_atomics(top_k):
    y, rows = randn(512 * top_k, 2048), torch.randperm(512 * top_k, device="cuda").view(512, top_k)
    assert relative_error(gather_sum(y, rows), y.double()[rows].sum(1)) < 3e-3


def test_copies_of_weights_follow_a_fused_step():
    """The fused kernel changes parameters without incrementing their version."""
    weight = torch.nn.Parameter(randn(4, 32, 16).float())
    read = WeightCopies(torch.bfloat16).read
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for _ in range(2):
        for count in (1.0, 2.0):
            copy = read(weight)
            assert torch.equal(copy, weight.detach().bfloat16())
            copy.sum().backward()
            assert weight.grad.dtype == torch.float32 and (weight.grad == count).all()
        optimizer.step()
        optimizer.zero_grad()


def test_a_batch_finds_its_documents_before_it_is_moved():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, -1]])
    batch = Batch(ids, ids, ids, ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda")
        mask = build_attention_mask(moved.document_ids, "varlen", torch.bfloat16, **moved.inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mask.starts_N1 is not None and mask.starts_N1.tolist() == [0, 2, 4, 5, 7, 8]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_flash_in_windows_and_with_sinks(window, has_sinks):
    """The results are compared with the masked path in float64; documents are shorter and longer
    than the window.
    """
    torch.manual_seed(0)
    inputs = [randn(2, 512, heads, 64) for heads in (8, 2, 2)]
    if has_sinks:
        inputs.append(torch.linspace(-3.0, 3.0, 8, device="cuda").bfloat16())
    ids = torch.arange(512, device="cuda").expand(2, -1) // 200

    def function(q, k, v, sinks=None):
        backend = "varlen" if q.dtype == torch.bfloat16 else "sdpa"
        mask = build_attention_mask(ids, backend, q.dtype, window=window, has_sinks=has_sinks)
        return attention(q, k, v, mask, 0.125, sinks)

    assert_exact(function, inputs, 1e-2)


def test_draws_are_possible_with_deterministic_algorithms():
    logits, uniform = torch.randn(3, 50, device="cuda"), torch.rand(3, device="cuda")
    torch.use_deterministic_algorithms(True)
    drawn = choose_tokens(logits, uniform, temperature=0.7)
    assert drawn.is_cuda and torch.equal(
        drawn.cpu(), choose_tokens(logits.cpu(), uniform.cpu(), temperature=0.7)
    )


def test_gathered_rows_give_the_bits_of_copied_ones_in_every_run(monkeypatch):
    """Pointers and `cp.async` are compared with TMA at a real size: a missing barrier would
    sometimes show as other bits.
    """
    torch.manual_seed(0)
    tokens, top_k, num_experts, hidden, inner = 16384, 8, 128, 2048, 768
    x, dout = randn(tokens, hidden), randn(tokens, hidden)
    gate_up = randn(num_experts, 2 * inner, hidden) * hidden**-0.5
    down = randn(num_experts, hidden, inner) * inner**-0.5
    chosen = torch.rand(tokens, num_experts, device="cuda").topk(top_k).indices
    _, token, rows, offsets = group_by_expert(chosen, num_experts)
    weight = torch.rand(tokens * top_k, device="cuda")
    copied_x, copied_dout = (permute_tokens(t, token, rows) for t in (x, dout))
    _, z = kernels.gather_swiglu(copied_x, gate_up, weight, None, offsets, keep=True)
    for table in ("large", "blackwell"):
        monkeypatch.setitem(kernels.TILES[table], "wgrad_gather", kernels.TILES[table]["wgrad"])

    def products(x, dout, token):
        h, kept = kernels.gather_swiglu(x, gate_up, weight, token, offsets, keep=True)
        dz, *others = kernels.gather_swiglu_backward(dout, down, weight, token, offsets, z)
        dgate_up = torch.empty_like(gate_up)
        with monkeypatch.context() as patch:
            if token is not None:  # or rows would be copied for TMA
                patch.setattr(kernels, "_tma_fits", lambda *tensors: False)
            kernels.grouped_mm_wgrad_into(x, dz, offsets, dgate_up, False, token)
        return [h, kept, dz, *others, dgate_up]

    expected = products(copied_x, copied_dout, None)
    assert_same_bits(lambda: products(x, dout, token), expected, runs=100)


def test_gated_delta_kernels_have_the_values_of_torch_and_the_same_bits_in_every_run():
    """At the sizes of Qwen3-Next's layer, errors of the compiler and races show."""
    if (problem := find_triton_problem()) is not None:
        pytest.skip(problem)
    torch.manual_seed(0)
    shape = (2, 2048 + 17)
    q, k = (l2_norm(randn(*shape, 16, 128)) for _ in range(2))
    g = -0.05 * torch.rand(*shape, 32, device="cuda")  # slow, so that leaks would show
    inputs = [q * 128**-0.5, k, randn(*shape, 32, 128), g, torch.rand_like(g)]
    inputs = [x.requires_grad_() for x in inputs]
    documents = torch.randint(20, shape, device="cuda").sort(1).values
    dout = randn(*shape, 32, 128)

    def run(backend):
        out, last = gated_delta_rule(*inputs, documents, backend=backend)
        return [out, last, *torch.autograd.grad((out, last), inputs, (dout, torch.ones_like(last)))]

    names, first = ("out", "last", "q", "k", "v", "g", "beta"), run("triton")
    for name, actual, expected in zip(names, first, run("torch"), strict=True):
        assert relative_error(actual, expected.double()) < 1e-2, name
    assert_same_bits(lambda: run("triton"), first)


def angles(tokens, rotated):
    frequencies = elementwise.inverse_frequencies(rotated, 1e6).cuda()
    positions = torch.arange(tokens, device="cuda").unsqueeze(0)
    return elementwise.rope_cos_sin(frequencies, positions, torch.bfloat16)


def rotate(width, rotated, with_norms):
    cos_sin = angles(4096, rotated)

    def function(q, k, *weights):
        inside = [x.to(q.dtype) for x in cos_sin]
        return elementwise.rotate_heads(q[..., :width], k, inside, weights or None, 1e-6, 0.0)

    weights = [randn(width), randn(width)] if with_norms else []
    # a gate follows each query
    return function, [randn(1, 4096, 16, 2 * width), randn(1, 4096, 2, width), *weights]


def gate(x, projected, weight):
    z = projected[..., 512:].unflatten(-1, (2, 128))
    return elementwise.gated_rms_norm(x, z, weight, 1e-6)


def convolve(documents):
    def function(projected, taps):
        # float64 has no kernels
        backend = "auto" if projected.dtype == torch.bfloat16 else "torch"
        return delta_inputs(projected[..., :512], taps, documents, 128, 128, backend)

    return function


FUSED = {
    "add_norm": lambda: (
        lambda *inputs: elementwise.add_rms_norm(*inputs, 1e-6, 1.0),
        [randn(16384, 2048), randn(16384, 2048), randn(2048)],
    ),
    "rotation": lambda: rotate(128, 128, with_norms=False),
    "norm and rotation": lambda: rotate(128, 128, with_norms=True),
    "norm and partial rotation": lambda: rotate(256, 64, with_norms=True),
    "norm and gate": lambda: (
        gate,
        [randn(1, 4096, 16, 2, 128), randn(1, 4096, 16, 768), randn(128)],
    ),
    "swiglu": lambda: (elementwise.swiglu_apart, [randn(4096, 12288), randn(4096, 12288)]),
    "inputs of a delta net": lambda: (
        convolve(torch.randint(20, (2, 2048 + 17), device="cuda").sort(1).values),
        [randn(2, 2048 + 17, 16, 768), randn(16, 512, 4)],
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_have_the_values_of_float64_and_the_same_bits_in_every_run(name, monkeypatch):
    torch.manual_seed(0)
    function, inputs = FUSED[name]()
    calls = []
    choose = elementwise.takes_kernels
    monkeypatch.setattr(
        elementwise, "takes_kernels", lambda *x: calls.append(choose(*x)) or calls[-1]
    )

    first = assert_exact(function, inputs, 5e-3)
    assert calls in ([True, False], [])
    assert_same_bits(lambda: results_of(function, inputs), first)


@pytest.mark.parametrize(
    ("num_experts", "func", "groups"),
    [(128, "softmax", 1), (256, "sigmoid", 8), (384, "sigmoid", 1)],
)
def test_routing_has_the_values_of_float64_and_the_same_bits_in_every_run(
    num_experts, func, groups, monkeypatch
):
    config = ModelConfig(
        num_experts=num_experts,
        top_k=8,
        score_func=func,
        num_expert_groups=groups,
        num_limited_groups=max(groups // 2, 1),
    )
    torch.manual_seed(0)
    # Scores of a token differ by 1 %, and sums of groups by 4e-5: rounding changes no choice.
    logits = 8 * torch.rand(4, 4096 + 17, num_experts).argsort(-1).cuda() / num_experts - 8
    valid = (torch.rand(4, 4096 + 17) < 0.9).cuda()
    bias, load = torch.zeros(num_experts, device="cuda"), torch.rand(4, num_experts).cuda()
    upstream = torch.randn(4 * (4096 + 17), 8).cuda()

    def run(logits):
        leaf = logits.detach().requires_grad_()
        weights, ids, counts, sums = routing.choose_experts(
            logits, bias, valid, config, counts=True, sums=True
        )
        chosen = (weights, ids, load.to(leaf), sums.sum(1))
        weights, aux = routing.WeighExperts.apply(config, leaf, valid, *chosen)
        (gradient,) = torch.autograd.grad((weights * upstream).sum() + aux, leaf)
        return [ids, counts.sum(1), *group_by_expert(ids, 128), weights, aux, gradient]

    assert routing.takes_kernels(logits)
    first = run(logits)
    monkeypatch.setattr(routing, "takes_kernels", lambda x: False)
    expected = run(logits.double())
    monkeypatch.undo()
    ids, counts, order, token, rows, ends, *floats = first
    assert torch.equal(ids, expected[0]) and torch.equal(counts, expected[1])
    wanted = ids.flatten().clamp(max=128).sort(stable=True).indices
    assert torch.equal(order, wanted.int()) and torch.equal(token, (wanted // 8).int())
    assert torch.equal(rows.flatten().long(), wanted.argsort())
    assert torch.equal(ends.long(), torch.bincount(ids.flatten(), minlength=128)[:128].cumsum(0))
    for actual, exact in zip(floats, expected[6:], strict=True):
        assert relative_error(actual, exact) < 2e-6  # about 1e-7 in the interpreter
    assert_same_bits(lambda: run(logits), first, runs=100)


def test_gradients_of_experts_are_added_in_float32_with_the_same_bits_in_every_run():
    torch.manual_seed(0)
    sizes = torch.randint(400, (128,))
    offsets = sizes.cumsum(0).int().cuda()
    x, dy = randn(int(sizes.sum()), 2048), randn(int(sizes.sum()), 1536)

    def run():
        total = torch.empty(128, 1536, 2048, device="cuda")
        for count in range(3):
            kernels.grouped_mm_wgrad_into(x, dy, offsets, total, count > 0, None, None)
        return [total]

    (total,) = run()
    assert_same_bits(run, [total])
    for expert in (0, 77, 127):
        start, end = int(offsets[expert] - sizes[expert]), int(offsets[expert])
        wanted = 3 * dy[start:end].double().T @ x[start:end].double()
        assert relative_error(total[expert], wanted) < 1e-5


def test_tensors_of_more_than_two_to_the_31_elements():
    """The last groups of x, dx and z, of 2.2e9 elements each, are compared with float64. It takes
    20 GB.
    """
    rows, hidden, inner, last = 1_100_000, 2048, 1024, 1000
    x = torch.empty(rows, hidden, device="cuda", dtype=torch.bfloat16)
    for part in x.split(65536):
        part.normal_()
    dy, weight, gate_up = randn(rows, 128), randn(4, 128, hidden), randn(4, 2 * inner, hidden)
    offsets = torch.tensor(
        [rows // 3, rows // 2, rows - last, rows], dtype=torch.int32, device="cuda"
    )
    tail, dy_tail, end = x[-last:].double(), dy[-last:].double(), weight[3].double()
    bound = 5e-3  # rounding to bfloat16 alone gives 1.7e-3
    y = kernels.row_grouped_gemm(x, weight.mT, offsets)
    assert relative_error(y[-last:], tail @ end.T) < bound
    dw = grouped_mm_wgrad(x, dy, offsets, True, "triton")
    assert relative_error(dw[3], tail.T @ dy_tail) < bound
    dx = kernels.row_grouped_gemm(dy, weight, offsets)
    assert relative_error(dx[-last:], dy_tail @ end) < bound
    del dx
    ones = torch.ones(rows, device="cuda")
    _, z = kernels.gather_swiglu(x, gate_up, ones, None, offsets, keep=True)
    assert relative_error(z[-last:], tail @ gate_up[3].double().T) < bound


def test_a_kernel_can_be_the_first_of_its_thread():
    """In autograd's thread our kernel may be the first call, and that thread has no CUDA context
    before it.
    """
    x, weight = randn(256, 128), randn(2, 64, 128)
    offsets = torch.tensor([100, 256], dtype=torch.int32, device="cuda")
    expected = torch.cat([x[:100] @ weight[0].T, x[100:] @ weight[1].T])
    found = []
    thread = threading.Thread(
        target=lambda: found.append(kernels.row_grouped_gemm(x, weight.mT, offsets))
    )
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_cross_entropy_over_a_large_vocabulary(dtype, reduction):
    torch.manual_seed(0)
    inputs = [torch.randn(rows, 64, device="cuda").to(dtype) for rows in (300, 151_936)]
    labels = torch.randint(151_936, (300,), device="cuda")
    labels[7] = -100

    def function(hidden, weight):
        if hidden.dtype == dtype:
            return linear_cross_entropy(hidden, weight, labels, 128, reduction=reduction)
        logits = hidden @ weight.T
        return torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)

    assert_exact(function, inputs, 2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_products_of_float32_are_no_tf32(monkeypatch):
    """The test covers angles of positions beyond 2,048, as transformers' classes compute them, and
    a convolution.
    """
    torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE leaves it
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    keep_float32()
    positions = torch.arange(8192.0, device="cuda").view(1, 1, -1)
    frequencies = (1e4 ** -(torch.arange(0, 64, 2, device="cuda") / 64)).view(1, -1, 1)
    assert relative_error(frequencies @ positions, frequencies.double() @ positions.double()) < 1e-6
    x, weight = torch.randn(4, 64, 256, device="cuda"), torch.randn(64, 64, 4, device="cuda")
    expected = torch.nn.functional.conv1d(x.double(), weight.double())
    assert relative_error(torch.nn.functional.conv1d(x, weight), expected) < 1e-5
