"""Qwen3, dense (arXiv:2505.09388)."""

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, Family
from titanlite.models.families.keys import COMMON_DECLARED, WINDOW_DECLARED, Key


def _qwen3(hidden: int, layers: int, heads: int, inner: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        family="qwen3",
    )


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=COMMON_KEYS,
    fixed={"qk_norm": True},
    declared={**COMMON_DECLARED, **WINDOW_DECLARED, "head_dim": Key("int", 128)},
    required={"use_sliding_window": (False,)},
    presets={
        "debug": ModelConfig(family="qwen3", **DEBUG_SIZES, tie_word_embeddings=True),
        "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
        "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
        "4B": _qwen3(2560, 36, 32, 9728, tied=True),
        "8B": _qwen3(4096, 36, 32, 12288, tied=False),
        "14B": _qwen3(5120, 40, 40, 17408, tied=False),
        "32B": _qwen3(5120, 64, 64, 25600, tied=False),
    },
)
