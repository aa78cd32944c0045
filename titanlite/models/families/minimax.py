"""MiniMax-M2: sigmoid scores with a selection bias, one norm over all queries and one over all
keys, half of each head rotated; keys of checkpoints as in Mixtral.
"""

from dataclasses import replace

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_EXPERTS, Family, without

_M2 = ModelConfig(
    family="minimax_m2",
    vocab_size=200064,
    hidden_size=3072,
    num_layers=62,
    num_heads=48,
    num_kv_heads=8,
    max_position_embeddings=196608,
    rope_theta=5000000.0,
    partial_rotary_factor=0.5,
    num_experts=256,
    moe_intermediate_size=1536,
    qk_norm_of_all_heads=True,
    score_func="sigmoid",
)

MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    keys={
        **without(COMMON_KEYS, "attention_bias", "intermediate_size"),
        "moe_intermediate_size": "intermediate_size",
        "num_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
    },
    required={
        "use_qk_norm": (True,),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "router_jitter_noise": (0.0,),
    },
    expert_bias_key="e_score_correction_bias",
    stored_names={
        r"\.mlp\.gate\.e_score": ".mlp.e_score",
        r"\.mlp\.(experts\.\d+)\.gate_proj\.": r".mlp.\1.w1.",
        r"\.mlp\.(experts\.\d+)\.down_proj\.": r".mlp.\1.w2.",
        r"\.mlp\.(experts\.\d+)\.up_proj\.": r".mlp.\1.w3.",
        r"\.mlp\.": ".block_sparse_moe.",
    },
    presets={
        "debug": replace(
            _M2, **DEBUG_EXPERTS | {"intermediate_size": ModelConfig.intermediate_size}
        ),
        "230B-A10B": _M2,
    },
)
