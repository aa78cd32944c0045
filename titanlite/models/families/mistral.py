"""Mistral (arXiv:2310.06825) and Ministral: Llama's layers, with a sliding window in all or some of
them.
"""

from dataclasses import replace

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, Family, preset, without

_MISTRAL = ModelConfig(
    family="mistral",
    vocab_size=32768,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    qk_norm=False,
)
_KEYS = {
    **without(COMMON_KEYS, "attention_bias"),
    "sliding_window": "sliding_window",
}

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    keys=_KEYS,
    presets={
        "debug": replace(_MISTRAL, **DEBUG_SIZES, sliding_window=48),
        "7B-v0.1": preset(
            _MISTRAL,
            (4096, 32, 32, 8, 14336),
            vocab_size=32000,
            rope_theta=10000.0,
            sliding_window=4096,
        ),
        "7B-v0.3": preset(_MISTRAL, (4096, 32, 32, 8, 14336)),
    },
)

MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    architecture="MinistralForCausalLM",
    keys={**_KEYS, "window_pattern": "layer_types"},
    presets={
        "debug": replace(
            MISTRAL.presets["debug"], family="ministral", sliding_window=16, window_pattern="fss"
        )
    },
)
