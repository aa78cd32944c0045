"""dots.llm1 (arXiv:2506.05767): grouped-query attention with DeepSeek-V3's MoE (arXiv:2412.19437).

Sigmoid scores, a selection bias per expert, group-limited top-k, shared experts, leading dense layers.
"""

from dataclasses import replace

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_EXPERTS, GROUP_RULES, MOE_KEYS, Family, preset
from titanlite.models.families.keys import COMMON_DECLARED, Key

_DOTS = ModelConfig(family="dots1", num_dense_layers=1, score_func="sigmoid", routed_scaling_factor=2.5)

FAMILY = Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    keys={
        **COMMON_KEYS,
        **MOE_KEYS,
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_dense_layers": "first_k_dense_replace",
        "num_expert_groups": "n_group",
        "num_limited_groups": "topk_group",
        "routed_scaling_factor": "routed_scaling_factor",
    },
    fixed={"qk_norm": True, "score_func": "sigmoid"},
    declared={
        **COMMON_DECLARED,
        "first_k_dense_replace": Key(0),
        **dict.fromkeys(("n_group", "topk_group"), Key(1)),
        "norm_topk_prob": Key(False, False),
        "routed_scaling_factor": Key(1.0),
        "sliding_window": Key(4096),
        "max_window_layers": Key(62),
    },
    rules=GROUP_RULES,
    required={
        "sliding_window": (None,),
        # Serving engines and llama.cpp look at these; transformers' class has no other. Early folders name the method.
        "scoring_func": ("sigmoid", "noaux_tc"),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    expert_bias_key="e_score_correction_bias",
    presets={
        "debug": replace(
            _DOTS,
            **DEBUG_EXPERTS,
            num_shared_experts=1,
            num_expert_groups=4,
            num_limited_groups=2,
        ),
        "142B-A14B": preset(
            _DOTS,
            4096,
            62,
            32,
            32,
            10944,
            vocab_size=152064,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=10000000.0,
            num_experts=128,
            top_k=6,
            moe_intermediate_size=1408,
            num_shared_experts=2,
        ),
    },
)
