"""Qwen3-Next (Qwen blog, September 2025): of every four layers, three have a gated delta net, and
the last one has attention with an output gate. All have experts, and a shared expert with a gate.

Norms are zero-centred: their weights begin at 0, and 1 is added. Layers for multi-token prediction
(`mtp.*`) are not trained; checkpoints contain them as they were loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_EXPERTS, MOE_KEYS, Family, preset
from titanlite.models.families.parts import (
    ATTENTION,
    FEED_FORWARD,
    GATED_DELTA,
    MOE,
    Block,
    Layer,
    Part,
)

_SAME_NAME = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
DELTA_KEYS = {
    "full_attention_interval": "layer_types",
    **{name: name for name in _SAME_NAME},
}


SHARED_EXPERT_KEYS = {name: name for name in ("num_experts", "shared_expert_intermediate_size")}


def mixed_layer(delta: Part, config: ModelConfig, index: int) -> Layer:
    """Return attention in the last layer of each interval, `delta` in the others; and experts, if
    there are any.
    """
    is_full = (index + 1) % config.full_attention_interval == 0
    mixer = ("self_attn", ATTENTION) if is_full else ("linear_attn", delta)
    inner = MOE if config.num_experts else FEED_FORWARD
    return Block("input_layernorm", *mixer), Block("post_attention_layernorm", "mlp", inner)


NEXT = ModelConfig(
    family="qwen3_next",
    max_position_embeddings=262144,
    rope_theta=10000000.0,
    head_dim=256,
    partial_rotary_factor=0.25,
    attention_gate=True,
    norm_offset=1.0,
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    shared_expert_intermediate_size=512,
)

# transformers' classes do not read it: they always have the gate.
HAS_GATE: Mapping[str, tuple[Any, ...]] = {"attn_output_gate": (True,)}
HAS_INTERVAL = (
    lambda config: config.full_attention_interval > 0,
    "full_attention_interval ({full_attention_interval}) is not positive.",
)
HAS_EXPERTS = (
    lambda config: config.num_experts > 0,
    "num_experts ({num_experts}) is not positive; only layers with experts are supported.",
)
DEBUG_DELTA: Mapping[str, Any] = {
    # The first results of a document are small: a norm with a smaller epsilon would amplify
    # rounding.
    "rms_norm_eps": 1e-3,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    keys={
        **COMMON_KEYS,
        **MOE_KEYS,
        **SHARED_EXPERT_KEYS,
        **DELTA_KEYS,
    },
    required={**HAS_GATE, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    rules=(HAS_INTERVAL, HAS_EXPERTS),
    layer=partial(mixed_layer, GATED_DELTA),
    presets={
        "debug": replace(
            NEXT,
            **DEBUG_EXPERTS,
            **DEBUG_DELTA,
            shared_expert_intermediate_size=48,
        ),
        "80B-A3B": preset(
            NEXT, (2048, 48, 16, 2, 5120), num_experts=512, top_k=10, moe_intermediate_size=512
        ),
    },
)
