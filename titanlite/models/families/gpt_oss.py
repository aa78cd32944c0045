"""gpt-oss (arXiv:2508.10925): attention with sinks, in every second layer with a window of 128
tokens; biases in router and experts; a clamped SwiGLU.

Experts are stored with inputs before outputs. Published folders have them in MXFP4, which is read,
and saved as bfloat16.
"""

from dataclasses import replace

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.models.families.family import (
    COMMON_KEYS,
    DEBUG_EXPERTS,
    NEEDS_WINDOW,
    Family,
    without,
)

_GPT_OSS = ModelConfig(
    family="gpt_oss",
    vocab_size=201088,
    hidden_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    rope_scaling=RopeScaling(
        "yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
    ),
    attention_bias=True,
    num_experts=32,
    top_k=4,
    moe_intermediate_size=2880,
    sliding_window=128,
    window_pattern="sf",
    qk_norm=False,
    attention_sinks=True,
    biased_experts=True,
    norm_topk_prob=True,  # equal to a softmax over the chosen logits
)

GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    keys={
        **without(COMMON_KEYS, "intermediate_size"),
        "moe_intermediate_size": "intermediate_size",
        "num_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "sliding_window": "sliding_window",
        "window_pattern": "layer_types",
    },
    rules=(NEEDS_WINDOW,),
    required={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    stored_names={r"\.mlp\.gate\.(weight|bias)$": r".mlp.router.\1"},
    transposes_experts=True,
    presets={
        "debug": replace(
            _GPT_OSS,
            **DEBUG_EXPERTS | {"intermediate_size": _GPT_OSS.intermediate_size},
            rope_scaling=RopeScaling(
                "yarn", factor=4.0, original_max_position_embeddings=512, truncate=False
            ),
            sliding_window=16,
        ),
        "20B": _GPT_OSS,
        "120B": replace(_GPT_OSS, num_layers=36, num_experts=128),
    },
)
