"""Matmuls on CUDA's branch: float32 sums of two-byte operands. Values are checked on the CPU,
kernels with fake tensors.
"""

import os
from collections import Counter

import pytest
import torch
from processes import run_python
from tensors import Watch
from torch._subclasses.fake_tensor import FakeTensorMode

# torch 2.11 computes no sizes of addmm by itself
from titanlite.features.estimate.tracker import FixedScalars
from titanlite.ops import linear_cross_entropy
from titanlite.ops.kernels import plan_for_device
from titanlite.ops.matmul import _wide_linear, linear_each, wide_linear
from titanlite.ops.moe_experts import permute_tokens, unpermute_sum

BF16 = torch.bfloat16


def test_projections_of_one_input_are_those_of_each_weight():
    """Only tensors that need a gradient get one, and the input's gradient has a single buffer."""
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(n, 4, dtype=torch.float64, requires_grad=n != 2) for n in (6, 2, 3)]
    douts = [torch.randn(2, 3, len(weight), dtype=torch.float64) for weight in weights]
    leaves, found = [x, weights[0], weights[2]], []
    for outs in (linear_each(x, *weights), [torch.nn.functional.linear(x, w) for w in weights]):
        found.append([*outs, *torch.autograd.grad(outs, leaves, douts)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)
    with Calls() as calls:
        torch.autograd.grad(linear_each(x, *weights), x, douts)
    assert calls.found["addmm.out"] == 2 and calls.found["add.Tensor"] == 0


class Calls(Watch):
    """Counts operators. Fake tensors have no values, so an operator that waits for the device
    raises an error.
    """

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def look(self, func, args, out):
        self.found[str(func).removeprefix("aten.").removeprefix("titanlite.")] += 1


def test_the_router_follows_float64():
    x, weight = (
        torch.randn(3, 40, 64).to(BF16).requires_grad_(),
        torch.randn(16, 64).to(BF16).requires_grad_(),
    )
    dy = torch.randn(3, 40, 16)
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    y = _wide_linear(x, weight)
    expected = wide_x @ wide_weight.T
    assert y.dtype == torch.float32 and (y - expected).norm() <= 1e-6 * expected.norm()
    y.backward(dy)
    expected.backward(dy.double())
    for actual, wanted in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert actual.dtype == BF16
        # Nearly all numbers are the nearest ones; if dy were rounded to bfloat16, one in four would
        # differ.
        assert (actual == wanted.to(BF16)).double().mean() > 0.98


def test_the_router_multiplies_two_bytes_on_cuda_and_keeps_them():
    with FakeTensorMode(), plan_for_device("cuda"):
        x, weight = (torch.zeros(2, 40, 64, dtype=BF16), torch.zeros(16, 64, dtype=BF16))
        y = wide_linear(x.requires_grad_(), weight.requires_grad_())
        kept = [tensor.dtype for tensor in y.grad_fn.saved_tensors]
        with Calls() as calls:
            y.backward(torch.zeros_like(y))
    assert y.dtype == torch.float32 and y.shape == (2, 40, 16) and kept == [BF16, BF16]
    assert (calls.found["mm.default"], calls.found["mm.dtype"]) == (1, 1)
    exact = torch.randn(4, 8), torch.randn(3, 8)
    assert torch.equal(wide_linear(*exact), exact[0] @ exact[1].T)


def test_the_head_adds_its_weight_gradient_inside_the_product():
    """8192 tokens make two chunks; no float32 matrix of the vocabulary is added to another."""
    with FixedScalars(), plan_for_device("cuda"), Calls() as calls:
        hidden, weight = torch.zeros(8192, 16, dtype=BF16), torch.zeros(96, 16, dtype=BF16)
        labels = torch.zeros(8192, dtype=torch.int64)
        linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels).backward()
        assert weight.grad.dtype == BF16
    assert calls.found["addmm.dtype_out"] == 2 and not calls.found["add_.Tensor"]


@pytest.mark.parametrize(("top_k", "summed", "picked"), [(1, 0, 4), (4, 2, 2)])
def test_rows_are_summed_by_titanlites_kernel_on_cuda(top_k, summed, picked):
    """If there is one row per token, the rows are picked instead. Both cases run forward and
    backward.
    """
    with FakeTensorMode(), plan_for_device("cuda"), Calls() as calls:
        x, rows = (
            torch.zeros(6, 8, dtype=BF16, requires_grad=True),
            torch.zeros(6, top_k, dtype=torch.int64),
        )
        token = torch.zeros(6 * top_k, dtype=torch.int64)
        out = unpermute_sum(permute_tokens(x, token, rows), token, rows)
        out.sum().backward()
        assert out.shape == x.grad.shape == x.shape and out.dtype == BF16
    assert calls.found["gather_sum.default"] == summed
    assert calls.found["index_select.default"] == picked
    assert not any("embedding_bag" in name for name in calls.found)


PRECISIONS = """
import os

import torch
from titanlite.base.log import setup_logger
from titanlite.launch.process_group import init_distributed

def get():
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = torch.get_float32_matmul_precision(), cuda.allow_tf32, cudnn.allow_tf32
    return *flags, cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision

setup_logger()
print(get())
init_distributed(60)
print(get(), [name for name, value in os.environ.items() if "_TF32_" in name and value == "1"])
"""


def test_ranks_multiply_float32_whatever_an_image_sets():
    """torch starts with TF32 in cuDNN, and also in cuBLAS if the first variable is 1; cuBLAS itself
    obeys only the second one.
    """
    given = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "1"}
    others = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = run_python(PRECISIONS, env=others | given | {"PYTHONWARNINGS": "error"}, check=True)
    before, *lines, after = done.stdout.splitlines()
    assert before.startswith("('high', True, True, 'tf32'")
    assert after == "('highest', False, False, 'ieee', 'ieee', 'ieee') []"
    assert all(
        name in line and "is ignored" in line for name, line in zip(given, lines, strict=True)
    )
