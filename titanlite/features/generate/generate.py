"""Generation: continue prompts token by token, in batches, with a model that may be sharded over
any mesh.

A model that caches keys and values (`Model.can_cache`: the native decoder, most transformers
classes) computes each token once. Any other model that maps tokens (B, S) to logits (B, S, V)
recomputes the whole text for every token; the log reports this.

**Cache.** A token's slot is its position. Prompts of different lengths are padded on the right:
padding writes to slots after the row's last token. No query sees these slots, and the row's next
tokens overwrite them. After the prompts, the new tokens of all rows form one sequence (1, B).
Context and sequence parallelism split this sequence over cp * tp ranks, so B must be a multiple of
cp * tp.

**Collectives.** FSDP and expert parallelism need every rank in every forward. Prompts are split
over the data-parallel ranks. All ranks run the same number of batches, and by one small all-reduce
per token the same number of steps.

Shapes: B rows, S sequence, V vocabulary, k tokens to choose from. In the cache: T = max_len slots,
H query heads, G key/value heads, K and V head widths, D hidden.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from titanlite.base.agree import gather_objects
from titanlite.base.errors import CheckpointError, ConfigError, raise_problems
from titanlite.base.log import logger
from titanlite.checkpoint.folder import read_json
from titanlite.data.dataset import TrainDataset, get_sources
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import forward_only
from titanlite.features.transformers.model import TransformersModel
from titanlite.models.interface import Model
from titanlite.ops.attention import AttentionMask, attention


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token; see `choose_tokens`.

    Each prompt has its own random stream, keyed by (seed, number of the prompt). So the draws are
    the same on any mesh and in any batch, up to the rounding of the logits.
    """

    temperature: float = 0.0  # greedy decoding
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> list[str]:
        """Return a message for each value that is out of range; nan is out of range."""
        values = [
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
        ]
        return [
            f"{name} = {value} is out of range. Set it to {to}."
            for name, value, fits, to in values
            if not fits
        ]


@dataclass(frozen=True)
class Continuation:
    """Continuation of a prompt, without the end-of-text token."""

    tokens: list[int]
    ended: bool  # True: the model ended it; False: it reached the limit of new tokens


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    device: torch.device,
    dims: ParallelDims | None = None,
    eos_token_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 16,
) -> list[Continuation]:
    """Continue each of `prompts` by at most `max_new_tokens` tokens; return the continuations in
    the order of the prompts, on all ranks.

    During the call the model is in evaluation mode and runs uncompiled, because its shapes change
    with every token.

    Args:
        model: maps int64 tokens to logits, and may be a `Model`; if `dims` is given, it is
            parallelized over them.
        prompts: token ids, at least one per prompt; the same on all ranks.
        dims: meshes of the model; None: this process has the whole model.
        eos_token_ids: tokens that end a text.
        vocab_size: only smaller ids are chosen. An embedding may have more rows than the tokenizer
            has tokens.
        sampling: None: greedy.
        batch_size: number of prompts in a batch on each data-parallel rank.

    Raises:
        ConfigError, on all ranks: a prompt is empty. Callers must check the other values, for
            example by `Sampling.check`.

    Collectives: the forwards, one all-reduce per token, and one gather at the end; every rank must
    make the same call.
    """
    sampling = sampling or Sampling()
    empty = [f"prompt {i} has no tokens." for i, prompt in enumerate(prompts) if not prompt]
    raise_problems(ConfigError, "generate", empty)
    limit = _get_rope_limit(model)
    if limit is not None and any(len(prompt) + max_new_tokens > limit for prompt in prompts):
        batch_size = 1  # in a batch the longest text would set the rotary frequencies of all
        logger.info(
            "generate: one prompt at a time: beyond %d tokens rotary frequencies depend on the "
            "longest",
            limit,
        )
    # Prompts of similar length share a batch. This minimizes padding, and gives the data-parallel
    # ranks equal work.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    dp, dp_rank = (1, 0) if dims is None else (dims.degrees.dp, dims.dp_rank)
    mine = order[dp_rank::dp]
    num_batches = -(-len(order) // (dp * batch_size))  # on the rank with the most prompts
    found: dict[int, Continuation] = {}
    with forward_only(model), torch.compiler.set_stance("force_eager"):
        cached = isinstance(model, Model) and model.can_cache(device)
        if not cached:
            is_class = isinstance(model, TransformersModel)
            logger.info(
                "generate: %s cannot cache keys and values: every token costs a full forward",
                model.config.architecture if is_class else type(model).__name__,
            )
        batch = _Batch(
            model,
            cached,
            device,
            dims,
            max_new_tokens,
            frozenset(eos_token_ids),
            vocab_size,
            sampling,
        )
        for start in range(0, num_batches * batch_size, batch_size):
            numbers = mine[start : start + batch_size]
            found.update(batch.run({i: prompts[i] for i in numbers}))
    if dims is not None:
        found = {i: each for part in gather_objects(found) for i, each in part.items()}
    return [found[i] for i in range(len(prompts))]


def _get_rope_limit(model: nn.Module) -> int | None:
    return model.config.rope_limit if isinstance(model, TransformersModel) else None


@dataclass(frozen=True)
class _Batch:
    """Generation for one batch of prompts."""

    model: Any
    cached: bool
    device: torch.device
    dims: ParallelDims | None
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    vocab_size: int | None
    sampling: Sampling

    def run(self, prompts: dict[int, Sequence[int]]) -> dict[int, Continuation]:
        """Continue `prompts`, which are keyed by their number. Without prompts this rank only takes
        part in the other ranks' forwards.
        """
        rows = [list(prompt) for prompt in prompts.values()] or [[0]]
        streams = [random.Random(f"{self.sampling.seed} {number}") for number in prompts] or [
            random.Random(0)
        ]
        new: list[list[int]] = [[] for _ in rows]
        ended = [not prompts] * len(rows)
        longest = max(map(len, rows))
        limit = _get_rope_limit(self.model)
        # When the text passes the limit, the frequencies change, and cached keys become invalid.
        stale = limit is not None and longest <= limit < longest + self.max_new_tokens
        tokens_BS = self._padded(rows)
        cache = None
        if self.cached and not stale:
            max_len = max(tokens_BS.shape[1], longest + self.max_new_tokens)
            cache = build_cache(self.model, [len(row) for row in rows], max_len, self.device)
        for _ in range(self.max_new_tokens):
            if cache is not None:
                logits_BV = self.model(tokens_BS, cache=cache)
            else:  # the model is causal: no token sees the padding on its right
                last_B = torch.tensor([len(row) - 1 for row in rows], device=self.device)
                logits_BSV = self.model(tokens_BS)
                logits_BV = logits_BSV[torch.arange(len(rows), device=self.device), last_B]
            chosen = self._choose(logits_BV, streams).tolist()  # synchronization point
            for row, token in enumerate(chosen):
                rows[row].append(token)
                ended[row] = ended[row] or token in self.eos_token_ids
                if not ended[row]:
                    new[row].append(token)
            if self._all_ended(ended):
                break
            tokens_BS = self._padded(rows if cache is None else [chosen])
        return {i: Continuation(new[row], ended[row]) for row, i in enumerate(prompts)}

    def _padded(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return (B, S) int64, zeros on the right; S is a multiple of the ranks over which the
        sequence is split.
        """
        pieces = 1 if self.dims is None else self.dims.degrees.ranks_per_sequence
        length = -(-max(map(len, rows)) // pieces) * pieces
        return torch.tensor(
            [[*row, *[0] * (length - len(row))] for row in rows], device=self.device
        )

    def _choose(self, logits_BV: torch.Tensor, streams: Sequence[random.Random]) -> torch.Tensor:
        chosen_B = choose_tokens(
            logits_BV[:, : self.vocab_size],
            torch.tensor([stream.random() for stream in streams], dtype=torch.float64),
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
        )
        # All tp and cp ranks should have the same logits. If a kernel rounded differently on one of
        # them, their texts would diverge, and then the shapes in their collectives.
        if self.dims is not None:
            tp_group = self.dims.tp_mesh.get_group() if self.dims.degrees.tp > 1 else None
            for group in filter(None, (tp_group, self.dims.cp_group)):
                dist.broadcast(chosen_B, group=group, group_src=0)
        return chosen_B

    def _all_ended(self, ended: Sequence[bool]) -> bool:
        """Return True, on all ranks, if all rows have ended on all ranks."""
        if self.dims is None:
            return all(ended)
        going = torch.tensor([not all(ended)], dtype=torch.int32, device=self.device)
        dist.all_reduce(going)
        return not bool(going.item())


def choose_tokens(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Choose one int64 token per row: the most likely token at temperature 0, otherwise a draw by
    inverse cumulative sum.

    The only randomness is `uniform_B`, so the draw of a row depends neither on other rows nor on
    the device.

    Args:
        logits_BV: logits of any float dtype.
        uniform_B: a number in [0, 1) per row; unused at temperature 0.
        top_k: only the k most likely tokens can be drawn; 0: all tokens.
        top_p: after `top_k`, only the most likely tokens that together have this probability can be
            drawn (arXiv:1904.09751).
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    device = logits_BV.device
    if torch.are_deterministic_algorithms_enabled():
        logits_BV = logits_BV.cpu()  # torch has no deterministic cumulative sum of floats on CUDA
    # The largest logit is shifted to 0, so that a temperature close to 0 gives -inf for the rest
    # and never inf.
    logits_BV = (logits_BV.float() - logits_BV.amax(dim=-1, keepdim=True).float()) / temperature
    sorted_Bk, ids_Bk = logits_BV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_Bk = sorted_Bk[:, :top_k]
        ids_Bk = ids_Bk[:, :top_k]
    # float64, because in float32 the sum over a vocabulary of 150,000 has an error of 1e-4, which
    # would change the draws of unlikely tokens.
    probs_Bk = sorted_Bk.double().softmax(dim=-1)
    cumulative_Bk = probs_Bk.cumsum(dim=-1)
    # including the token at which the sum crosses top_p
    kept_B1 = (cumulative_Bk - probs_Bk < top_p).sum(dim=-1, keepdim=True)
    mass_B1 = cumulative_Bk.gather(1, kept_B1 - 1)
    target_B1 = uniform_B.to(mass_B1).unsqueeze(1) * mass_B1
    index_B1 = torch.minimum((cumulative_Bk <= target_B1).sum(dim=-1, keepdim=True), kept_B1 - 1)
    return ids_Bk.gather(1, index_B1).squeeze(1).to(device)


def get_eos_token_ids(tokenizer: Any, folder: Path | None = None) -> list[int]:
    """Return the tokens that end a text: the tokenizer's end token, and the end tokens of the model
    in `folder`, if it is given.

    generation_config.json overrides config.json, as in transformers; both may name one id or
    several.

    Raises:
        CheckpointError: one of these files cannot be read, or its value is not an id or a list of
            ids.
    """
    found = {tokenizer.eos_token_id} - {None}
    if folder is None:
        return sorted(found)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        if (named := read_json(path, f"generate: {folder}").get("eos_token_id")) is not None:
            ids = named if isinstance(named, list) else [named]
            if not all(type(token) is int for token in ids):
                raise CheckpointError(
                    f"generate: {path}: eos_token_id = {named!r} is neither a token id nor a list "
                    "of them."
                )
            return sorted(found | set(ids))
    return sorted(found)


def get_end_of_turn_ids(tokenizer: Any, dataset: TrainDataset | None = None) -> list[int]:
    """Return the tokens that end answers of chats: the end tokens of the answers in `dataset`, if
    it knows any.

    If it does not, return the special token that ends an answer in the tokenizer's chat template,
    if there is one. The `eos_token_id` of a base model is often a different token.
    """
    from titanlite.features.sft.chat import get_end_token

    parts = [] if dataset is None else [source.dataset for source in get_sources(dataset)]
    found = {token for part in parts for token in getattr(part, "stop_token_ids", ())}
    # a stream knows only the rows that it has read
    if dataset is None or not found or dataset.num_train_sequences is None:
        found.update(get_end_token(tokenizer))
    return sorted(found)


def build_cache(model: Model, lengths: Sequence[int], max_len: int, device: torch.device) -> Any:
    """Make an empty cache for prompts that grow to at most `max_len` tokens; use the model's own
    cache class if it has one.
    """
    own = model.build_cache(lengths, max_len, device)
    return KVCache(len(model.all_layers()), lengths, max_len, device) if own is None else own


class KVCache:
    """A `Cache` of a whole model for one batch of rows; made by `build_cache`, held by the caller.

    A rank holds the key/value heads that it computes, heads / (cp * tp), for the rows of its
    data-parallel rank, in the dtype of its activations. The first forward allocates all memory:
    layers * B * G * T * (K + V) elements. `lengths_B` is the number of cached tokens of each row,
    and so the position of its next token.
    """

    def __init__(
        self, num_layers: int, lengths: Sequence[int], max_len: int, device: torch.device
    ) -> None:
        self.lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
        self.max_len = max_len
        self.rows_B = torch.arange(len(lengths), device=device)
        # on the host, so that slicing the cache does not wait for the device
        self._longest = max(lengths)
        self._slots_T = torch.arange(max_len, device=device)
        self._has_prompts = False
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    def positions(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if not self._has_prompts:
            return None
        return F.pad(self.lengths_B, (0, tokens.shape[1] - len(self.lengths_B))).unsqueeze(0)

    def newest(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._has_prompts:
            return hidden[self.rows_B, self.lengths_B - 1]
        return hidden[0, : len(self.lengths_B)]

    def visible(self, window: int = 0) -> torch.Tensor:
        """Return (B, slots in use) bool: the slots that the row's new token sees, including its
        own; with a window, only the last slots.
        """
        before_BT = self.lengths_B.unsqueeze(1) - self._slots_T[: self._longest + 1]
        return (before_BT >= 0) & (before_BT < window) if window else before_BT >= 0

    def advance(self) -> None:
        if self._has_prompts:
            self.lengths_B = self.lengths_B + 1
            self._longest += 1
        self._has_prompts = True


class LayerCache:
    """Keys and values of one layer, (B, G, T, K) and (B, G, T, V), or the `state` of a gated delta
    net, which has a constant size. Latent attention stores expanded keys and values.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.state: tuple[torch.Tensor, ...] | None = None

    @property
    def lengths(self) -> torch.Tensor:
        return self._cache.lengths_B

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._keys is None or self._values is None:
            self._keys = self._start(k)
            self._values = self._start(v)
            return attention(q, k, v, mask, scale, sinks)
        cache = self._cache
        count = len(cache.rows_B)
        visible_BT = cache.visible(mask.window)
        self._keys[cache.rows_B, :, cache.lengths_B] = k[0, :count]
        self._values[cache.rows_B, :, cache.lengths_B] = v[0, :count]
        used = visible_BT.shape[1]
        out_BHK = cached_attention(
            q[0, :count],
            self._keys[:, :, :used],
            self._values[:, :, :used],
            visible_BT,
            scale,
            sinks,
        )
        return F.pad(out_BHK, (0, 0, 0, 0, 0, q.shape[1] - count)).unsqueeze(0)

    def _start(self, x_BSGK: torch.Tensor) -> torch.Tensor:
        # Initialized with zeros: slots that a shorter row has not reached get weight 0, and 0 * nan
        # would be nan.
        batch, seq_len, heads, width = x_BSGK.shape
        slots_BGTK = x_BSGK.new_zeros(batch, heads, self._cache.max_len, width)
        slots_BGTK[:, :, :seq_len] = x_BSGK.transpose(1, 2)
        return slots_BGTK


def cached_attention(
    q_BHK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTV: torch.Tensor,
    visible_BT: torch.Tensor,
    scale: float,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of one new query per row over T cached keys. `visible_BT` (bool) is True
    for the keys that the query sees. `sinks_H` are as in `attention`.

    Returns (B, H, V). H must be a multiple of G, as in `attention`. Cached values must be finite,
    even if they are not visible: their weight is 0, and 0 * nan is nan.
    """
    # Heads that share a key/value head are treated as several queries of it, so the cache is not
    # repeated.
    q_BGRK = q_BHK.unflatten(1, (k_BGTK.shape[1], -1))
    if sinks_H is not None:
        scores_BGRT = (q_BGRK @ k_BGTK.mT).float() * scale
        scores_BGRT = scores_BGRT.masked_fill(~visible_BT[:, None, None], float("-inf"))
        sinks_GR1 = sinks_H.float().view(*q_BGRK.shape[1:3], 1)
        sinks_BGR1 = sinks_GR1.expand(len(q_BHK), *sinks_GR1.shape)
        weights_BGRT = torch.cat([scores_BGRT, sinks_BGR1], -1).softmax(-1)[..., :-1]
        return (weights_BGRT.to(v_BGTV.dtype) @ v_BGTV).flatten(1, 2)
    out_BGRV = F.scaled_dot_product_attention(
        q_BGRK, k_BGTK, v_BGTV, attn_mask=visible_BT[:, None, None, :], scale=scale
    )
    return out_BGRV.flatten(1, 2)
