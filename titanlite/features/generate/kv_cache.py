"""Keys and values of the tokens so far, so that generating one more token costs one token's work.

A token's slot in the cache is its position. Rows may have different lengths: prompts are padded on the right, what the
padding has written lies after the row's last token, where no query sees it, and is overwritten as the row grows.

After the prompts, the new tokens of all rows lie side by side in one sequence (1, B). Context and sequence parallelism
split the sequence over cp * tp ranks, so that a step of one token per row needs B to be a multiple of that, and not
that many tokens per row.

Shapes: B rows, b = B or more with padding, S longest prompt, T = max_len slots, H query heads, G key/value heads,
K and V head widths, D hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from titanlite.models.interface import Model
from titanlite.ops.attention import AttentionMask, attention


def build_cache(model: Model, lengths: Sequence[int], max_len: int, device: torch.device) -> Any:
    """Make an empty cache, of the model's own kind if it has one, for prompts that grow to at most `max_len` tokens."""
    own = model.build_cache(lengths, max_len, device)
    return KVCache(len(model.all_layers()), lengths, max_len, device) if own is None else own


class KVCache:
    """A `Cache`: of a whole model for one batch of rows; made by `build_cache`, held by the caller.

    A rank holds the key/value heads that it computes, in the dtype of its activations: heads / (cp * tp), and the rows
    of its own data-parallel share. Memory: layers * B * G * T * (K + V) elements, allocated at once in the first
    forward. `lengths_B` are tokens in the cache, by row; also the position of the next token.
    """

    def __init__(self, num_layers: int, lengths: Sequence[int], max_len: int, device: torch.device) -> None:
        self.lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
        self.max_len = max_len
        self.rows_B = torch.arange(len(lengths), device=device)
        self._longest = max(lengths)  # on the host: slicing the cache must not wait for the device
        self._slots_T = torch.arange(max_len, device=device)
        self._has_prompts = False
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    def positions(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if not self._has_prompts:
            if tokens.shape[1] > self.max_len:
                raise ValueError(f"prompts of {tokens.shape[1]} tokens, padding included, in {self.max_len} slots")
            return None
        if self._longest >= self.max_len:
            raise ValueError(f"the cache's {self.max_len} slots are used up")
        return F.pad(self.lengths_B, (0, tokens.shape[1] - len(self.lengths_B))).unsqueeze(0)

    def newest(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._has_prompts:
            return hidden[self.rows_B, self.lengths_B - 1]
        return hidden[0, : len(self.lengths_B)]

    def visible(self) -> torch.Tensor:
        """Return (B, slots in use) bool: the slots that the row's new token sees, its own included."""
        return self._slots_T[: self._longest + 1] <= self.lengths_B.unsqueeze(1)

    def advance(self) -> None:
        if self._has_prompts:
            self.lengths_B = self.lengths_B + 1
            self._longest += 1
        self._has_prompts = True


class LayerCache:
    """Keys and values of one layer, (B, G, T, K) and (B, G, T, V); latent attention's are kept expanded."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, scale: float
    ) -> torch.Tensor:
        if self._keys is None or self._values is None:
            self._keys, self._values = self._start(k), self._start(v)
            return attention(q, k, v, mask, scale)
        cache = self._cache
        count = len(cache.rows_B)
        visible_BT = cache.visible()
        self._keys[cache.rows_B, :, cache.lengths_B] = k[0, :count]
        self._values[cache.rows_B, :, cache.lengths_B] = v[0, :count]
        used = visible_BT.shape[1]
        out_BHK = cached_attention(q[0, :count], self._keys[:, :, :used], self._values[:, :, :used], visible_BT, scale)
        return F.pad(out_BHK, (0, 0, 0, 0, 0, q.shape[1] - count)).unsqueeze(0)

    def _start(self, x_BSGK: torch.Tensor) -> torch.Tensor:
        # Zeros: slots that a shorter row has not reached get weight 0, and 0 * nan would be nan.
        batch, seq_len, heads, width = x_BSGK.shape
        slots_BGTK = x_BSGK.new_zeros(batch, heads, self._cache.max_len, width)
        slots_BGTK[:, :, :seq_len] = x_BSGK.transpose(1, 2)
        return slots_BGTK


def cached_attention(
    q_BHK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, visible_BT: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one new query per row over T cached keys, of which `visible_BT` (bool) says those it may see.

    Returns (B, H, V). H must be a multiple of G, as in `attention`. Cached values must be finite where they are not
    visible too: their weight is 0, and 0 * nan is nan.
    """
    # The heads that read one key/value head take the place of that many queries: the cache is never repeated.
    q_BGRK = q_BHK.unflatten(1, (k_BGTK.shape[1], -1))
    out_BGRV = F.scaled_dot_product_attention(
        q_BGRK, k_BGTK, v_BGTV, attn_mask=visible_BT[:, None, None, :], scale=scale
    )
    return out_BGRV.flatten(1, 2)
