"""Attention of the decoder: with grouped heads, or with latent keys and values (MLA); both end in
`CoreAttention`.

This is single-device code on local tensors. The shapes of the projections determine the number of
heads, because a tensor-parallel rank holds only some of them.

Shapes: B batch, S sequence, D hidden, H query heads, G key/value heads, K width of a query or key
head, V width of a value head, R rotated part of a head, C latent width.
"""

from typing import ClassVar

import torch
from torch import nn

from titanlite.config.model import ModelConfig
from titanlite.materialize.sources import Init, Normal, Source
from titanlite.models.interface import Context, Core, LayerCache, Part
from titanlite.models.layers import Linear, Recomputable, RMSNorm, SplitRMSNorm, project_each
from titanlite.ops import apply_rope, local_tensor, rotate_heads
from titanlite.ops.attention import ATTENTION_OPERATORS, AttentionMask, attention
from titanlite.ops.recompute import save_results

CosSin = tuple[torch.Tensor, torch.Tensor]
_LATENT_EPS = 1e-6
"""Epsilon of the norms on latents in every model: DeepSeek's code and transformers use the default
of their norm, not the model's epsilon.
"""


class CoreAttention(Core):
    """Core attention, without weights.

    Attributes:
        is_saved: a recomputation of the layer reads the forward's result.
    """

    is_saved = False

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        q_BSHK: torch.Tensor,
        k_BSGK: torch.Tensor,
        v_BSGV: torch.Tensor,
        mask: AttentionMask,
        cache: LayerCache | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attend = attention if cache is None else cache.attend
        operands = q_BSHK, k_BSGK, v_BSGV, mask, self.scale, sinks_H
        if self.is_saved:
            # torch declares no type for a function that is not compiled
            return save_results(ATTENTION_OPERATORS, attend, *operands)  # pyright: ignore[reportCallIssue]
        return attend(*operands)


class SelfAttention(Recomputable, Part):
    """A part whose tokens interact, followed by a projection of the result.

    Attributes:
        window: number of tokens of a document that a token sees, including itself; 0: all.
    """

    o_proj: Linear
    window: int = 0

    @property
    def output(self) -> Linear:
        return self.o_proj

    def forward(
        self, x_BSD: torch.Tensor, context: Context, cache: LayerCache | None = None
    ) -> torch.Tensor:
        return self.output(self.run(self.attend, x_BSD, context, cache))

    def attend(
        self, x_BSD: torch.Tensor, context: Context, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Return the concatenated outputs of this rank's heads, (B, S, heads * width), before the
        output projection.
        """
        raise NotImplementedError


class Attention(SelfAttention):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions. Optional are RMSNorm on
    queries and keys, a gate on the output of each head, and sinks.
    """

    # The norms are split only if they cover all heads.
    splits: ClassVar = dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"), 0) | {
        "o_proj": 1
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_gated = config.attention_gate
        hidden = config.hidden_size
        bias = config.attention_bias
        std = config.initializer_range
        queries = (1 + self.is_gated) * config.num_heads  # a gate of each head follows its query
        self.q_proj = Linear(hidden, queries * config.head_dim, bias=bias, std=std)
        if self.is_gated:
            self.q_proj.stacked_matrices = {"weight": (config.head_dim, config.head_dim)}
        self.k_proj = Linear(hidden, config.num_kv_heads * config.head_dim, bias=bias, std=std)
        self.v_proj = Linear(hidden, config.num_kv_heads * config.head_dim, bias=bias, std=std)
        o_bias = bias and config.attention_output_bias
        self.o_proj = Linear(config.num_heads * config.head_dim, hidden, bias=o_bias, std=std)
        self.q_norm = _head_norm(config, config.num_heads)
        self.k_norm = _head_norm(config, config.num_kv_heads)
        self.core_attention = CoreAttention(config.head_dim**-0.5)
        # Every rank holds the sinks of all heads, and reads only the part for its heads.
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.attention_sinks else None
        self.std = std

    def declare_sources(self) -> dict[str, Source]:
        return {} if self.sinks is None else {"sinks": Init(Normal(std=self.std))}

    def attend(
        self, x_BSD: torch.Tensor, context: Context, cache: LayerCache | None = None
    ) -> torch.Tensor:
        q_BSH, k_BSG, v_BSG = project_each(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        gate_BSHK = None
        if isinstance(self.q_norm, SplitRMSNorm) and self.k_norm is not None:
            q_BSH, k_BSG = self.q_norm(q_BSH), self.k_norm(k_BSG)
        q_BSHK, k_BSGK, v_BSGK = (
            x.unflatten(-1, (-1, self.head_dim)) for x in (q_BSH, k_BSG, v_BSG)
        )
        if self.is_gated:
            q_BSHK, gate_BSHK = q_BSHK.unflatten(2, (-1, 2)).unbind(3)
        cos_sin, mask = context.by_window[self.window]
        q_BSHK, k_BSGK = self._rotate(q_BSHK, k_BSGK, cos_sin)
        sinks_H = None
        if self.sinks is not None:
            part, parts = self.core_attention.share
            sinks_H = local_tensor(self.sinks).unflatten(0, (parts, -1))[part]
        out_BSHK = self.core_attention(q_BSHK, k_BSGK, v_BSGK, mask, cache, sinks_H)
        if gate_BSHK is not None:
            out_BSHK = out_BSHK * gate_BSHK.sigmoid()
        return out_BSHK.flatten(2)

    def _rotate(
        self, q_BSHK: torch.Tensor, k_BSGK: torch.Tensor, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the norms of each query and key head, if there are any, and rotary positions."""
        q_norm = self.q_norm
        k_norm = self.k_norm
        if q_norm is None or k_norm is None or isinstance(q_norm, SplitRMSNorm):
            return rotate_heads(q_BSHK, k_BSGK, cos_sin)
        if q_norm._forward_hooks:  # somebody looks at the modules' results
            return rotate_heads(q_norm(q_BSHK), k_norm(k_BSGK), cos_sin)
        weights = local_tensor(q_norm.weight), local_tensor(k_norm.weight)
        return rotate_heads(q_BSHK, k_BSGK, cos_sin, weights, q_norm.eps, q_norm.offset)


def _head_norm(config: ModelConfig, num_heads: int) -> RMSNorm | None:
    """Return the norm of each head, or the norm of all heads together, if the family has one."""
    if not config.qk_norm:
        return None
    if config.qk_norm_of_all_heads:
        return SplitRMSNorm(num_heads * config.head_dim, config.rms_norm_eps)
    return RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)


class WindowedAttention(Attention):
    """`Attention` with a sliding window."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.window = config.sliding_window


class LatentAttention(SelfAttention):
    """Multi-head latent attention of DeepSeek-V2 and V3 (arXiv:2405.04434, section 2.1).

    Keys and values of all heads are projected from one narrow latent; with `q_lora_rank`, queries
    are projected from a second latent. Rotary positions apply to a part of each head; this part of
    the keys is the same for all heads. In training the latents are expanded, and each of the H
    heads has its own key and value.
    """

    # Every rank computes the latents, and its own heads from them.
    splits: ClassVar = {"q_proj": 0, "q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        bias = config.attention_bias
        std = config.initializer_range
        self.plain_dim = config.qk_nope_head_dim
        self.rotary_dim = config.head_dim
        self.v_head_dim = config.v_head_dim
        self.latent_dim = config.kv_lora_rank
        self.interleaved = config.rope_interleave
        width = config.num_heads * config.qk_head_dim
        self.q_proj = None if config.q_lora_rank else Linear(hidden, width, std=std)
        self.q_a_proj = (
            Linear(hidden, config.q_lora_rank, bias=bias, std=std) if config.q_lora_rank else None
        )
        self.q_a_layernorm = (
            RMSNorm(config.q_lora_rank, _LATENT_EPS) if config.q_lora_rank else None
        )
        self.q_b_proj = Linear(config.q_lora_rank, width, std=std) if config.q_lora_rank else None
        self.kv_a_proj_with_mqa = Linear(
            hidden, config.kv_lora_rank + self.rotary_dim, bias=bias, std=std
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, _LATENT_EPS)
        expanded = config.num_heads * (self.plain_dim + self.v_head_dim)
        self.kv_b_proj = Linear(config.kv_lora_rank, expanded, std=std)
        self.o_proj = Linear(config.num_heads * self.v_head_dim, hidden, bias=bias, std=std)
        self.core_attention = CoreAttention(config.softmax_scale)

    def attend(
        self, x_BSD: torch.Tensor, context: Context, cache: LayerCache | None = None
    ) -> torch.Tensor:
        q_BSHK = self._queries(x_BSD).unflatten(-1, (-1, self.plain_dim + self.rotary_dim))
        q_plain, q_rotary = q_BSHK.split([self.plain_dim, self.rotary_dim], dim=-1)
        cos_sin, mask = context.by_window[self.window]
        q_BSHK = torch.cat([q_plain, self._rotate(q_rotary, cos_sin)], dim=-1)

        latent_BSC, k_rotary_BSR = self.kv_a_proj_with_mqa(x_BSD).split(
            [self.latent_dim, self.rotary_dim], dim=-1
        )
        kv_BSH = self.kv_b_proj(self.kv_a_layernorm(latent_BSC)).unflatten(
            -1, (-1, self.plain_dim + self.v_head_dim)
        )
        k_plain, v_BSHV = kv_BSH.split([self.plain_dim, self.v_head_dim], dim=-1)
        k_rotary_BS1R = self._rotate(k_rotary_BSR.unsqueeze(2), cos_sin)
        k_BSHK = torch.cat([k_plain, k_rotary_BS1R.expand(-1, -1, k_plain.shape[2], -1)], dim=-1)
        out_BSHV = self.core_attention(q_BSHK, k_BSHK, v_BSHV, mask, cache)
        return out_BSHV.flatten(2)

    def _queries(self, x_BSD: torch.Tensor) -> torch.Tensor:
        if self.q_proj is not None:
            return self.q_proj(x_BSD)
        assert (
            self.q_a_proj is not None
            and self.q_a_layernorm is not None
            and self.q_b_proj is not None
        )
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))

    def _rotate(self, x_BSHR: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """Apply rotary positions; interleaved pairs are first reordered as `apply_rope` expects."""
        if self.interleaved:
            x_BSHR = x_BSHR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rope(x_BSHR, *cos_sin)
