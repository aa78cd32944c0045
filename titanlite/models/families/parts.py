"""The composition of a decoder layer, as a family declares it: blocks, each of a norm and a part.

This file needs no torch: the preflight check and the plan read sizes from it. A part's module is
imported when a model is built. A family in a separate file may declare its own parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from titanlite.config.model import ModelConfig
from titanlite.config.parallelism import PartSizes


@dataclass(frozen=True)
class Part:
    """A kind of part: its module, which is called with a `ModelConfig`, and its sizes."""

    module: str  # "package.module:Class" of a `models.interface.Part`
    sizes: Callable[[ModelConfig], PartSizes]

    def build(self, config: ModelConfig) -> Any:
        path, _, name = self.module.partition(":")
        return getattr(import_module(path), name)(config)


@dataclass(frozen=True)
class Block:
    """One residual block, x + part(norm(x)), or x + norm(part(x)); the names are those in
    checkpoints.
    """

    norm: str
    name: str
    part: Part
    is_norm_last: bool = False


Layer = tuple[Block, ...]  # equal layers are of the same kind


def _attention_sizes(config: ModelConfig, *, is_windowed: bool = False) -> PartSizes:
    width = config.num_heads * (config.qk_head_dim + config.value_head_dim)

    def core_flops(seq_len: int) -> int:
        window = min(seq_len, config.sliding_window) if is_windowed else seq_len
        # 2 matmuls, 2 FLOPs per multiplication, and half of the pairs, because attention is causal;
        # keys before the window are excluded too
        return width * window * (2 * seq_len - window) // seq_len

    return PartSizes(
        splits={"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads},
        heads={"attention heads": config.num_heads, "key/value heads": config.num_kv_heads},
        inputs={"num_heads * head width": config.num_heads * config.value_head_dim},
        core_flops=core_flops,
        # results in bfloat16, as wide as queries in varlen attention, and a float32 for each head
        attention_bytes=config.num_heads * (2 * config.qk_head_dim + 4),
    )


def _gated_delta_sizes(config: ModelConfig) -> PartSizes:
    keys = config.linear_num_key_heads
    values = config.linear_num_value_heads
    width = values * config.linear_value_head_dim
    flops = 6 * config.linear_key_head_dim * width  # the matmuls k S, k v and q S
    return PartSizes(
        splits={"linear_num_key_heads": keys},
        heads={"key heads of the gated delta net": keys},
        inputs={"linear_num_value_heads * linear_value_head_dim": width},
        core_flops=lambda _seq_len: flops,
    )


def _width_sizes(name: str, width: int) -> PartSizes:
    return PartSizes(splits={name: width}, inputs={name: width})


def _moe_sizes(config: ModelConfig) -> PartSizes:
    if config.shared_expert_intermediate_size:
        name = "shared_expert_intermediate_size"
        return _width_sizes(name, config.shared_expert_intermediate_size)
    if not config.num_shared_experts:
        return PartSizes()
    width = config.num_shared_experts * config.moe_intermediate_size
    return _width_sizes("num_shared_experts * moe_intermediate_size", width)


ATTENTION = Part("titanlite.models.attention:Attention", _attention_sizes)
WINDOWED_ATTENTION = Part(
    "titanlite.models.attention:WindowedAttention", partial(_attention_sizes, is_windowed=True)
)
LATENT_ATTENTION = Part("titanlite.models.attention:LatentAttention", _attention_sizes)
GATED_DELTA = Part("titanlite.models.gated_delta:GatedDeltaNet", _gated_delta_sizes)
SEPARATE_GATED_DELTA = Part(
    "titanlite.models.gated_delta:SeparateGatedDeltaNet", _gated_delta_sizes
)
FEED_FORWARD = Part(
    "titanlite.models.layers:FeedForward",
    lambda config: _width_sizes("intermediate_size", config.intermediate_size),
)
MOE = Part("titanlite.models.moe:MoE", _moe_sizes)


def standard_layer(config: ModelConfig, index: int) -> Layer:
    """Return attention (latent, or grouped with or without a window), and then a feed-forward in
    the leading dense layers, or else experts.
    """
    is_moe = config.num_experts > 0 and index >= config.num_dense_layers
    attention = WINDOWED_ATTENTION if config.has_window(index) else ATTENTION
    return (
        Block(
            "input_layernorm", "self_attn", LATENT_ATTENTION if config.kv_lora_rank else attention
        ),
        Block("post_attention_layernorm", "mlp", MOE if is_moe else FEED_FORWARD),
    )
