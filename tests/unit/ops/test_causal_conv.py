"""The causal convolution on packed documents against torch's on each document alone."""

import pytest
import torch
import torch.nn.functional as F

from titanlite.ops.causal_conv import causal_conv, last_inputs

D, W = 6, 4


def alone(x, weight):
    """What transformers computes of one document, (B, S, D)."""
    padded = F.pad(x.mT, (W - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=D)).mT


def draw(size, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(2, size, D, dtype=torch.float64)
    weight = torch.randn(D, W, dtype=torch.float64)
    return [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]


@pytest.mark.parametrize("lengths", [[20], [5, 1, 3, 2, 9], [1] * 7, [2], [1]], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.bfloat16, 1e-2)])
def test_documents_equal_those_alone(lengths, dtype, bound):
    x, weight = draw(sum(lengths), dtype)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = torch.cat([alone(part, exact[1]) for part in exact[0].split(lengths, 1)], 1)
    out = causal_conv(x, weight, documents if len(lengths) > 1 else None)
    assert out.dtype == dtype
    dout = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    ours = [out, *torch.autograd.grad(out, (x, weight), dout)]
    wanted = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    for actual, want in zip(ours, wanted, strict=True):
        assert (actual.double() - want).norm() <= bound * want.norm()


def test_rows_of_any_length_go_on():
    x, weight = draw(20)
    expected = alone(x, weight)
    lengths = torch.tensor([9, 2])  # fewer than there are taps
    before = last_inputs(x[:, :9], lengths, W - 1)
    for row, length in enumerate(lengths.tolist()):
        rest = torch.cat([before[row], x[row, length:]])[None]
        out = causal_conv(rest, weight)[0, W - 1 :]
        torch.testing.assert_close(out, expected[row, length:])
