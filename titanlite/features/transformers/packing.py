"""Inputs of transformers' classes for rows with several documents, and for a cache.

Most of transformers' models make their masks from positions that restart. Some (gpt-oss, Qwen2.5-VL
in 5.23) ignore positions and would let packed documents see each other. All of them build masks
through the functions that are registered per attention implementation, so the condition is added
there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

from titanlite.ops.attention import find_starts

_IMPLEMENTATIONS = ("sdpa", "eager")
_documents: ContextVar[torch.Tensor | None] = ContextVar("documents", default=None)


@contextmanager
def inside_documents(document_ids_BS: torch.Tensor | None) -> Iterator[None]:
    """Restrict masks of text to each token's own document while the context is open; with None
    nothing changes.
    """
    token = _documents.set(document_ids_BS)
    try:
        yield
    finally:
        _documents.reset(token)


def register_document_masks() -> None:
    """Make transformers' mask functions respect documents. Outside of `inside_documents` they are
    unchanged.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    for name in _IMPLEMENTATIONS:
        make = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not hasattr(make, "titanlite_documents"):
            AttentionMaskInterface.register(name, _with_documents(make))


def _with_documents(make: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.masking_utils import and_masks, causal_mask_function

    @wraps(make)
    def make_mask(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> Any:
        document_ids_BS = _documents.get()
        if document_ids_BS is None:
            return make(*args, mask_function=mask_function, **kwargs)

        def same_document(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return document_ids_BS[batch, query] == document_ids_BS[batch, key]

        kwargs |= {
            name: False
            for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip")
            if name in kwargs
        }
        return make(*args, mask_function=and_masks(mask_function, same_document), **kwargs)

    make_mask.titanlite_documents = True  # type: ignore[attr-defined]
    return make_mask


def restarting_positions(
    document_ids_BS: torch.Tensor, positions_BS: torch.Tensor | None
) -> torch.Tensor:
    """Return positions (B, S) int64 that restart in every document and, whatever was given, in
    every run of padding (-1).
    """
    index_S = torch.arange(document_ids_BS.shape[1], device=document_ids_BS.device)
    starts_BS = torch.ones_like(document_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    restarting_BS = index_S - torch.where(starts_BS, index_S, 0).cummax(dim=1).values
    return (
        restarting_BS
        if positions_BS is None
        else torch.where(document_ids_BS >= 0, positions_BS, restarting_BS)
    )


def boundaries(document_ids_BS: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return document ids (1, B * S) of all rows, joined into one row, and the boundaries of
    documents that kernels take with joined rows.

    Each run of padding counts as a document. Synchronization point: the number of documents.
    """
    ends = find_starts(document_ids_BS)
    lengths = ends.diff()
    longest = int(lengths.max())
    ids_1T = torch.arange(len(lengths), device=ends.device).repeat_interleave(lengths).unsqueeze(0)
    told = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return ids_1T, {**told, "seq_idx": ids_1T.to(torch.int32)}


# names of the argument in a class's forward; the second one before transformers 5.24
CACHE_ARGUMENTS = ("cache", "past_key_values")


class TransformersCache:
    """Keys and values of a batch of prompts: transformers' own cache, which appends the same number
    of tokens to every row.

    So prompts are right-aligned, after padding that a mask hides; each row's positions count only
    its own tokens.
    """

    def __init__(self, config: Any, lengths: Sequence[int], device: torch.device) -> None:
        from transformers import DynamicCache

        self._past = DynamicCache(config=config)
        self._lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
        self._mask_BS: torch.Tensor | None = None

    def inputs(self, tokens: torch.Tensor, cache_argument: str) -> dict[str, Any]:
        """Return a forward's inputs: for prompts (B, S) padded on the right, or for new tokens and
        padding (1, B).
        """
        count = len(self._lengths_B)
        if self._mask_BS is None:
            index_S = torch.arange(tokens.shape[1], device=tokens.device)
            shift_B1 = tokens.shape[1] - self._lengths_B.unsqueeze(1)
            tokens = tokens.gather(1, (index_S - shift_B1) % tokens.shape[1])
            self._mask_BS = (index_S >= shift_B1).to(torch.int64)
            positions = (index_S - shift_B1).clamp(min=0)
        else:
            tokens = tokens[0, :count].unsqueeze(1)
            positions = self._mask_BS.sum(1, keepdim=True)
            self._mask_BS = F.pad(self._mask_BS, (0, 1), value=1)
        return {
            "input_ids": tokens,
            "attention_mask": self._mask_BS,
            "position_ids": positions,
            cache_argument: self._past,
            "use_cache": True,
            "return_dict": True,
        }
