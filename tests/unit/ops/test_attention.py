"""Attention against a dense mask, in any layout of documents, windows, heads and padding."""

import itertools

import pytest
import torch
import varlen_kernel  # noqa: F401  torch's operator, on the CPU
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from titanlite.ops.attention import (
    AttentionMask,
    attention,
    build_attention_mask,
    sink_attention,
    sink_attention_backward,
)
from titanlite.ops.kernels import plan_for_device

SCALE = 0.3  # not that of the width, which torch takes on its own


def make_qkv(batch, seq_len, heads=4, kv_heads=2, value_width=16):
    return tuple(
        torch.randn(batch, seq_len, count, width, dtype=torch.float64)
        for count, width in ((heads, 16), (kv_heads, 16), (kv_heads, value_width))
    )


def reference(q, k, v, allowed_BSS, sinks=None):
    """Explicit softmax, one key/value head per h // (H / G)."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bshk,bthk->bhst", q, k) * SCALE
    scores = scores.masked_fill(~allowed_BSS[:, None], float("-inf"))
    if sinks is not None:
        sinks = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhst,bthk->bshk", weights, v)


def seen_in_window(document_ids, window):
    """Every pair by its definition: a loop, which shares nothing with the masks."""
    batch, size = document_ids.shape
    seen = torch.zeros(batch, size, size, dtype=torch.bool)
    for b, query, key in itertools.product(range(batch), range(size), range(size)):
        is_near = 0 <= query - key < (window or size)
        seen[b, query, key] = is_near and document_ids[b, query] == document_ids[b, key]
    return seen


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize(
    ("has_documents", "window", "heads", "value_width"),
    [
        (False, 0, (4, 4), 5),  # widths as in latent attention
        (False, 4, (4, 2), 16),
        (False, 40, (4, 1), 16),
        (True, 0, (6, 3), 5),
        (True, 1, (4, 1), 16),
        (True, 9, (4, 2), 16),
    ],
)
def test_attention_is_a_dense_mask(backend, has_documents, window, heads, value_width, has_sinks):
    """Documents are shorter and longer than the windows, and so are rows. The last document of a
    row and the first of the next have one number; the last tokens and the last row are padding.
    Sinks take most of a softmax, and next to nothing.
    """
    leaves = [x.requires_grad_() for x in make_qkv(3, 14, *heads, value_width)]
    sinks = None
    if has_sinks:
        sinks = torch.linspace(-20.0, 6.0, heads[0], dtype=torch.float64).requires_grad_()
        leaves.append(sinks)
    ids = torch.zeros(3, 14, dtype=torch.int64)
    if has_documents:
        for row, lengths in enumerate([[3, 7, 1, 2, 1], [10, 1, 1, 2]]):
            numbers = torch.arange(4 * row, 4 * row + len(lengths))
            ids[row] = numbers.repeat_interleave(torch.tensor(lengths))
        ids[1, 12:] = ids[2] = -1
    mask = build_attention_mask(
        ids if has_documents else None, backend, window=window, tokens_BS=ids, has_sinks=has_sinks
    )
    assert mask.window == window
    out = attention(*leaves[:3], mask, SCALE, sinks)
    expected = reference(*leaves[:3], seen_in_window(ids, window), sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    found, wanted = (torch.autograd.grad((x * weights).sum(), leaves) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_the_operator_of_sinks_is_one_for_torch():
    q, k, v = (x.detach().flatten(0, 1).float() for x in make_qkv(1, 8))
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    options = starts, 8, SCALE, [2, 0]
    torch.library.opcheck(sink_attention.default, (q, k, v, sinks := torch.randn(4), *options))
    results = sink_attention(q, k, v, sinks, *options)
    backward = (torch.randn_like(q), q, k, v, *results, sinks, *options)
    torch.library.opcheck(sink_attention_backward.default, backward)


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_without_documents_attention_is_plain_causal(backend):
    assert build_attention_mask(None, backend) == AttentionMask()


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
        assert mask.allowed_B1ST.dtype == q.dtype
        torch.testing.assert_close(attention(q, k, v, mask, SCALE), expected, rtol=0, atol=1e-12)
