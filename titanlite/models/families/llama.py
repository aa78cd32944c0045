"""Llama 3 (arXiv:2407.21783)."""

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, Family
from titanlite.models.families.keys import COMMON_DECLARED, HEADS, SHARE, Key


def _llama3(
    hidden: int, layers: int, heads: int, inner: int, factor: float, *, head_dim: int = 128, tied: bool = False
):
    return ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        intermediate_size=inner,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", factor=factor),
        qk_norm=False,
        tie_word_embeddings=tied,
    )


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys=COMMON_KEYS,
    fixed={"qk_norm": False},
    declared={
        **COMMON_DECLARED,
        "num_key_value_heads": Key("int | None", HEADS, HEADS),
        "head_dim": Key("int | None", SHARE, SHARE),
        "attention_dropout": Key("int | float | None", 0.0),
        "mlp_bias": Key("bool"),
        "pretraining_tp": Key("int | None"),
    },
    rules=(
        (
            lambda config: config.hidden_size % config.num_heads == 0,
            "hidden_size ({hidden_size}) is no multiple of num_heads ({num_heads}), as transformers demands.",
        ),
    ),
    required={"mlp_bias": (False,)},
    presets={
        "debug": ModelConfig(
            family="llama",
            **DEBUG_SIZES,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=RopeScaling("llama3", factor=8.0, original_max_position_embeddings=512),
            qk_norm=False,
        ),
        "3.2-1B": _llama3(2048, 16, 32, 8192, 32.0, head_dim=64, tied=True),
        "3.1-8B": _llama3(4096, 32, 32, 14336, 8.0),
        "3.1-70B": _llama3(8192, 80, 64, 28672, 8.0),
    },
)
