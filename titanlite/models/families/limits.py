"""Contradictions inside a `ModelConfig`."""

from titanlite.config.model import ModelConfig
from titanlite.models.families.rope import check_rope_scaling


def check_model_config(config: ModelConfig) -> list[str]:
    """Contradictions inside `config`, one message each."""
    problems = []
    for name in _POSITIVE + (_POSITIVE_MOE if config.num_experts else ()):
        if getattr(config, name) <= 0:
            problems.append(f"{name} = {getattr(config, name)} is not positive.")
    for name in ("num_experts", "num_dense_layers", "num_shared_experts", "initializer_range"):
        if getattr(config, name) < 0:
            problems.append(f"{name} = {getattr(config, name)} is negative.")
    if config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads:
        problems.append(f"num_heads ({config.num_heads}) is not a multiple of num_kv_heads ({config.num_kv_heads}).")
    if config.head_dim % 2:
        problems.append(f"head_dim ({config.head_dim}) is odd; rotary embeddings need pairs.")
    elif not 0 < config.partial_rotary_factor <= 1 or config.rotary_dim < 2 or config.rotary_dim % 2:
        problems.append(
            f"partial_rotary_factor ({config.partial_rotary_factor}) of head_dim ({config.head_dim}) is no even number "
            "between 2 and head_dim."
        )
    if any((config.kv_lora_rank, config.q_lora_rank, config.qk_nope_head_dim, config.v_head_dim)):
        problems += [
            f"{name} = {getattr(config, name)} is not positive, as latent attention needs it."
            for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
            if getattr(config, name) <= 0
        ]
        problems += [f"q_lora_rank = {config.q_lora_rank} is negative."] if config.q_lora_rank < 0 else []
        if config.num_heads != config.num_kv_heads:
            problems.append(
                f"num_kv_heads ({config.num_kv_heads}) is not num_heads ({config.num_heads}), which latent attention "
                "makes keys and values for."
            )
    if config.rope_scaling is not None:
        problems += check_rope_scaling(config.rope_scaling, config.rope_theta)
    if config.num_experts > 0:
        groups = config.num_expert_groups
        if config.top_k > config.num_experts:
            problems.append(f"top_k ({config.top_k}) is more than num_experts ({config.num_experts}).")
        elif groups < 1 or config.num_experts % groups:
            problems.append(f"num_experts ({config.num_experts}) is not a multiple of num_expert_groups ({groups}).")
        elif not 1 <= config.num_limited_groups <= groups:
            problems.append(f"num_limited_groups ({config.num_limited_groups}) is not between 1 and {groups}.")
        elif config.top_k > config.num_experts // groups * config.num_limited_groups:
            problems.append(
                f"top_k ({config.top_k}) is more than the experts in {config.num_limited_groups} of {groups} groups "
                f"({config.num_experts // groups * config.num_limited_groups})."
            )
    return problems


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)
_POSITIVE_MOE = ("top_k", "moe_intermediate_size")
