"""`permute_tokens` and `unpermute_sum` against index arithmetic, and each as the other's
gradient.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.ops import permute_tokens, unpermute_sum


def make_rows(num_tokens, top_k, seed):
    """A random permutation of the (token, choice) pairs: token of each row (R,), and row of each
    choice (T, k).
    """
    order_R = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(seed))
    return order_R // top_k, order_R.argsort().view(num_tokens, top_k)


@settings(max_examples=40)
@given(
    num_tokens=st.integers(0, 12),
    top_k=st.integers(1, 5),
    dim=st.integers(1, 9),
    seed=st.integers(0, 999),
)
def test_values_and_gradients_equal_index_arithmetic(num_tokens, top_k, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    token_R, rows_Tk = make_rows(num_tokens, top_k, seed)
    # Small integers: sums are exact, so equality needs no tolerance.
    x, y = (
        torch.randint(-8, 8, (size, dim), generator=generator).double().requires_grad_()
        for size in (num_tokens, num_tokens * top_k)
    )
    rows = permute_tokens(x, token_R, rows_Tk)
    assert torch.equal(rows, x[token_R])
    tokens = unpermute_sum(y, token_R, rows_Tk)
    assert torch.equal(tokens, torch.zeros_like(x).index_add(0, token_R, y))

    # <y, P x> = <P^T y, x>: the gradient of one is the other.
    (dx,) = torch.autograd.grad(rows, x, y.detach())
    assert torch.equal(dx, tokens)
    (dy,) = torch.autograd.grad(tokens, y, x.detach())
    assert torch.equal(dy, rows)


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
