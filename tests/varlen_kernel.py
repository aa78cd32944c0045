"""torch's FlashAttention over documents has only a CUDA kernel: this module registers a loop as its
CPU kernel.

The tests then use torch's own operator, with its signature, its derivative and its rules for
torch.compile.
"""

import torch
from torch.nn.attention import varlen

forwards: list[int] = []  # tokens of each call


def _documents(starts_N1, group, q_THK, *rest):
    """Yield the location of each document, and its (H, S, K) queries, keys, values and further
    tensors.
    """
    for start, stop in zip(starts_N1[:-1].tolist(), starts_N1[1:].tolist(), strict=True):
        q, k, v, *others = (x[start:stop].transpose(0, 1) for x in (q_THK, *rest))
        yield (
            slice(start, stop),
            q,
            k.repeat_interleave(group, 0),
            v.repeat_interleave(group, 0),
            *others,
        )


def _scores(q, k, scale, window):
    """Return the scores (H, S, S); `window` are the numbers of visible neighbours before and after
    a query, -1: all.
    """
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    if window[0] >= 0:
        seen = seen.triu(-window[0])
    return (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))


def _check(
    starts,
    others,
    longest,
    rest,
):
    """Check the requirements of the CUDA kernel, and refuse inputs that it would treat
    differently.
    """
    assert others is not None and torch.equal(starts, others) and starts.dtype == torch.int32
    assert longest[0] == longest[1] >= int(starts.diff().max()) and int(starts.diff().min()) > 0
    assert rest[0][0] >= -1 and rest[0][1] == 0, "causal, by the window"
    assert rest[1:2] in ((), (True,)), "grouped heads are meant"


def _forward(
    q,
    k,
    v,
    starts,
    others,
    longest_q,
    longest_k,
    is_causal,
    scale,
    *rest,
):
    assert is_causal == (rest[0] == [-1, 0]) and all(x.stride(-1) == 1 for x in (q, k, v))
    _check(starts, others, (longest_q, longest_k), rest)
    forwards.append(q.shape[0])
    out_THK = torch.empty_like(q)
    lse_HT = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for place, q_HSK, k_HSK, v_HSK in _documents(starts, q.shape[1] // k.shape[1], q, k, v):
        scores_HSS = _scores(q_HSK, k_HSK, scale, rest[0])
        out_THK[place] = (scores_HSS.softmax(-1) @ v_HSK).transpose(0, 1)
        lse_HT[:, place] = scores_HSS.to(lse_HT.dtype).logsumexp(-1)
    return out_THK, lse_HT, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    starts,
    others,
    longest_q,
    longest_k,
    is_causal,
    rng_state,
    scale,
    *rest,
):
    _check(starts, others, (longest_q, longest_k), rest)
    group = q.shape[1] // k.shape[1]
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    documents = _documents(starts, group, q, k, v, grad, out)
    for place, q_HSK, k_HSK, v_HSK, grad_HSK, out_HSK in documents:
        # The kernel also computes weights from the given logarithmic sum, and the softmax's
        # correction from the given result.
        weights_HSS = (_scores(q_HSK, k_HSK, scale, rest[0]) - lse[:, place].unsqueeze(-1)).exp()
        weights_HSS = weights_HSS.to(q.dtype)
        wanted_HSS = grad_HSK @ v_HSK.transpose(1, 2)
        taken_HS1 = (grad_HSK * out_HSK).sum(-1, keepdim=True)
        scores_HSS = weights_HSS * (wanted_HSS - taken_HS1) * scale
        products = (
            scores_HSS @ k_HSK,
            scores_HSS.transpose(1, 2) @ q_HSK,
            weights_HSS.transpose(1, 2) @ grad_HSK,
        )
        for result, product in zip(grads, products, strict=True):
            result[place] = product.unflatten(0, (result.shape[1], -1)).sum(1).transpose(0, 1)
    return grads


varlen._varlen_attn.register_kernel("cpu")(_forward)  # pyright: ignore[reportPrivateUsage]
varlen._varlen_attn_backward.register_kernel("cpu")(_backward)  # pyright: ignore[reportPrivateUsage]
