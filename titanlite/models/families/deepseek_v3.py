"""DeepSeek-V3, V3.1 and R1 (arXiv:2412.19437), and Moonlight (arXiv:2502.16982), which is built like them.

Latent attention; sigmoid scores, a selection bias per expert, group-limited top-k, shared experts, leading dense
layers. The layer for multi-token prediction after the last one is neither trained nor saved.
"""

from dataclasses import replace

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.models.families.dots1 import FAMILY as DOTS1
from titanlite.models.families.family import DEBUG_EXPERTS, GROUP_RULES, Family, preset
from titanlite.models.families.keys import COMMON_DECLARED, HEADS, Key

_DEEPSEEK = ModelConfig(
    family="deepseek_v3",
    head_dim=64,
    rope_theta=10000.0,
    qk_norm=False,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    v_head_dim=128,
    rope_interleave=True,
    num_dense_layers=1,
    num_shared_experts=1,
    score_func="sigmoid",
)


def _yarn(factor: float, original: int, mscale_all_dim: float) -> RopeScaling:
    return RopeScaling(
        "yarn", factor, original_max_position_embeddings=original, mscale=1.0, mscale_all_dim=mscale_all_dim
    )


FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys={
        **DOTS1.keys,
        "head_dim": "qk_rope_head_dim",
        "kv_lora_rank": "kv_lora_rank",
        "q_lora_rank": "q_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "v_head_dim": "v_head_dim",
        "rope_interleave": "rope_interleave",
    },
    fixed={"qk_norm": False, "score_func": "sigmoid"},
    declared={
        **COMMON_DECLARED,
        "num_key_value_heads": Key(128, HEADS),
        "n_shared_experts": Key(1),
        **dict.fromkeys(("num_experts_per_tok", "n_group"), Key(8)),
        "first_k_dense_replace": Key(3),
        "topk_group": Key(4),
        "norm_topk_prob": Key(True, False),
        "routed_scaling_factor": Key(2.5),
        "q_lora_rank": Key(null=None),
        "rope_interleave": Key(True, False),
    },
    rules=GROUP_RULES,
    # DeepSeek's own code and serving engines look at these; the decoder has no other.
    required={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
    mtp_key="num_nextn_predict_layers",
    expert_bias_key="e_score_correction_bias",
    presets={
        "debug": replace(
            _DEEPSEEK,
            **{**DEBUG_EXPERTS, "num_kv_heads": 4, "head_dim": 8},
            rope_scaling=_yarn(4.0, 512, 0.5),
            kv_lora_rank=24,
            q_lora_rank=32,
            qk_nope_head_dim=16,
            v_head_dim=12,
            routed_scaling_factor=2.5,
            num_expert_groups=4,
            num_limited_groups=2,
        ),
        "V3-671B-A37B": preset(
            _DEEPSEEK,
            7168,
            61,
            128,
            128,
            18432,
            vocab_size=129280,
            max_position_embeddings=163840,
            rope_scaling=_yarn(40.0, 4096, 1.0),
            q_lora_rank=1536,
            num_experts=256,
            moe_intermediate_size=2048,
            num_dense_layers=3,
            routed_scaling_factor=2.5,
            num_expert_groups=8,
            num_limited_groups=4,
        ),
        "Moonlight-16B-A3B": preset(
            _DEEPSEEK,
            2048,
            27,
            16,
            16,
            11264,
            vocab_size=163840,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=50000.0,
            num_experts=64,
            top_k=6,
            moe_intermediate_size=1408,
            num_shared_experts=2,
            routed_scaling_factor=2.446,
        ),
    },
)
