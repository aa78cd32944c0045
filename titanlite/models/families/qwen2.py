"""Qwen2 and Qwen2.5 (arXiv:2412.15115): biases on q, k and v, no norm on queries and keys."""

from dataclasses import replace

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, Family, preset

_QWEN2 = ModelConfig(
    family="qwen2", max_position_embeddings=131072, qk_norm=False, attention_bias=True, attention_output_bias=False
)
_SMALL = replace(_QWEN2, tie_word_embeddings=True)

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    keys={ours: theirs for ours, theirs in COMMON_KEYS.items() if ours != "attention_bias"},
    fixed={"qk_norm": False, "attention_bias": True, "attention_output_bias": False},
    required={"use_sliding_window": (False,)},
    presets={
        "debug": replace(_QWEN2, **DEBUG_SIZES),
        "2.5-0.5B": preset(_SMALL, 896, 24, 14, 2, 4864, head_dim=64, max_position_embeddings=32768),
        "2.5-1.5B": preset(_SMALL, 1536, 28, 12, 2, 8960),
        "2.5-7B": preset(_QWEN2, 3584, 28, 28, 4, 18944, vocab_size=152064),
    },
)
