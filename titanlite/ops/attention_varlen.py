"""FlashAttention over documents of any length (arXiv:2307.08691), by torch's kernel for CUDA.

Shapes: B batch, S sequence, T = B x S tokens of N documents, H query heads, G key/value heads, K width of a query or
key head, V <= K of a value head.
"""

import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

# Grouped heads are what the kernel always takes; torch 2.12 and newer want to be told that they are meant.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def find_starts(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Where each run of tokens of one document begins among B x S tokens, and B x S: (N + 1,) int32.

    Waits for a CUDA device.
    """
    begins_BS = torch.ones_like(document_ids_BS, dtype=torch.bool)
    begins_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    starts_N = begins_BS.flatten().nonzero().flatten()
    return F.pad(starts_N, (0, 1), value=document_ids_BS.numel()).int()


def varlen_attention(
    q_BSHK: torch.Tensor, k_BSGK: torch.Tensor, v_BSGV: torch.Tensor, starts_N1: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention inside each document, (B, S, H, V), in bfloat16 or float16; `starts_N1` as of `find_starts`."""
    width = v_BSGV.shape[-1]
    v_BSGK = pad_values(q_BSHK, v_BSGV)
    q_THK, k_TGK, v_TGK = (x.flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    # The longest document would have to be waited for, too: blocks of the kernel behind a document's end stop at once.
    bound = q_BSHK.shape[1]
    out_THK = varlen_attn(
        q_THK, k_TGK, v_TGK, starts_N1, starts_N1, bound, bound, scale=scale, window_size=(-1, 0), **_GROUPED
    )
    return cast(torch.Tensor, out_THK).view(q_BSHK.shape)[..., :width]


def pad_values(q_BSHK: torch.Tensor, v_BSGV: torch.Tensor) -> torch.Tensor:
    """Values as wide as queries, with zeros: FlashAttention knows one width."""
    return F.pad(v_BSGV, (0, q_BSHK.shape[-1] - v_BSGV.shape[-1])) if v_BSGV.shape[-1] < q_BSHK.shape[-1] else v_BSGV
