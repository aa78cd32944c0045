"""Llama 3 (arXiv:2407.21783)."""

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, Family


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
    defaults={"attention_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02},
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
