"""OLMo 3 (arXiv:2512.13961): norms on the outputs of attention and feed-forward, not on their
inputs; one norm over all queries and one over all keys; a window in three of four layers, which
have no YaRN.
"""

from dataclasses import replace

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.models.families.family import (
    COMMON_KEYS,
    DEBUG_SIZES,
    NEEDS_WINDOW,
    Family,
    preset,
)
from titanlite.models.families.parts import (
    ATTENTION,
    FEED_FORWARD,
    WINDOWED_ATTENTION,
    Block,
    Layer,
)

_OLMO3 = ModelConfig(
    family="olmo3",
    vocab_size=100278,
    max_position_embeddings=65536,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        "yarn",
        factor=8.0,
        original_max_position_embeddings=8192,
        attention_factor=1.2079441541679836,
    ),
    sliding_window=4096,
    window_pattern="sssf",
    qk_norm_of_all_heads=True,
    has_scaled_windows=False,
)


def _layer(config: ModelConfig, index: int) -> Layer:
    attention = WINDOWED_ATTENTION if config.has_window(index) else ATTENTION
    return (
        Block("post_attention_layernorm", "self_attn", attention, is_norm_last=True),
        Block("post_feedforward_layernorm", "mlp", FEED_FORWARD, is_norm_last=True),
    )


OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    keys={**COMMON_KEYS, "sliding_window": "sliding_window", "window_pattern": "layer_types"},
    rules=(NEEDS_WINDOW,),
    written={"pad_token_id": None},  # otherwise row 1 of the embedding has no gradient
    layer=_layer,
    presets={
        "debug": replace(
            _OLMO3,
            **DEBUG_SIZES,
            rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=512),
            sliding_window=16,
            window_pattern="ssf",
        ),
        "7B": preset(_OLMO3, (4096, 32, 32, 32, 11008)),
        "32B": preset(_OLMO3, (5120, 64, 40, 8, 27648)),
    },
)
