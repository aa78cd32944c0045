"""Qwen2 and Qwen2.5 (arXiv:2412.15115): biases on q, k and v, no norm on queries and keys."""

from dataclasses import replace

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, Family
from titanlite.models.families.keys import COMMON_DECLARED, WINDOW_DECLARED

_QWEN2 = ModelConfig(family="qwen2", qk_norm=False, attention_bias=True, attention_output_bias=False)


def _qwen2(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    *,
    vocab: int = 152064,
    context: int = 131072,
    tied: bool = False,
) -> ModelConfig:
    return replace(
        _QWEN2,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=inner,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
    )


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    keys={ours: theirs for ours, theirs in COMMON_KEYS.items() if ours != "attention_bias"},
    fixed={"qk_norm": False, "attention_bias": True, "attention_output_bias": False},
    declared={**COMMON_DECLARED, **WINDOW_DECLARED},
    required={"use_sliding_window": (False,)},
    presets={
        "debug": replace(_QWEN2, **DEBUG_SIZES),
        "2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, vocab=151936, context=32768, tied=True),
        "2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, vocab=151936, tied=True),
        "2.5-7B": _qwen2(3584, 28, 28, 4, 18944),
    },
)
