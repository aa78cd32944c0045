"""Llama 3 (arXiv:2407.21783), and Qwen models, which are built like it.

Qwen2 and Qwen2.5 (arXiv:2412.15115) have biases on q, k and v. Qwen3 (arXiv:2505.09388) has norms
on queries and keys. Qwen3-MoE has a softmax router with normalized top-8 of 128 experts, in every
layer.
"""

from dataclasses import replace

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.models.families.family import (
    COMMON_KEYS,
    DEBUG_EXPERTS,
    DEBUG_SIZES,
    MOE_KEYS,
    Family,
    preset,
    without,
)

_LLAMA3 = ModelConfig(
    family="llama",
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", factor=8.0),
    qk_norm=False,
)
_SMALL = replace(
    _LLAMA3, head_dim=64, rope_scaling=RopeScaling("llama3", factor=32.0), tie_word_embeddings=True
)

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys=COMMON_KEYS,
    rules=(
        (
            lambda config: config.hidden_size % config.num_heads == 0,
            "hidden_size ({hidden_size}) is not a multiple of num_heads ({num_heads}), as "
            "transformers demands.",
        ),
    ),
    required={"mlp_bias": (False,)},
    presets={
        "debug": replace(
            _LLAMA3,
            **DEBUG_SIZES,
            rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=512),
        ),
        "3.2-1B": preset(_SMALL, (2048, 16, 32, 8, 8192)),
        "3.1-8B": preset(_LLAMA3, (4096, 32, 32, 8, 14336)),
        "3.1-70B": preset(_LLAMA3, (8192, 80, 64, 8, 28672)),
    },
)

_QWEN2 = ModelConfig(
    family="qwen2",
    max_position_embeddings=131072,
    qk_norm=False,
    attention_bias=True,
    attention_output_bias=False,
)
_SMALL_QWEN2 = replace(_QWEN2, tie_word_embeddings=True)

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=without(COMMON_KEYS, "attention_bias"),
    required={"use_sliding_window": (False,)},
    presets={
        "debug": replace(_QWEN2, **DEBUG_SIZES),
        "2.5-0.5B": preset(
            _SMALL_QWEN2, (896, 24, 14, 2, 4864), head_dim=64, max_position_embeddings=32768
        ),
        "2.5-1.5B": preset(_SMALL_QWEN2, (1536, 28, 12, 2, 8960)),
        "2.5-7B": preset(_QWEN2, (3584, 28, 28, 4, 18944), vocab_size=152064),
    },
)

_QWEN3 = ModelConfig(family="qwen3")
_TIED_QWEN3 = ModelConfig(family="qwen3", tie_word_embeddings=True)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=COMMON_KEYS,
    required={"use_sliding_window": (False,)},
    presets={
        "debug": ModelConfig(family="qwen3", **DEBUG_SIZES, tie_word_embeddings=True),
        "0.6B": preset(_TIED_QWEN3, (1024, 28, 16, 8, 3072)),
        "1.7B": preset(_TIED_QWEN3, (2048, 28, 16, 8, 6144)),
        "4B": preset(_TIED_QWEN3, (2560, 36, 32, 8, 9728)),
        "8B": preset(_QWEN3, (4096, 36, 32, 8, 12288)),
        "14B": preset(_QWEN3, (5120, 40, 40, 8, 17408)),
        "32B": preset(_QWEN3, (5120, 64, 64, 8, 25600)),
    },
)

_QWEN3_MOE = ModelConfig(family="qwen3_moe", num_experts=128)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={**COMMON_KEYS, **MOE_KEYS, "num_experts": "num_experts"},
    required={
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    presets={
        # Sized for the quick start: about 2 minutes on 2 CPU cores.
        "mini": ModelConfig(
            family="qwen3_moe",
            vocab_size=4096,
            hidden_size=192,
            num_layers=4,
            num_heads=6,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=512,
            max_position_embeddings=4096,
            num_experts=8,
            top_k=2,
            moe_intermediate_size=192,
        ),
        "debug": replace(_QWEN3_MOE, **DEBUG_EXPERTS),
        "30B-A3B": preset(_QWEN3_MOE, (2048, 48, 32, 4, 6144)),
        "235B-A22B": preset(_QWEN3_MOE, (4096, 94, 64, 4, 12288), moe_intermediate_size=1536),
    },
)
