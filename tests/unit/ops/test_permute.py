"""Sums of `permute_tokens` and `unpermute_sum` are wide; parity: tests/unit/models."""

import torch

from titanlite.ops import permute_tokens, unpermute_sum


def test_bfloat16_rows_are_summed_in_float32():
    # 256 + 1 + 1 + ... in bfloat16 stays 256, because its steps there are 2; in float32 it is 263,
    # rounded to 264.
    y = torch.ones(8, 1, dtype=torch.bfloat16)
    y[0] = 256
    token_R, rows_Tk = torch.zeros(8, dtype=torch.int64), torch.arange(8).view(1, 8)
    assert unpermute_sum(y, token_R, rows_Tk).item() == 264
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    permute_tokens(x, token_R, rows_Tk).backward(y)
    assert x.grad.item() == 264
