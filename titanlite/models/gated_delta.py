"""Gated delta net (arXiv:2412.06464) of Qwen3-Next and Qwen3.5: a state per value head replaces
keys and values.

This is single-device code on local tensors, like attention. Inputs of the convolution, gates and
states belong to heads, so tensor and context parallelism give each rank some of the heads. The
small parameters `conv1d`, `A_log` and `dt_bias` are whole on every rank, which reads the part of
its heads.

Shapes: B batch, S sequence, D hidden, H key heads, R value heads per key head, G = H R value heads,
h and g key and value heads of a rank, K width of a key, V width of a value, J = 2 K + R V inputs of
the convolution per key head, W taps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from titanlite.config.model import ModelConfig
from titanlite.materialize.sources import Init, Normal, Ones, Recipe, Source
from titanlite.models.attention import SelfAttention
from titanlite.models.interface import Context, Core, LayerCache
from titanlite.models.layers import Linear, RMSNorm
from titanlite.ops import local_tensor
from titanlite.ops.causal_conv import causal_conv, last_inputs
from titanlite.ops.delta_inputs import delta_inputs, split_heads
from titanlite.ops.elementwise import gated_rms_norm
from titanlite.ops.gated_delta import gated_delta_rule, gated_delta_step, log_decay


@dataclass(frozen=True, kw_only=True)
class LogUniform(Recipe):
    """Logarithm of a uniform draw on [low, high)."""

    low: float
    high: float

    def tile(self, generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        return np.log(generator.uniform(self.low, self.high, (rows, cols))).astype(np.float32)


class Convolution(nn.Module):
    """Taps (channels, 1, W) of a causal convolution of each channel: first the channels of all
    queries, then of all keys, then of all values.
    """

    def __init__(self, channels: int, width: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.std = std

    def declare_sources(self) -> dict[str, Source]:
        return {"weight": Init(Normal(std=self.std))}


class CoreDelta(Core):
    """Convolution, gates and delta rule of this rank's heads. Weights are passed as arguments."""

    def __init__(self, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.widths = key_dim, value_dim

    def forward(
        self,
        mixed_BShJ: torch.Tensor,
        b_BShR: torch.Tensor,
        a_BShR: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        documents_BS: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """Return the heads' outputs (B, S, h, R V)."""
        taps_hJW, A_log_g, dt_bias_g = weights
        g_BSg = log_decay(a_BShR.flatten(2), A_log_g, dt_bias_g)
        beta_BSg = b_BShR.flatten(2).to(g_BSg.dtype).sigmoid()
        if cache is not None and cache.state is not None:
            return self._read_tokens(mixed_BShJ, taps_hJW, g_BSg, beta_BSg, cache)
        if cache is not None:  # prompts; padding does not change a state
            slots_S = torch.arange(mixed_BShJ.shape[1], device=mixed_BShJ.device)
            inside_BS1 = (slots_S < cache.lengths[:, None])[..., None]
            g_BSg, beta_BSg = g_BSg * inside_BS1, beta_BSg * inside_BS1
        heads = delta_inputs(mixed_BShJ, taps_hJW, documents_BS, *self.widths)
        out_BSgV, state = gated_delta_rule(*heads, g_BSg, beta_BSg, documents_BS)
        if cache is not None:
            num_before = taps_hJW.shape[2] - 1
            cache.state = last_inputs(mixed_BShJ.flatten(2), cache.lengths, num_before), state
        return out_BSgV.unflatten(2, (len(taps_hJW), -1)).flatten(3)

    def _read_tokens(
        self,
        mixed_1ShJ: torch.Tensor,
        taps_hJW: torch.Tensor,
        g_1Sg: torch.Tensor,
        beta_1Sg: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Return the outputs of one new token per sequence. The new tokens of all B sequences are
        side by side in a single row, and padding follows them.

        The cache holds the last inputs of the convolution (B, W - 1, C) and the states (B, g, K,
        V).
        """
        assert cache.state is not None
        before_BLC, state = cache.state
        count = len(before_BLC)
        mixed_B1C, g_B1g, beta_B1g = (
            x[0, :count, None] for x in (mixed_1ShJ.flatten(2), g_1Sg, beta_1Sg)
        )
        inputs_BWC = torch.cat([before_BLC, mixed_B1C], 1)
        y_B1C = causal_conv(inputs_BWC, taps_hJW.flatten(0, 1))[:, -1:]
        heads = split_heads(y_B1C.unflatten(2, taps_hJW.shape[:2]), *self.widths)
        out_B1gV, state = gated_delta_step(*heads, g_B1g, beta_B1g, state)
        cache.state = inputs_BWC[:, 1:], state
        out_1BhH = out_B1gV.unflatten(2, (len(taps_hJW), -1)).flatten(3).transpose(0, 1)
        return F.pad(out_1BhH, (0, 0, 0, 0, 0, mixed_1ShJ.shape[1] - count))


class GatedDeltaNet(SelfAttention):
    """Qwen3-Next's gated delta net. Rows of its two input projections are grouped by key head."""

    # Rows of each input projection for every key head. All projections together have: queries, keys
    # and values, then output gates, b, and a.
    projections: ClassVar[Mapping[str, Sequence[str]]] = {
        "in_proj_qkvz": ("qkv", "z"),
        "in_proj_ba": ("b", "a"),
    }
    splits: ClassVar = dict.fromkeys(projections, 0) | {"out_proj": 1}
    float32: ClassVar = ("A_log", "dt_bias")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        std = config.initializer_range
        heads = config.linear_num_key_heads
        value_heads = config.linear_num_value_heads
        key = config.linear_key_head_dim
        value = config.linear_value_head_dim
        repeats = value_heads // heads
        self.value_dim = value
        values = repeats * value
        self.widths = {"qkv": (key, key, values), "z": (values,), "b": (repeats,), "a": (repeats,)}
        for name, kinds in self.projections.items():
            widths = sum((self.widths[kind] for kind in kinds), ())
            linear = Linear(hidden, heads * sum(widths), std=std)
            linear.stacked_matrices = {"weight": widths}
            setattr(self, name, linear)
        channels = heads * sum(self.widths["qkv"])
        self.conv1d = Convolution(channels, config.linear_conv_kernel_dim, std)
        self.A_log = nn.Parameter(torch.empty(value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(value_heads, dtype=torch.float32))
        self.norm = RMSNorm(value, config.rms_norm_eps)
        self.out_proj = Linear(value_heads * value, hidden, std=std)
        self.core = CoreDelta(key, value)

    @property
    def output(self) -> Linear:
        return self.out_proj

    def declare_sources(self) -> dict[str, Source]:
        return {
            "A_log": Init(LogUniform(low=0.01, high=16.0), dtype=torch.float32),
            "dt_bias": Init(Ones(), dtype=torch.float32),
        }

    def attend(
        self, x_BSD: torch.Tensor, context: Context, cache: LayerCache | None = None
    ) -> torch.Tensor:
        mixed_BSHJ, z_BSH, b_BSHR, a_BSHR = self._project(x_BSD)
        weights = self._weights_of_share()
        out_BSH = self.core(mixed_BSHJ, b_BSHR, a_BSHR, weights, context.documents_BS, cache)
        out_BSHRV, z_BSHRV = (x.unflatten(-1, (-1, self.value_dim)) for x in (out_BSH, z_BSH))
        weight_V = local_tensor(self.norm.weight)
        return gated_rms_norm(out_BSHRV, z_BSHRV, weight_V, self.norm.eps).flatten(2)

    def _project(self, x_BSD: torch.Tensor) -> list[torch.Tensor]:
        """Return the inputs of the convolution (B, S, h, J), the output gates (B, S, h, R V), b and
        a (B, S, h, R).
        """
        found: list[torch.Tensor] = []
        for name, kinds in self.projections.items():
            widths = [sum(self.widths[kind]) for kind in kinds]
            projected = getattr(self, name)(x_BSD).unflatten(-1, (-1, sum(widths)))
            found += projected.split(widths, dim=-1)
        return found

    def _weights_of_share(self) -> tuple[torch.Tensor, ...]:
        """Return taps (h, J, W), A_log and dt_bias (g) of this rank's heads in the core."""
        part, parts = self.core.share
        taps_CW = local_tensor(self.conv1d.weight).squeeze(1)
        heads = len(taps_CW) // sum(self.widths["qkv"])
        by_kind = taps_CW.split([heads * width for width in self.widths["qkv"]])
        taps_HJW = torch.cat([taps.unflatten(0, (heads, -1)) for taps in by_kind], dim=1)
        whole = (taps_HJW, local_tensor(self.A_log), local_tensor(self.dt_bias))
        return tuple(x.unflatten(0, (parts, -1))[part] for x in whole)


class SeparateGatedDeltaNet(GatedDeltaNet):
    """Qwen3.5's gated delta net, with more input projections. Rows of `in_proj_qkv` are grouped by
    key head in memory, and by kind on disk (`Family.row_orders`).
    """

    projections: ClassVar = {
        "in_proj_qkv": ("qkv",),
        "in_proj_z": ("z",),
        "in_proj_b": ("b",),
        "in_proj_a": ("a",),
    }
    splits: ClassVar = dict.fromkeys(projections, 0) | {"out_proj": 1}
