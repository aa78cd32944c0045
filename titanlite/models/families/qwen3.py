"""Qwen3, dense (arXiv:2505.09388)."""

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, Family, preset
from titanlite.models.families.keys import COMMON_DECLARED, Key

_QWEN3 = ModelConfig(family="qwen3")
_TIED = ModelConfig(family="qwen3", tie_word_embeddings=True)

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=COMMON_KEYS,
    fixed={"qk_norm": True},
    declared={**COMMON_DECLARED, "head_dim": Key(128)},
    required={"use_sliding_window": (False,)},
    presets={
        "debug": ModelConfig(family="qwen3", **DEBUG_SIZES, tie_word_embeddings=True),
        "0.6B": preset(_TIED, 1024, 28, 16, 8, 3072),
        "1.7B": preset(_TIED, 2048, 28, 16, 8, 6144),
        "4B": preset(_TIED, 2560, 36, 32, 8, 9728),
        "8B": preset(_QWEN3, 4096, 36, 32, 8, 12288),
        "14B": preset(_QWEN3, 5120, 40, 40, 8, 17408),
        "32B": preset(_QWEN3, 5120, 64, 64, 8, 25600),
    },
)
