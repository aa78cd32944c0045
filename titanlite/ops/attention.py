"""Causal attention over packed documents, optionally in sliding windows and with sinks: one mask
per forward and window, shared by all its layers, and two backends.

A window of W tokens contains the query's own and the W - 1 before it. A sink (arXiv:2309.17453) is
a learned score of each query head that takes part in the softmax and has no value.

Shapes: B batch, S sequence, T keys, H query heads, G key/value heads, R = H / G, K width of a query
or key head, V <= K of a value head.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from titanlite.ops.kernels import (
    differentiate,
    find_stand_in,
    kernel_device,
    operator,
    wide_dtype,
)

AttentionBackend = Literal["sdpa", "varlen"]
# The kernel always accepts grouped heads; torch 2.12 and newer require an argument for them.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class AttentionMask:
    """The mask of all layers with one window; built once per forward by `build_attention_mask`.
    Without tensors it is plain causal.
    """

    # `sdpa`: bool, True where query s may see key t; on CUDA the addend of scores, 0 or -inf. With
    # sinks, T = S + 1: the first key is the sink.
    allowed_B1ST: torch.Tensor | None = None
    starts_N1: torch.Tensor | None = None  # `varlen`: the result of `find_starts`
    window: int = 0  # the most keys that a query sees, including its own; 0: no limit


def leave_out_cudnn() -> None:
    """Disable cuDNN's attention in this process.

    torch 2.11 and newer prefer it on H100 and later. With a mask its backward can give NaN
    (pytorch#196678), and in generation each new number of keys costs it a plan, tens of
    milliseconds.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def build_attention_mask(
    document_ids_BS: torch.Tensor | None,
    backend: AttentionBackend = "sdpa",
    dtype: torch.dtype = torch.float32,
    starts_N1: torch.Tensor | None = None,
    window: int = 0,
    tokens_BS: torch.Tensor | None = None,
    *,
    has_sinks: bool = False,
) -> AttentionMask:
    """Build the mask for causal attention inside documents: query s sees key t if t <= s, both are
    in the same document and, with a window, s - t is less than `window`.

    Args:
        document_ids_BS: (B, S) int64 document of each token, or None for one document per row.
            Padding has id -1: padded positions see each other and nothing else, so that no softmax
            row is empty.
        backend: `sdpa` builds a (B, 1, S, S) mask; `varlen` needs the starts of documents: each one
            ends where its run of tokens does.
        dtype: dtype of the queries.
        starts_N1: result of `find_starts`; None: `varlen` calls it, which waits for the device.
        window: number of tokens that a query sees; 0: all.
        tokens_BS: needed without documents, if there is a window or there are sinks.
        has_sinks: True if `attention` gets sinks.
    """
    if document_ids_BS is None:
        if not has_sinks and (not window or tokens_BS is None or tokens_BS.shape[1] <= window):
            return AttentionMask(window=window)
        assert tokens_BS is not None
        document_ids_BS = torch.zeros_like(tokens_BS)
    stand_in = find_stand_in("attention_mask")
    if stand_in is not None and (mask := stand_in(backend, window)) is not None:
        return mask
    if backend == "varlen":
        starts_N1 = find_starts(document_ids_BS) if starts_N1 is None else starts_N1
        # Otherwise a layer would be compiled again for each new number of documents.
        torch._dynamo.mark_dynamic(starts_N1, 0)  # pyright: ignore[reportPrivateUsage]  documented, for all its name
        return AttentionMask(starts_N1=starts_N1, window=window)
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    allowed_B1ST = same_BSS.tril().unsqueeze(1)
    if window:
        allowed_B1ST = allowed_B1ST.triu(1 - window)
    if has_sinks:
        allowed_B1ST = F.pad(allowed_B1ST, (1, 0), value=True)
    if kernel_device(document_ids_BS.device) == "cuda":
        # From a bool mask, torch makes this one in every layer, and saves each for backward.
        bias_B1ST = torch.zeros(allowed_B1ST.shape, dtype=dtype, device=allowed_B1ST.device)
        allowed_B1ST = bias_B1ST.masked_fill_(allowed_B1ST.logical_not(), float("-inf"))
    return AttentionMask(allowed_B1ST, window=window)


def attention(
    q_BSHK: torch.Tensor,
    k_BSGK: torch.Tensor,
    v_BSGV: torch.Tensor,
    mask: AttentionMask,
    scale: float,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with grouped key/value heads, and a sink for each query head; return (B, S, H, V).

    H must be a multiple of G: query head h reads key/value head h // (H / G). With sinks, `mask`
    must have been built for them.
    """
    if mask.starts_N1 is not None:  # of `varlen`
        return varlen_attention(q_BSHK, k_BSGK, v_BSGV, mask.starts_N1, scale, mask.window, sinks_H)
    width = v_BSGV.shape[-1]
    if sinks_H is not None:
        q_BSHK, k_BSGK, v_BSGV = _with_sink_key(q_BSHK, k_BSGK, v_BSGV, sinks_H / scale)
    q_BHSK, k_BGSK, v_BGSV = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGV))
    grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
    no_flash = mask.allowed_B1ST is not None or q_BHSK.dtype == torch.float32
    if grouped and no_flash and kernel_device(q_BHSK.device) == "cuda":
        # On CUDA a mask, or float32, rules out the flash kernel, and grouped heads rule out the
        # memory-efficient one. The remaining kernel stores the float32 scores of every layer, so
        # repeated heads cost little in comparison.
        repeats = q_BHSK.shape[1] // k_BGSK.shape[1]
        k_BGSK, v_BGSV = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSK, v_BGSV))
        grouped = False
    options = {
        "attn_mask": mask.allowed_B1ST,
        "is_causal": mask.allowed_B1ST is None,
        "enable_gqa": grouped,
    }
    out_BHSV = F.scaled_dot_product_attention(q_BHSK, k_BGSK, v_BGSV, scale=scale, **options)
    return out_BHSV.transpose(1, 2)[..., :width]


def _with_sink_key(
    q_BSHK: torch.Tensor, k_BSGK: torch.Tensor, v_BSGV: torch.Tensor, products_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a key in front of the keys. Its value is zero, and `products_H` gives its dot product
    with every query of a head.

    Queries and keys get 8 more dims. In the first one the new key is 1, the other keys are 0, and
    queries hold the dot product. Values are padded to the width of keys. So all widths are equal,
    and still a multiple of 8 if they were one before: fused kernels require both.
    """
    batch, size, heads, width = q_BSHK.shape
    products_BSH1 = products_H.to(q_BSHK.dtype).view(heads, 1).expand(batch, size, heads, 1)
    q_BSHK = torch.cat([q_BSHK, F.pad(products_BSH1, (0, 7))], dim=-1)
    k_BTGK = F.pad(k_BSGK, (0, 8, 0, 0, 1, 0))
    k_BTGK[:, 0, :, width] = 1.0
    return q_BSHK, k_BTGK, F.pad(v_BSGV, (0, width + 8 - v_BSGV.shape[-1], 0, 0, 1, 0))


def find_starts(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Return the start of each run of tokens of one document among B x S tokens, and B x S: (N +
    1,) int32.

    Waits for a CUDA device.
    """
    begins_BS = torch.ones_like(document_ids_BS, dtype=torch.bool)
    begins_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    starts_N = begins_BS.flatten().nonzero().flatten()
    return F.pad(starts_N, (0, 1), value=document_ids_BS.numel()).int()


def varlen_attention(
    q_BSHK: torch.Tensor,
    k_BSGK: torch.Tensor,
    v_BSGV: torch.Tensor,
    starts_N1: torch.Tensor,
    scale: float,
    window: int = 0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally in each document with FlashAttention (arXiv:2307.08691); return (B, S, H, V),
    in two-byte floats.
    """
    # of one width
    width = v_BSGV.shape[-1]
    missing = q_BSHK.shape[-1] - v_BSGV.shape[-1]
    v_BSGK = F.pad(v_BSGV, (0, missing)) if missing else v_BSGV
    q_THK, k_TGK, v_TGK = (x.flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    # Finding the longest document's length would wait for the device; blocks after a document's end
    # stop at once anyway.
    bound = q_BSHK.shape[1]
    window_size = window - 1, 0  # keys before and after the query; -1: all
    if sinks_H is None:
        out_THK = varlen_attn(
            q_THK,
            k_TGK,
            v_TGK,
            starts_N1,
            starts_N1,
            bound,
            bound,
            scale=scale,
            window_size=window_size,
            **_GROUPED,
        )
    else:
        (out_THK,) = _attend_with_sinks(
            q_THK, k_TGK, v_TGK, sinks_H, starts_N1, bound, scale, window_size
        )
    return cast(torch.Tensor, out_THK).view(q_BSHK.shape)[..., :width]


def _like_results(query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = query.shape
    wide = wide_dtype(query)
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=wide)


def _like_gradients(grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, *rest: Any):
    return tuple(x.new_empty(x.shape) for x in (query, key, value, rest[0]))


@operator(fake=_like_results)
def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    starts: torch.Tensor,
    max_q: int,
    scale: float,
    window_size: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FlashAttention's result over documents with a sink in each head's softmax, (T, H, K),
    and the logarithms of its sums, (H, T).

    A sink divides all weights of a query by the same number, so the kernel's result is rescaled.
    Its backward computes weights from the logarithm of their sum: given the new one, it computes
    the gradients of the new softmax.
    """
    window = list(window_size)
    is_causal = window == [-1, 0]
    out, lse_HT, _ = torch.ops.torch_attn._varlen_attn(
        query, key, value, starts, starts, max_q, max_q, is_causal, scale, window, **_GROUPED
    )
    total_HT = torch.logaddexp(lse_HT, sinks.to(lse_HT.dtype).unsqueeze(1))
    share_TH1 = (lse_HT - total_HT).exp().T.unsqueeze(-1)
    return (out * share_TH1).to(out.dtype), total_HT


@operator(fake=_like_gradients)
def sink_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    starts: torch.Tensor,
    max_q: int,
    scale: float,
    window_size: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key, value and sinks."""
    window = list(window_size)
    is_causal = window == [-1, 0]
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # state of dropout
    operands = grad.contiguous(), query, key, value, out, lse, starts, starts, max_q, max_q
    dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
        *operands, is_causal, unused, scale, window
    )
    taken_HT = (grad.to(lse.dtype) * out).sum(-1).T
    weights_HT = (sinks.to(lse.dtype).unsqueeze(1) - lse).exp()
    return dq, dk, dv, (weights_HT * taken_HT).sum(-1).neg().to(sinks.dtype)


_attend_with_sinks = differentiate(
    sink_attention,
    sink_attention_backward,
    num_kept=1,
    saves=lambda query, key, value, sinks, starts, bound, scale, window, out, lse: (
        query,
        key,
        value,
        out,
        lse,
        sinks,
        starts,
        bound,
        scale,
        window,
    ),
)


# Operators that compute attention and, for their derivatives, the logarithm of its sums. torch
# composes other cases of matmuls: float64 on CUDA; on CPU, values that are not as wide as keys.
ATTENTION_OPERATORS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.titanlite.sink_attention.default,
)
