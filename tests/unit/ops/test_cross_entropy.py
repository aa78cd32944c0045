"""`linear_cross_entropy` against `F.cross_entropy`: value, gradients, chunks, vocabulary shards,
largest tensor.
"""

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from tensors import Watch
from torch.utils._pytree import tree_iter

from titanlite.ops import IGNORE_INDEX, VocabShard, cross_entropy, linear_cross_entropy

# Relative Frobenius error against float64 of the same rounded inputs. bfloat16: logits, softmax and
# gradients are each rounded to 8 bits (3.9e-3).
BOUNDS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DTYPES = [torch.float32, torch.bfloat16]
VOCAB = 150  # several blocks of columns


@pytest.fixture(params=["torch", "kernels"])
def backend(request, monkeypatch):
    """Compute with torch, or with the kernels in Triton's interpreter, one thread at a time."""
    if request.param == "torch":
        yield "torch"
        return
    if not INTERPRETED:
        pytest.skip("on a GPU they are tested in tests/functional/test_gpu.py")
    lock, runs = threading.Lock(), []

    def locked(name):
        real = getattr(cross_entropy, name)

        def run(*args):
            with lock:
                runs.append(name)
                return real(*args)

        return run

    monkeypatch.setattr(cross_entropy, "_use_kernels", lambda x: x.dtype in KERNEL_DTYPES)
    for name in ("softmax_statistics", "softmax_gradient_"):
        monkeypatch.setattr(cross_entropy, name, locked(name))
    yield "kernels"
    assert runs


def make_inputs(tokens=13, dim=8, vocab=23, dtype=torch.float32, ignored=(2, 5)):
    hidden, weight = (
        torch.randn(rows, dim, dtype=torch.float64).to(dtype).requires_grad_()
        for rows in (tokens, vocab)
    )
    labels = torch.randint(vocab, (tokens,))
    labels[list(ignored)] = IGNORE_INDEX
    return hidden, weight, labels


def make_upstream(reduction):
    """The gradient that the loss, or that of each token, gets from what is made of it."""
    if reduction == "sum":
        return torch.tensor(0.37, dtype=torch.float64)
    return torch.randn(13, dtype=torch.float64)


def reference(hidden, weight, labels, reduction="sum", upstream=None):
    """Loss and gradients in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.T, labels, reduction=reduction)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), upstream)


def assert_close(actual, expected, bound):
    assert (actual.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    ("vocab", "chunk_tokens", "reduction"),
    [(23, 5, "none"), (128, 13, "sum"), (VOCAB, 4, "sum"), (VOCAB, 100, "none")],
)
def test_equals_cross_entropy(vocab, chunk_tokens, reduction, backend):
    for dtype in KERNEL_DTYPES if backend == "kernels" else BOUNDS:
        hidden, weight, labels = make_inputs(vocab=vocab, dtype=dtype)
        upstream = make_upstream(reduction)
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens, reduction=reduction)
        assert (
            loss.dtype == torch.promote_types(dtype, torch.float32) and loss.shape == upstream.shape
        )
        loss.backward(upstream.to(loss.dtype))
        expected = reference(hidden, weight, labels, reduction, upstream)
        for actual, wanted in zip((loss, hidden.grad, weight.grad), expected, strict=True):
            assert_close(actual, wanted, BOUNDS[dtype])
        assert hidden.grad.dtype == weight.grad.dtype == dtype
        assert torch.equal(hidden.grad[[2, 5]], torch.zeros(2, 8, dtype=dtype)), "of ignored labels"
        assert reduction == "sum" or loss[[2, 5]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_to_predict(tokens):
    hidden, weight, labels = make_inputs(tokens=tokens, ignored=range(tokens))
    loss = linear_cross_entropy(hidden, weight, labels, 4)
    loss.backward()
    assert not loss and not hidden.grad.any() and not weight.grad.any()


def test_large_logits_do_not_overflow(backend):
    hidden, weight, labels = make_inputs(vocab=VOCAB)
    hidden = (hidden.detach() * 1000).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, 5)
    loss.backward()
    assert_close(loss, reference(hidden, weight, labels)[0], 1e-5)
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_gradients_of_one_argument():
    hidden, weight, labels = make_inputs()
    _, dhidden, dweight = reference(hidden, weight, labels)
    linear_cross_entropy(hidden, weight.detach(), labels).backward()
    assert_close(hidden.grad, dhidden, BOUNDS[torch.float32])
    linear_cross_entropy(hidden.detach(), weight, labels, reduction="none").sum().backward()
    assert_close(weight.grad, dweight, BOUNDS[torch.float32])


class SizeLog(Watch):
    """Largest number of elements of any tensor that an operator returned, and the names of the
    operators.
    """

    def __init__(self):
        super().__init__()
        self.largest, self.shapes, self.names = 0, set(), []

    def look(self, func, args, out):
        self.names.append(str(func))
        for value in tree_iter(out):
            # a view
            if isinstance(value, torch.Tensor) and func is not torch.ops.aten.detach.default:
                self.largest = max(self.largest, value.numel())
                self.shapes.add(tuple(value.shape))


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float32, "sum"), (torch.bfloat16, "none")])
def test_full_logits_never_exist(dtype, reduction):
    tokens, dim, vocab, chunk = 200, 4, 300, 16
    hidden, weight, labels = make_inputs(tokens, dim, vocab, dtype)
    with SizeLog() as log:
        linear_cross_entropy(hidden, weight, labels, chunk, reduction=reduction).sum().backward()
    assert (chunk, vocab) in log.shapes  # the mode did see the inside of the function
    assert log.largest == chunk * vocab < tokens * vocab


def test_no_grad_gives_the_value_and_computes_no_gradient():
    hidden, weight, labels = make_inputs()
    with torch.no_grad(), SizeLog() as log:
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    assert_close(loss, reference(hidden, weight, labels)[0], BOUNDS[torch.float32])
    assert [name for name in log.names if "mm" in name] == ["aten.mm.default"]
    assert weight.shape not in log.shapes


class Ranks:
    """All-reduce between threads: each hands in its tensor, all get the reduction."""

    def __init__(self, size):
        self.barrier, self.given = threading.Barrier(size, timeout=20), [None] * size

    def reduce(self, rank, value, function):
        self.given[rank] = value.clone()
        self.barrier.wait()
        out = function(torch.stack(self.given), 0)
        self.barrier.wait()
        return out


@pytest.mark.parametrize(
    ("splits", "reduction"), [((0, 1, VOCAB), "none"), ((0, 50, 100, VOCAB), "sum")]
)
def test_vocabulary_shards_equal_the_whole(splits, reduction, backend):
    """Each rank is a thread. It has the whole loss, and gradients that are parts of a sum or
    rows.
    """
    dtype = torch.float32 if backend == "kernels" else torch.float64
    hidden, weight, labels = make_inputs(vocab=VOCAB, dtype=dtype)
    upstream = make_upstream(reduction)
    size = len(splits) - 1
    ranks, results = Ranks(size), [None] * size

    def run(rank):
        begin, end = splits[rank], splits[rank + 1]
        shard = VocabShard(
            start=begin,
            vocab_size=splits[-1],
            reduce_max=lambda x: ranks.reduce(rank, x, torch.amax),
            reduce_sum=lambda x: ranks.reduce(rank, x, torch.sum),
        )
        mine = hidden.detach().clone().requires_grad_()
        rows = weight.detach()[begin:end].clone().requires_grad_()
        loss = linear_cross_entropy(mine, rows, labels, 5, shard, reduction=reduction)
        loss.backward(upstream.to(dtype))
        results[rank] = loss.detach(), mine.grad, rows.grad

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results)
    loss, dhidden, dweight = reference(hidden, weight, labels, reduction, upstream)
    for result in results:
        assert_close(result[0], loss, BOUNDS[dtype])
    assert_close(sum(result[1] for result in results), dhidden, BOUNDS[dtype])
    assert_close(torch.cat([result[2] for result in results]), dweight, BOUNDS[dtype])


def test_bfloat16_gradients_are_scaled_alike():
    hidden, weight, labels = make_inputs(64, 32, 23, torch.bfloat16)
    scale = 1 / 24571  # bfloat16 has 8 bits: it would become 1 / 24528
    loss = linear_cross_entropy(hidden, weight, labels)
    for x in (hidden, weight):
        whole, scaled = (
            torch.autograd.grad(loss * s, x, retain_graph=True)[0].double() for s in (1.0, scale)
        )
        # Rounding errors of 2048 elements cancel in the norm to far below this; a wrong factor does
        # not.
        assert abs(scaled.norm() / whole.norm() / scale - 1) < 1e-3


def test_label_outside_the_vocabulary_does_not_pass(backend):
    hidden, weight, labels = make_inputs(vocab=VOCAB)
    labels[:2] = torch.tensor([VOCAB, -7])
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert not losses[:2].isfinite().any() and losses[2:].isfinite().all()
    losses.sum().backward()
    assert not hidden.grad[:2].isfinite().any() and hidden.grad[2:].isfinite().all()


def test_nan_gives_nan_and_a_logit_of_minus_infinity_does_not(backend):
    hidden, weight, labels = make_inputs(vocab=VOCAB)
    with torch.no_grad():
        hidden.fill_(1.0)
        weight[:100, 0] = -float("inf")  # a whole block of columns
    labels.fill_(140)
    assert_close(
        linear_cross_entropy(hidden, weight, labels, 5), reference(hidden, weight, labels)[0], 1e-5
    )
    with torch.no_grad():
        weight[3, 3] = float("nan")
    assert linear_cross_entropy(hidden, weight, labels, 5).isnan()


@pytest.mark.skipif(not INTERPRETED, reason="on host tensors, which the interpreter serves")
@pytest.mark.parametrize("kernels", [False, True])
def test_operators_pass_opcheck(kernels, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_use_kernels", lambda x: kernels)
    logits, column = torch.randn(3, VOCAB), torch.tensor([[0], [70], [149]])
    row = torch.rand(3)
    torch.library.opcheck(torch.ops.titanlite.softmax_statistics.default, (logits, column))
    torch.library.opcheck(
        torch.ops.titanlite.softmax_gradient_.default, (logits, row, row, row, column)
    )
