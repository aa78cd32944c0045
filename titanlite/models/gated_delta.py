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
        self.weight, self.std = nn.Parameter(torch.empty(channels, 1, width)), std

    def declare_sources(self) -> dict[str, Source]:
        return {"weight": Init(Normal(std=self.std))}


class CoreDelta(Core):
    """Convolution, gates and delta rule of some heads. The weights are arguments."""

    def __init__(self, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.widths = key_dim, value_dim

    def forward(
        self,
        mixed_BShJ: torch.Tensor,
        gates_BSh2R: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        documents_BS: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """Return the heads' outputs (B, S, h, R V)."""
        taps_hJW, A_log_hR, dt_bias_hR = weights
        b_BShR, a_BShR = gates_BSh2R.chunk(2, dim=-1)
        g_BSg = log_decay(a_BShR.flatten(2), A_log_hR.flatten(), dt_bias_hR.flatten())
        beta_BSg = b_BShR.flatten(2).to(g_BSg.dtype).sigmoid()
        if cache is not None:
            out_BSgV = self._go_on(mixed_BShJ, taps_hJW, g_BSg, beta_BSg, cache)
        else:
            heads = delta_inputs(mixed_BShJ, taps_hJW, documents_BS, *self.widths)
            out_BSgV, _ = gated_delta_rule(*heads, g_BSg, beta_BSg, documents_BS)
        return out_BSgV.unflatten(2, (-1, b_BShR.shape[-1])).flatten(3)

    def _go_on(
        self,
        mixed_BShJ: torch.Tensor,
        taps_hJW: torch.Tensor,
        g_BSg: torch.Tensor,
        beta_BSg: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Return the outputs of prompts, or of one new token of each row. The cache holds the last
        inputs of the convolution (B, W - 1, C) and the states (B, g, K, V).
        """
        lengths_B, mixed_BSC, taps_CW = cache.lengths, mixed_BShJ.flatten(2), taps_hJW.flatten(0, 1)
        if cache.state is None:
            before_BLC = mixed_BSC.new_zeros(len(lengths_B), taps_CW.shape[1] - 1, len(taps_CW))
            slots_S = torch.arange(mixed_BSC.shape[1], device=mixed_BSC.device)
            inside_BS1 = (slots_S < lengths_B[:, None])[..., None]
            heads = delta_inputs(mixed_BShJ, taps_hJW, None, *self.widths)
            # Padding does not change a state.
            out, state = gated_delta_rule(*heads, g_BSg * inside_BS1, beta_BSg * inside_BS1)
            cache.state = last_inputs(mixed_BSC, before_BLC, lengths_B), state
            return out
        (before_BLC, state), count = cache.state, len(lengths_B)
        new_B1C = mixed_BSC[0, :count].unsqueeze(1)
        y_B1C = causal_conv(new_B1C, taps_CW, None, before_BLC)
        heads = split_heads(y_B1C.unflatten(2, taps_hJW.shape[:2]), *self.widths)
        q_BhK, k_BhK, v_BgV = (x.squeeze(1) for x in heads)
        gates = g_BSg[0, :count], beta_BSg[0, :count]
        out, state = gated_delta_step(q_BhK, k_BhK, v_BgV, *gates, state)
        cache.state = torch.cat([before_BLC, new_B1C], 1)[:, 1:], state
        return F.pad(out, (0, 0, 0, 0, 0, mixed_BSC.shape[1] - count)).unsqueeze(0)


class GatedDeltaNet(SelfAttention):
    """Qwen3-Next's gated delta net. Rows of its two input projections are grouped by key head:
    [query, key, values, output gates] and [b, a].
    """

    in_proj_qkvz: Linear
    in_proj_ba: Linear
    splits: ClassVar = {"in_proj_qkvz": 0, "in_proj_ba": 0, "out_proj": 1}
    float32: ClassVar = ("A_log", "dt_bias")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, std = config.hidden_size, config.initializer_range
        heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        self.repeats, self.value_dim = value_heads // heads, value
        self.widths = key, key, self.repeats * value
        for name, widths in self._list_projections().items():
            linear = Linear(hidden, heads * sum(widths), std=std)
            linear.stacked_matrices = {"weight": widths}
            setattr(self, name, linear)
        self.conv1d = Convolution(heads * sum(self.widths), config.linear_conv_kernel_dim, std)
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(value_heads, dtype=torch.float32)) for _ in range(2)
        )
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
        mixed_BSHJ, z_BSH, gates_BSH2R = self._project(x_BSD)
        documents_BS = context.documents_BS
        weights = self._weights_of_share()
        out_BSH = self.core(mixed_BSHJ, gates_BSH2R, weights, documents_BS, cache)
        out_BSHRV, z_BSHRV = (x.unflatten(-1, (-1, self.value_dim)) for x in (out_BSH, z_BSH))
        weight_V = local_tensor(self.norm.weight)
        return gated_rms_norm(out_BSHRV, z_BSHRV, weight_V, self.norm.eps).flatten(2)

    def _list_projections(self) -> dict[str, tuple[int, ...]]:
        """Return the widths that each input projection has of every key head."""
        return {
            "in_proj_qkvz": (*self.widths, self.widths[2]),
            "in_proj_ba": (self.repeats, self.repeats),
        }

    def _project(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the inputs of the convolution (B, S, h, J), the output gates (B, S, h, R V) and
        the gates [b, a] (B, S, h, 2 R).
        """
        values = self.widths[2]
        projected = self.in_proj_qkvz(x_BSD).unflatten(-1, (-1, sum(self.widths) + values))
        mixed_BSHJ, z_BSH = projected.split([sum(self.widths), values], dim=-1)
        return mixed_BSHJ, z_BSH, self.in_proj_ba(x_BSD).unflatten(-1, (-1, 2 * self.repeats))

    def _weights_of_share(self) -> tuple[torch.Tensor, ...]:
        """Return taps (h, J, W), A_log and dt_bias (h, R) of this rank's heads in the core."""
        A_log_HR, dt_bias_HR = (
            local_tensor(param).unflatten(0, (-1, self.repeats))
            for param in (self.A_log, self.dt_bias)
        )
        heads = len(A_log_HR)
        taps_CW = local_tensor(self.conv1d.weight).squeeze(1)
        by_kind = taps_CW.split([heads * width for width in self.widths])
        taps_HJW = torch.cat([taps.unflatten(0, (heads, -1)) for taps in by_kind], dim=1)
        part, parts = self.core.share
        mine = slice(part * heads // parts, (part + 1) * heads // parts)
        return taps_HJW[mine], A_log_HR[mine], dt_bias_HR[mine]


class SeparateGatedDeltaNet(GatedDeltaNet):
    """Qwen3.5's gated delta net, with separate projections for [query, key, values], output gates,
    b and a. Rows of the first are grouped by key head in memory, and by kind on disk
    (`Family.row_orders`).
    """

    in_proj_qkv: Linear
    in_proj_z: Linear
    in_proj_b: Linear
    in_proj_a: Linear
    splits: ClassVar = dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), 0) | {
        "out_proj": 1
    }

    def _list_projections(self) -> dict[str, tuple[int, ...]]:
        return {
            "in_proj_qkv": self.widths,
            "in_proj_z": self.widths[2:],
            "in_proj_b": (self.repeats,),
            "in_proj_a": (self.repeats,),
        }

    def _project(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        projected = (
            (self.in_proj_qkv, sum(self.widths)),
            (self.in_proj_z, self.widths[2]),
            (self.in_proj_b, self.repeats),
            (self.in_proj_a, self.repeats),
        )
        mixed_BSHJ, z_BSH, *gates = (
            project(x_BSD).unflatten(-1, (-1, width)) for project, width in projected
        )
        return mixed_BSHJ, z_BSH, torch.cat(gates, dim=-1)
