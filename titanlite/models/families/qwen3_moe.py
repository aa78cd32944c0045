"""Qwen3-MoE (arXiv:2505.09388): softmax router, normalized top-8 of 128 experts, every layer sparse."""

from dataclasses import replace

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_EXPERTS, MOE_KEYS, Family, preset
from titanlite.models.families.keys import COMMON_DECLARED, Key

_MOE = ModelConfig(family="qwen3_moe", num_experts=128)

FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={**COMMON_KEYS, **MOE_KEYS, "num_experts": "num_experts"},
    fixed={"qk_norm": True, "score_func": "softmax"},
    declared={**COMMON_DECLARED, "num_key_value_heads": Key(4), "norm_topk_prob": Key(False)},
    required={"use_sliding_window": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
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
        "debug": replace(_MOE, **DEBUG_EXPERTS),
        "30B-A3B": preset(_MOE, 2048, 48, 32, 4, 6144),
        "235B-A22B": preset(_MOE, 4096, 94, 64, 4, 12288, moe_intermediate_size=1536),
    },
)
