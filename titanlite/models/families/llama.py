"""Llama 3 (arXiv:2407.21783)."""

from dataclasses import replace

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, Family, preset
from titanlite.models.families.keys import COMMON_DECLARED, HEADS, SHARE, Key

_LLAMA3 = ModelConfig(
    family="llama",
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", factor=8.0),
    qk_norm=False,
)
_SMALL = replace(_LLAMA3, head_dim=64, rope_scaling=RopeScaling("llama3", factor=32.0), tie_word_embeddings=True)

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys=COMMON_KEYS,
    fixed={"qk_norm": False},
    declared={
        **COMMON_DECLARED,
        "num_key_value_heads": Key(HEADS, HEADS),
        "head_dim": Key(SHARE, SHARE),
    },
    rules=(
        (
            lambda config: config.hidden_size % config.num_heads == 0,
            "hidden_size ({hidden_size}) is no multiple of num_heads ({num_heads}), as transformers demands.",
        ),
    ),
    required={"mlp_bias": (False,)},
    presets={
        "debug": replace(
            _LLAMA3,
            **DEBUG_SIZES,
            rope_scaling=RopeScaling("llama3", factor=8.0, original_max_position_embeddings=512),
        ),
        "3.2-1B": preset(_SMALL, 2048, 16, 32, 8, 8192),
        "3.1-8B": preset(_LLAMA3, 4096, 32, 32, 8, 14336),
        "3.1-70B": preset(_LLAMA3, 8192, 80, 64, 8, 28672),
    },
)
