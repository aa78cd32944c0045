"""Qwen3-MoE (arXiv:2505.09388): softmax router, normalized top-8 of 128 experts, every layer sparse."""

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, MOE_KEYS, Family
from titanlite.models.families.keys import COMMON_DECLARED, MOE_DECLARED, Key

FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={**COMMON_KEYS, **MOE_KEYS, "num_experts": "num_experts"},
    fixed={"qk_norm": True, "score_func": "softmax"},
    declared={
        **COMMON_DECLARED,
        **MOE_DECLARED,
        "num_key_value_heads": Key("int", 4),
        "num_experts": Key("int"),
        "norm_topk_prob": Key("bool", False),
        "router_aux_loss_coef": Key("float"),
        "decoder_sparse_step": Key("int"),
        "mlp_only_layers": Key("list[int] | None"),
        "use_sliding_window": Key("bool", False),
        "sliding_window": Key("int | None", 4096),
    },
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
        "debug": ModelConfig(family="qwen3_moe", **DEBUG_SIZES, num_experts=8, top_k=2, moe_intermediate_size=32),
        "30B-A3B": ModelConfig(
            family="qwen3_moe",
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            intermediate_size=6144,
            num_experts=128,
            moe_intermediate_size=768,
        ),
        "235B-A22B": ModelConfig(
            family="qwen3_moe",
            hidden_size=4096,
            num_layers=94,
            num_heads=64,
            num_kv_heads=4,
            intermediate_size=12288,
            num_experts=128,
            moe_intermediate_size=1536,
        ),
    },
)
