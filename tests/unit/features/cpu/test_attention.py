"""Attention on the host in blocks of queries: torch's own results, for any length, grouping of heads and documents."""

import pytest
import torch
import torch.nn.functional as F

from titanlite.features.cpu import attention as attention_cpu
from titanlite.features.cpu.attention import host_attention
from titanlite.ops.attention import attention, build_attention_mask

WIDTH = 8
SCALE = WIDTH**-0.5


def make_inputs(length: int, heads: int, kv_heads: int, dtype: torch.dtype, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(batch, length, h, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=SCALE, enable_gqa=True
    )
    return out.transpose(1, 2)


def make_documents(length: int) -> torch.Tensor:
    """Row 0: many short ones, and padding. Row 1: one that ends in the second block, and one that comes back."""
    first = torch.arange(length) // 7
    first[length - length // 5 :] = -1
    second = (torch.arange(length) >= 70).long()
    second[-1] = 0
    return torch.stack([first, second])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_values_and_gradients_are_those_of_torch(length, heads, packed, dtype):
    inputs = make_inputs(length, *heads, dtype)
    allowed = build_attention_mask(make_documents(length)).allowed_B1SS if packed else None
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = by_torch(*exact, allowed)
    out = host_attention(*inputs, allowed, SCALE)
    mine = [out, *torch.autograd.grad(out, inputs, dout.to(dtype))]
    reference = [expected, *torch.autograd.grad(expected, exact, dout)]
    bound = {torch.float64: 1e-13, torch.float32: 5e-6}[dtype]  # of the largest element
    for name, got, want in zip(("out", "dq", "dk", "dv"), mine, reference, strict=True):
        assert got.dtype == dtype and got.is_contiguous()
        assert (got.double() - want).abs().max() <= bound * want.abs().max().clamp(min=1), name


def test_few_heads_at_once_are_all_heads(monkeypatch):
    inputs = make_inputs(130, 6, 3, torch.float64)
    whole = host_attention(*inputs, None, SCALE)
    grads = torch.autograd.grad(whole.sum(), inputs)
    monkeypatch.setattr(attention_cpu, "_SCORE_BYTES", 1)  # one key/value head
    again = host_attention(*inputs, None, SCALE)
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), inputs), grads, rtol=0, atol=1e-12)


def test_earlier_documents_are_not_looked_at():
    """What lies in the keys of another document does not even turn into NaN."""
    q, k, v = make_inputs(200, 2, 1, torch.float64, batch=1)
    documents = (torch.arange(200) >= 100).long()[None]
    allowed = build_attention_mask(documents).allowed_B1SS
    with torch.no_grad():
        out = host_attention(q, k, v, allowed, SCALE)
        k[:, :64], v[:, :64] = torch.nan, torch.nan
        again = host_attention(q, k, v, allowed, SCALE)
    assert torch.equal(out[:, 128:], again[:, 128:]) and again[:, :64].isnan().all()


def test_gradcheck():
    inputs = make_inputs(5, 4, 2, torch.float64, batch=1)
    allowed = build_attention_mask(torch.tensor([[0, 0, 1, -1, -1]])).allowed_B1SS
    assert torch.autograd.gradcheck(lambda *x: host_attention(*x, None, SCALE), inputs)
    assert torch.autograd.gradcheck(lambda *x: host_attention(*x, allowed, SCALE), inputs)


def test_opcheck():
    allowed = build_attention_mask(make_documents(80)).allowed_B1SS
    for mask in (None, allowed):
        torch.library.opcheck(host_attention, (*make_inputs(80, 4, 2, torch.float32), mask, SCALE))


@pytest.mark.parametrize(
    ("length", "dtype", "threads", "own"),
    [
        (1024, torch.float32, 1, True),
        (1025, torch.float32, 1, False),
        (64, torch.bfloat16, 1, False),
        (64, torch.float32, 2, False),
    ],
)
def test_where_torchs_kernel_is_as_fast_it_runs(monkeypatch, length, dtype, threads, own):
    calls = []
    monkeypatch.setattr(attention_cpu, "_num_threads", lambda: threads)
    monkeypatch.setattr(attention_cpu, "host_attention", lambda *args: calls.append(args) or host_attention(*args))
    q, k, v = make_inputs(length, 2, 1, dtype, batch=1)
    out = attention(q, k, v, build_attention_mask(None), SCALE)
    assert bool(calls) == own
    torch.testing.assert_close(out, by_torch(q, k, v, None), rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_compiled_graph_does_not_break_at_the_choice():
    q, k, v = make_inputs(70, 4, 2, torch.float32)
    mask = build_attention_mask(None)
    compiled = torch.compile(lambda *x: attention(*x, mask, SCALE) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), host_attention(q, k, v, None, SCALE) * 2)
