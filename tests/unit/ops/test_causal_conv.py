"""The causal convolution goes on from what is kept of its inputs; parity: test_decoder.py."""

import torch
import torch.nn.functional as F

from titanlite.ops.causal_conv import causal_conv, last_inputs

D, W = 6, 4


def alone(x, weight):
    """What transformers computes of one document, (B, S, D)."""
    padded = F.pad(x.mT, (W - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=D)).mT


def test_rows_of_any_length_go_on():
    x = torch.randn(2, 20, D, dtype=torch.float64)
    weight = torch.randn(D, W, dtype=torch.float64)
    expected = alone(x, weight)
    lengths = torch.tensor([9, 2])  # fewer than there are taps
    before = last_inputs(x[:, :9], lengths, W - 1)
    for row, length in enumerate(lengths.tolist()):
        rest = torch.cat([before[row], x[row, length:]])[None]
        out = causal_conv(rest, weight)[0, W - 1 :]
        torch.testing.assert_close(out, expected[row, length:])
