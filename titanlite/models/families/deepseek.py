"""DeepSeek-V3 and models with its mixture of experts: sigmoid scores, a selection bias per expert,
shared experts.

The first layers are dense. dots.llm1 (arXiv:2506.05767), GLM-4.5 and 4.6 (arXiv:2508.06471) have
grouped-query attention. In GLM half of each head is rotated, q, k and v have biases, and the router
has no groups. DeepSeek-V3, V3.1 and R1 (arXiv:2412.19437), and Moonlight (arXiv:2502.16982), which
is built like them, have latent attention. Layers for multi-token prediction, after the last layer,
are not trained; checkpoints contain them as they were loaded (`features/passthrough.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.models.families.family import (
    COMMON_KEYS,
    DEBUG_EXPERTS,
    MOE_KEYS,
    Family,
    preset,
    without,
)

# Routers choose groups first, by the sum of the best two scores in each, even if there is only one
# group.
_RULES = (
    (
        lambda config: config.num_experts >= 2 * config.num_expert_groups,
        "num_experts ({num_experts}) is less than 2 for each of num_expert_groups "
        "({num_expert_groups}), which transformers' router needs.",
    ),
    (
        lambda config: config.num_shared_experts > 0,
        "num_shared_experts ({num_shared_experts}) is not positive, which transformers' class "
        "demands.",
    ),
)

_DOTS = ModelConfig(
    family="dots1", num_dense_layers=1, score_func="sigmoid", routed_scaling_factor=2.5
)

DOTS1 = Family(
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
    rules=_RULES,
    required={
        # Serving engines and llama.cpp read these keys; transformers' class supports no other
        # values. Early folders have the name of the method.
        "scoring_func": ("sigmoid", "noaux_tc"),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    written={"sliding_window": None},  # otherwise layers from the 62nd on would have a window
    expert_bias_key="e_score_correction_bias",
    presets={
        "debug": replace(
            _DOTS, **DEBUG_EXPERTS, num_shared_experts=1, num_expert_groups=4, num_limited_groups=2
        ),
        "142B-A14B": preset(
            _DOTS,
            (4096, 62, 32, 32, 10944),
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

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    keys={**DOTS1.keys, "qk_norm": "use_qk_norm"},
    rules=_RULES,
    mtp_key="num_nextn_predict_layers",
    expert_bias_key="e_score_correction_bias",
    presets={
        "debug": replace(_GLM, **DEBUG_EXPERTS, routed_scaling_factor=2.5),
        "4.5-Air-106B-A12B": preset(
            _GLM,
            (4096, 46, 96, 8, 10944),
            qk_norm=False,
            num_experts=128,
            moe_intermediate_size=1408,
        ),
        "4.5-355B-A32B": preset(
            _GLM,
            (5120, 92, 96, 8, 12288),
            num_experts=160,
            moe_intermediate_size=1536,
            num_dense_layers=3,
            routed_scaling_factor=2.5,
        ),
    },
)

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
        "yarn",
        factor,
        original_max_position_embeddings=original,
        mscale=1.0,
        mscale_all_dim=mscale_all_dim,
    )


def _find_lacking(config: Any, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield features of transformers' latent attention that the decoder does not have."""
    if config.head_dim != config.qk_rope_head_dim:
        yield f"head_dim = {config.head_dim!a} is not qk_rope_head_dim = {config.qk_rope_head_dim}."
    if table.get("mscale_all_dim") and table["rope_type"] not in ("default", "yarn"):
        yield "mscale_all_dim changes the softmax scale: it is supported only with 'yarn'."


def _find_lacking_in_lite(config: Any, table: Mapping[str, Any]) -> Iterator[str]:
    yield from _find_lacking(config, table)
    count = config.mlp_layer_types.count("dense")
    first = "first_k_dense_replace"
    if getattr(config, first, count) != count:
        yield (
            f"{first} = {getattr(config, first)!a} is not the {count} dense layers of "
            "mlp_layer_types, the only list that transformers reads."
        )


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    aliases=("kimi_k2",),
    keys={
        **DOTS1.keys,
        "head_dim": "qk_rope_head_dim",
        "kv_lora_rank": "kv_lora_rank",
        "q_lora_rank": "q_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "v_head_dim": "v_head_dim",
        "rope_interleave": "rope_interleave",
    },
    rules=_RULES,
    find_lacking=_find_lacking,
    # DeepSeek's own code and serving engines read these keys; the decoder supports no other values.
    required={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
    mtp_key="num_nextn_predict_layers",
    expert_bias_key="e_score_correction_bias",
    presets={
        "debug": replace(
            _DEEPSEEK,
            **DEBUG_EXPERTS | {"num_kv_heads": 4, "head_dim": 8},
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
            (7168, 61, 128, 128, 18432),
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
        "Kimi-K2-1T-A32B": preset(
            _DEEPSEEK,
            (7168, 61, 64, 64, 18432),
            vocab_size=163840,
            max_position_embeddings=131072,
            rope_theta=50000.0,
            rope_scaling=replace(_yarn(32.0, 4096, 1.0), beta_fast=1.0),
            q_lora_rank=1536,
            num_experts=384,
            moe_intermediate_size=2048,
            routed_scaling_factor=2.827,
        ),
        "Moonlight-16B-A3B": preset(
            _DEEPSEEK,
            (2048, 27, 16, 16, 11264),
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

# GLM-4.7-Flash (arXiv:2508.06471 describes its predecessors): latent attention, one group of
# experts.
_GLM_LITE = replace(
    _DEEPSEEK,
    family="glm4_moe_lite",
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    qk_nope_head_dim=192,
    v_head_dim=256,
    q_lora_rank=768,
    routed_scaling_factor=1.8,
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    aliases=(),
    keys={**DEEPSEEK_V3.keys, "num_dense_layers": "mlp_layer_types"},
    find_lacking=_find_lacking_in_lite,
    presets={
        "debug": replace(
            DEEPSEEK_V3.presets["debug"],
            family="glm4_moe_lite",
            rope_scaling=None,
            num_expert_groups=1,
            num_limited_groups=1,
        ),
        "4.7-Flash-30B-A3B": preset(
            _GLM_LITE,
            (2048, 47, 20, 20, 10240),
            vocab_size=154880,
            max_position_embeddings=202752,
            num_experts=64,
            top_k=4,
            moe_intermediate_size=1536,
        ),
    },
)

# Every layer has experts, so the configuration has no width of dense layers.
_SOLAR = replace(
    _GLM,
    family="solar_open",
    vocab_size=196608,
    intermediate_size=ModelConfig.intermediate_size,
    partial_rotary_factor=1.0,
    attention_bias=False,
    qk_norm=False,
    num_dense_layers=0,
)

SOLAR_OPEN = replace(
    GLM4_MOE,
    name="solar_open",
    architecture="SolarOpenForCausalLM",
    keys=without(GLM4_MOE.keys, "qk_norm", "num_dense_layers", "intermediate_size"),
    # Serving engines read it; transformers' class has no dense layers.
    required={"first_k_dense_replace": (0,)},
    mtp_key=None,
    presets={
        "debug": replace(_SOLAR, **DEBUG_EXPERTS | {"intermediate_size": _SOLAR.intermediate_size}),
        "100B-A12B": replace(
            _SOLAR,
            hidden_size=4096,
            num_layers=48,
            num_heads=64,
            num_experts=128,
            moe_intermediate_size=1280,
        ),
    },
)
