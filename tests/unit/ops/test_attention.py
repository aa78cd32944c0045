"""Attention: packed documents equal separate ones, padding gives no NaN, grouped heads."""

import itertools

import pytest
import torch
import varlen_kernel  # noqa: F401  torch's operator, on the CPU
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from titanlite.ops.attention import (
    AttentionMask,
    attention,
    build_attention_mask,
    leave_out_cudnn,
    sink_attention,
    sink_attention_backward,
)
from titanlite.ops.kernels import plan_for_device

BACKENDS = ["sdpa", "varlen"]
SCALE = 16**-0.5


def make_qkv(batch, seq_len, heads=4, kv_heads=2, width=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, seq_len, h, width, generator=generator, dtype=dtype)
        for h in (heads, kv_heads, kv_heads)
    )


def reference(q, k, v, allowed_BSS, scale=SCALE, sinks=None):
    """Explicit softmax, one key/value head per h // (H / G)."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bshk,bthk->bhst", q, k) * scale
    scores = scores.masked_fill(~allowed_BSS[:, None], float("-inf"))
    if sinks is None:
        return torch.einsum("bhst,bthk->bshk", scores.softmax(-1), v)
    sinks = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhst,bthk->bshk", weights, v)


def causal(batch, seq_len):
    return torch.ones(batch, seq_len, seq_len, dtype=torch.bool).tril()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_causal_with_grouped_heads(heads):
    q, k, v = make_qkv(2, 9, *heads)
    mask = build_attention_mask(None)
    assert mask.allowed_B1ST is None
    # float64 sums of 9 terms in another order.
    torch.testing.assert_close(
        attention(q, k, v, mask, SCALE), reference(q, k, v, causal(2, 9)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_packed_documents_equal_separate_documents(backend, heads):
    lengths = [3, 1, 5, 2]
    q, k, v = make_qkv(1, sum(lengths), *heads)
    document_ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    out = attention(q, k, v, build_attention_mask(document_ids, backend), SCALE)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = reference(q[:, rows], k[:, rows], v[:, rows], causal(1, length))
        torch.testing.assert_close(out[:, rows], alone, rtol=0, atol=1e-12)
        start += length


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("width", [5, 16])
def test_values_of_another_width_than_keys(backend, width):
    """As latent attention has them; and their gradients."""
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 7, 4, 4))
    v = v.detach()[..., :width].requires_grad_()
    document_ids = None if backend is None else torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    allowed = causal(1, 7)
    if document_ids is not None:
        allowed &= document_ids[:, :, None] == document_ids[:, None, :]
    mask = (
        build_attention_mask(document_ids)
        if backend is None
        else build_attention_mask(document_ids, backend)
    )
    out, expected = attention(q, k, v, mask, SCALE), reference(q, k, v, allowed)
    assert out.shape == (1, 7, 4, width)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    found, wanted = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def seen_in_window(document_ids, window):
    """Every pair by its definition: a loop, which shares nothing with the masks."""
    batch, size = document_ids.shape
    seen = torch.zeros(batch, size, size, dtype=torch.bool)
    for b, query, key in itertools.product(range(batch), range(size), range(size)):
        is_near = 0 <= query - key < (window or size)
        seen[b, query, key] = is_near and document_ids[b, query] == document_ids[b, key]
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 4, 9, 40])
@pytest.mark.parametrize("has_documents", [True, False])
def test_a_window_is_a_dense_mask(backend, window, has_documents):
    """Documents are shorter and longer than the windows, and so are rows."""
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 20))
    ids = torch.zeros(2, 20, dtype=torch.int64)
    if has_documents:
        lengths = torch.tensor([[3, 9, 1, 5, 2], [4, 12, 2, 1, 1]])
        ids = torch.stack([torch.repeat_interleave(torch.arange(5), row) for row in lengths])
        ids[1, 19] = -1
    mask = build_attention_mask(
        ids if has_documents else None, backend, window=window, tokens_BS=ids
    )
    assert mask.window == window
    out, expected = (
        attention(q, k, v, mask, SCALE),
        reference(q, k, v, seen_in_window(ids, window)),
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    found, wanted = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("has_documents", [True, False])
def test_sinks_and_their_gradients(backend, window, has_documents):
    """Large and small ones: most of a softmax, and next to nothing of it."""
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 11))
    sinks = torch.tensor([-20.0, -1.0, 0.5, 6.0], dtype=torch.float64, requires_grad=True)
    ids = torch.zeros(2, 11, dtype=torch.int64)
    if has_documents:
        ids[0, 3:], ids[1, 7:] = 1, -1
    mask = build_attention_mask(
        ids if has_documents else None, backend, window=window, tokens_BS=ids, has_sinks=True
    )
    out = attention(q, k, v, mask, SCALE, sinks)
    expected = reference(q, k, v, seen_in_window(ids, window), sinks=sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    found, wanted = (
        torch.autograd.grad((x * weights).sum(), (q, k, v, sinks)) for x in (out, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_the_operator_of_sinks_is_one_for_torch():
    q, k, v = (x.detach().flatten(0, 1).float() for x in make_qkv(1, 8))
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    options = starts, 8, SCALE, [2, 0]
    torch.library.opcheck(sink_attention.default, (q, k, v, sinks := torch.randn(4), *options))
    results = sink_attention(q, k, v, sinks, *options)
    backward = (torch.randn_like(q), q, k, v, *results, sinks, *options)
    torch.library.opcheck(sink_attention_backward.default, backward)


def test_a_document_that_comes_back_is_one_document():
    document_ids = torch.tensor([[0, 0, 1, 1, 0]])
    q, k, v = make_qkv(1, 5)
    allowed = causal(1, 5) & (document_ids[:, :, None] == document_ids[:, None, :])
    out = attention(q, k, v, build_attention_mask(document_ids), SCALE)
    torch.testing.assert_close(out, reference(q, k, v, allowed), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_gives_no_nan_and_touches_no_document(backend):
    document_ids = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [-1] * 7])
    q, k, v = make_qkv(2, 7)
    out = attention(q, k, v, build_attention_mask(document_ids, backend), SCALE)
    assert out.isfinite().all()
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[0, 5:] = 100.0
    again = attention(*changed, build_attention_mask(document_ids, backend), SCALE)
    assert torch.equal(again[0, :5], out[0, :5])


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_gradient_with_padding_equals_separate_documents(backend):
    document_ids = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 7))
    attention(q, k, v, build_attention_mask(document_ids, backend), SCALE)[
        :, :5
    ].square().sum().backward()
    assert all(torch.equal(x.grad[:, 5:], torch.zeros_like(x.grad[:, 5:])) for x in (q, k, v))
    for rows in (slice(0, 3), slice(3, 5)):
        parts = [x.detach()[:, rows].requires_grad_() for x in (q, k, v)]
        reference(*parts, causal(1, rows.stop - rows.start)).square().sum().backward()
        for whole, part in zip((q, k, v), parts, strict=True):
            torch.testing.assert_close(whole.grad[:, rows], part.grad, rtol=0, atol=1e-12)


def test_scale_is_used():
    q, k, v = make_qkv(1, 6)
    expected = reference(q, k, v, causal(1, 6), scale=0.5)
    torch.testing.assert_close(
        attention(q, k, v, build_attention_mask(None), 0.5), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_documents_attention_is_plain_causal(backend):
    assert build_attention_mask(None, backend) == AttentionMask()


def test_rows_do_not_run_into_each_other():
    """The last document of a row and the first of the next may have one number."""
    document_ids = torch.tensor([[0, 0, 0], [0, 1, -1], [-1, -1, -1]])
    mask = build_attention_mask(document_ids, "varlen")
    assert mask.starts_N1 is not None and mask.starts_N1.tolist() == [0, 3, 4, 5, 6, 9]
    q, k, v = make_qkv(3, 3)
    expected = attention(q, k, v, build_attention_mask(document_ids), SCALE)
    torch.testing.assert_close(attention(q, k, v, mask, SCALE), expected, rtol=0, atol=1e-12)


def test_known_starts_are_not_looked_for():
    """Without data nothing could be."""
    with FakeTensorMode():
        ids, starts = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
        assert build_attention_mask(ids, "varlen", starts_N1=starts).starts_N1 is starts
        with pytest.raises(DynamicOutputShapeException):
            build_attention_mask(ids, "varlen")


def test_on_cuda_all_layers_share_one_mask_in_the_dtype_of_the_scores():
    """It is made for CUDA and given to the kernels of the CPU."""
    q, k, v = make_qkv(2, 8)
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1], [0, 0, 1, 1, 1, 1, 1, 1]])
    expected = attention(q, k, v, build_attention_mask(document_ids), SCALE)
    with plan_for_device("cuda"):
        mask = build_attention_mask(document_ids, dtype=q.dtype)
        assert mask.allowed_B1ST is not None and mask.allowed_B1ST.dtype == q.dtype
        torch.testing.assert_close(attention(q, k, v, mask, SCALE), expected, rtol=0, atol=1e-12)


def test_cudnn_is_left_out():
    torch.backends.cuda.enable_cudnn_sdp(True)
    leave_out_cudnn()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
