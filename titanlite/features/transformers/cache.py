"""Keys and values of one batch of prompts for models of transformers: its own cache behind the interface of `KVCache`.

transformers' cache appends the same number of tokens to every row, so prompts are moved to the right here, behind
padding that a mask hides; each row's positions count its own tokens.

Shapes: B rows, S longest prompt.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

CACHE_ARGUMENTS = ("cache", "past_key_values")  # of a class's forward; the second one before transformers 5.24


class TransformersCache:
    """Made by `TransformersModel.build_cache`, held by the caller.

    Memory grows with every token. Layers with a sliding window keep that window only. A rank holds the heads that it
    computes.
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
