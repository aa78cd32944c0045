"""Rows as classes of transformers take them: of several documents, of a prompt and what is said, and with a cache.

Most of transformers' models make their masks from positions that restart; some (gpt-oss, Qwen2.5-VL in 5.23) do not
look at them and would let packed documents see each other. All of them build masks through the functions that are
registered per attention implementation, so the condition is put in there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.base.errors import ConfigError
from titanlite.ops import IGNORE_INDEX
from titanlite.ops.attention import find_starts

_IMPLEMENTATIONS = ("sdpa", "eager")
_documents: ContextVar[torch.Tensor | None] = ContextVar("documents", default=None)


@contextmanager
def inside_documents(document_ids_BS: torch.Tensor | None) -> Iterator[None]:
    """Restrict masks of text to each token's own document while the context is open; None changes nothing."""
    token = _documents.set(document_ids_BS)
    try:
        yield
    finally:
        _documents.reset(token)


def register_document_masks() -> None:
    """Make transformers' mask functions respect documents. Outside of `inside_documents` they are unchanged."""
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

        kwargs |= {name: False for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip") if name in kwargs}
        return make(*args, mask_function=and_masks(mask_function, same_document), **kwargs)

    make_mask.titanlite_documents = True  # type: ignore[attr-defined]
    return make_mask


def restarting_positions(document_ids_BS: torch.Tensor, positions_BS: torch.Tensor | None) -> torch.Tensor:
    """Positions (B, S) int64 that restart in every document and, whatever was given, in every run of padding (-1)."""
    index_S = torch.arange(document_ids_BS.shape[1], device=document_ids_BS.device)
    starts_BS = torch.ones_like(document_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    restarting_BS = index_S - torch.where(starts_BS, index_S, 0).cummax(dim=1).values
    return restarting_BS if positions_BS is None else torch.where(document_ids_BS >= 0, positions_BS, restarting_BS)


def boundaries(document_ids_BS: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return document ids (1, B * S) of all rows in one, and the boundaries that kernels for such rows take.

    Each run of padding counts as a document. Synchronization point: the number of documents.
    """
    ends = find_starts(document_ids_BS)
    lengths = ends.diff()
    longest = int(lengths.max())
    ids_1T = torch.arange(len(lengths), device=ends.device).repeat_interleave(lengths).unsqueeze(0)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return ids_1T, {**told, "seq_idx": ids_1T.to(torch.int32)}


def split_rows(
    tokens_BS: torch.Tensor, labels_BS: torch.Tensor | None, model: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Split each row for an encoder-decoder `TransformersModel`: the prompt ends before the first trained token.

    Returns:
        The decoder's tokens, a first one and what follows the prompt; their labels; the place of each in the row, which
        is turned to begin there, and keeps its length; and the encoder's inputs: the prompt, padded and masked.

    Raises ConfigError: there are no labels, which tell where the prompt ends, or nothing begins the decoder's text.
    """
    name, inner = model.config.architecture, model.transformers_model
    if labels_BS is None:
        raise ConfigError(
            f"model: {name} of transformers is an encoder-decoder, which is trained here on prompts and their "
            "completions, and generates nothing. Save it, and let transformers generate."
        )
    index_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    learned_BS = labels_BS != IGNORE_INDEX
    first_B1 = learned_BS.to(torch.uint8).argmax(dim=1, keepdim=True)  # predicted by the prompt's end
    order_BS = (index_S + first_B1) % len(index_S)
    if _begins_with_last(inner):
        start: Any = labels_BS.gather(1, (learned_BS * index_S).amax(dim=1, keepdim=True)).clamp(min=0)
    else:  # in the order of transformers' `generate`
        configs = (inner.config, inner.config.get_text_config(decoder=True))
        starts = [getattr(c, key, None) for key in ("decoder_start_token_id", "bos_token_id") for c in configs]
        start = next((token for token in starts if token is not None), None)
    if start is None:
        raise ConfigError(f"model: no token begins what {name} says. Set decoder_start_token_id in its config.json.")
    said_BS = tokens_BS.gather(1, order_BS).where(index_S > 0, start)
    is_prompt_BS = index_S <= first_B1
    prompt = {"input_ids": tokens_BS * is_prompt_BS, "attention_mask": is_prompt_BS.to(torch.int64)}
    return said_BS, labels_BS.gather(1, order_BS), order_BS, prompt if model.takes_prompts else {}


def _begins_with_last(inner: Any) -> bool:
    """Return True for classes whose decoder first reads the last token of what it is to say, a language (mBART)."""
    make = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    try:
        return make is not None and int(make(labels=torch.tensor([[3, 4, 5]]))[0, 0]) == 5
    except ValueError:  # its configuration has no such token
        return False


def check_single_documents(document_ids_BS: torch.Tensor, name: str, why: str) -> None:
    """Refuse rows where a document follows another one or padding, for a class that mixes them.

    Raises ConfigError: there is one. Synchronization point.
    """
    if bool(((document_ids_BS[:, 1:] != document_ids_BS[:, :-1]) & (document_ids_BS[:, 1:] >= 0)).any()):
        raise ConfigError(
            f"model: {name} of transformers mixes documents that share a row: alone, the same tokens give other logits "
            f"({why}). Give it rows of one document each: set data.packing = false."
        )


def forget_longest_forward(model: nn.Module) -> None:
    """Reset `dynamic` rotary embeddings of transformers, which keep the frequencies of the longest forward."""
    for module in model.modules():
        if not hasattr(module, "original_max_seq_len"):
            continue
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            original: Any = getattr(module, f"{prefix}original_inv_freq", None)
            if original is not None and getattr(module, name) > module.original_max_seq_len:
                setattr(module, f"{prefix}inv_freq", original.to(getattr(module, f"{prefix}inv_freq").device))
                setattr(module, name, module.original_max_seq_len)


CACHE_ARGUMENTS = ("cache", "past_key_values")  # of a class's forward; the second one before transformers 5.24


class TransformersCache:
    """Keys and values of a batch of prompts: transformers' own cache, which appends as many tokens to every row.

    So prompts are right-aligned, after padding that a mask hides; each row's positions count its own tokens.
    """

    def __init__(self, config: Any, lengths: Sequence[int], device: torch.device, first_position: int = 0) -> None:
        from transformers import DynamicCache

        self._past = DynamicCache(config=config)
        self._lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
        self._mask_BS: torch.Tensor | None = None
        self._first_position = first_position  # which the class gives to the first token

    def inputs(self, tokens: torch.Tensor, cache_argument: str) -> dict[str, Any]:
        """Return a forward's inputs: for prompts (B, S) padded on the right, then for new tokens and padding (1, B)."""
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
            "position_ids": positions + self._first_position,
            cache_argument: self._past,
            "use_cache": True,
            "return_dict": True,
        }
