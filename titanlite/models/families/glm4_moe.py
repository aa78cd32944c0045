"""GLM-4.5 and 4.6 (arXiv:2508.06471): DeepSeek-V3's router without groups, shared experts, leading dense layers.

Half of each head is rotated; q, k and v have a bias. The layer for multi-token prediction that checkpoints have behind
the last one is neither trained nor saved, as in transformers.
"""

from dataclasses import replace

from titanlite.config.model import ModelConfig
from titanlite.models.families.dots1 import FAMILY as DOTS1
from titanlite.models.families.family import DEBUG_EXPERTS, GROUP_RULES, Family, preset
from titanlite.models.families.keys import COMMON_DECLARED, Key

_GLM = ModelConfig(
    family="glm4_moe",
    vocab_size=151552,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    attention_bias=True,
    attention_output_bias=False,
    num_dense_layers=1,
    num_shared_experts=1,
    score_func="sigmoid",
)

FAMILY = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    keys={**DOTS1.keys, "qk_norm": "use_qk_norm"},
    fixed={"score_func": "sigmoid", "attention_output_bias": False},
    declared={
        **COMMON_DECLARED,
        "num_key_value_heads": Key(8),
        **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"), Key(1)),
        "norm_topk_prob": Key(True),
        "routed_scaling_factor": Key(1.0),
        "use_qk_norm": Key(False),
    },
    partial_rotary=Key(0.5, 1.0),
    rules=GROUP_RULES,
    mtp_key="num_nextn_predict_layers",
    expert_bias_key="e_score_correction_bias",
    presets={
        "debug": replace(_GLM, **DEBUG_EXPERTS, routed_scaling_factor=2.5),
        "4.5-Air-106B-A12B": preset(
            _GLM, 4096, 46, 96, 8, 10944, qk_norm=False, num_experts=128, moe_intermediate_size=1408
        ),
        "4.5-355B-A32B": preset(
            _GLM,
            5120,
            92,
            96,
            8,
            12288,
            num_experts=160,
            moe_intermediate_size=1536,
            num_dense_layers=3,
            routed_scaling_factor=2.5,
        ),
    },
)
