"""dots.llm1 (arXiv:2506.05767): grouped-query attention with DeepSeek-V3's MoE (arXiv:2412.19437).

Sigmoid scores, a selection bias per expert, group-limited top-k, shared experts, leading dense layers.
"""

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_SIZES, MOE_KEYS, Family

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
    defaults={
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "norm_topk_prob": False,
        "num_dense_layers": 0,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "routed_scaling_factor": 1.0,
    },
    required={
        "sliding_window": (None,),
        # Serving engines and llama.cpp look at these; transformers' class has no other. Early folders name the method.
        "scoring_func": ("sigmoid", "noaux_tc"),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    expert_bias_key="e_score_correction_bias",
    presets={
        "debug": ModelConfig(
            family="dots1",
            **DEBUG_SIZES,
            num_experts=8,
            top_k=2,
            moe_intermediate_size=32,
            num_dense_layers=1,
            num_shared_experts=1,
            score_func="sigmoid",
            routed_scaling_factor=2.5,
            num_expert_groups=4,
            num_limited_groups=2,
        ),
        "142B-A14B": ModelConfig(
            family="dots1",
            vocab_size=152064,
            hidden_size=4096,
            num_layers=62,
            num_heads=32,
            num_kv_heads=32,
            intermediate_size=10944,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=10000000.0,
            num_experts=128,
            top_k=6,
            moe_intermediate_size=1408,
            num_dense_layers=1,
            num_shared_experts=2,
            score_func="sigmoid",
            routed_scaling_factor=2.5,
        ),
    },
)
