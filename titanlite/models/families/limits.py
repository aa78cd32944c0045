"""Contradictions inside a `ModelConfig`, and sizes that no machine could hold, of any model."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from titanlite.config.model import ModelConfig
from titanlite.models.families.keys import show
from titanlite.models.families.rope import check_rope_scaling


def check_model_config(config: ModelConfig) -> list[str]:
    """Contradictions inside `config`, one message each."""
    problems = list(find_absurd(vars(config)))
    problems += [
        f"{name} = {getattr(config, name)} is more than {most}."
        for name, most in _MOST.items()
        if getattr(config, name) > most
    ]
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
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        problems.append(f"pad_token_id ({config.pad_token_id}) is not less than vocab_size ({config.vocab_size}).")
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
    heads = config.num_heads * (config.qk_head_dim + config.qk_nope_head_dim + config.v_head_dim)
    inner = config.intermediate_size + (config.num_experts + config.num_shared_experts) * config.moe_intermediate_size
    total = config.hidden_size * (config.vocab_size + config.num_layers * (heads + inner))
    if not problems and total > MOST_PARAMETERS:  # sizes are each possible, but not their product
        problems = [f"the model would have {total:.3g} parameters or more, and {MOST_PARAMETERS:.3g} are the most."]
    return problems


# A hundred times what the largest models have; beyond, sizes overflow, and layers take minutes to be described.
MOST_PARAMETERS = 2**50
# The norm of nothing: hidden states would vanish beside the epsilon.
_MOST = {"rms_norm_eps": 1.0, "initializer_range": 1.0, "rope_theta": 1e15, "routed_scaling_factor": 1e6}
_POSITIVE = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta"),
)
_POSITIVE_MOE = ("top_k", "moe_intermediate_size")


def find_absurd(hf: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Sizes in `hf` that no model has, before transformers makes lists of such lengths; numbers that are not finite.

    Lists may hold infinities: some state-space models bound their time steps by them.
    """
    for key, value in hf.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from find_absurd(value, f"{name}.")
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} = {show(value)} is not a finite number."
        for number in value if isinstance(value, list) else [value]:
            most = next((most for pattern, most in _MOST_OF if re.search(pattern, str(key))), None)
            if type(number) is int and most is not None and abs(number) > most:
                yield f"{name} = {show(number)} is more than {most}."


# What transformers makes modules, lists or tables of; then widths, whose products torch bounds.
_MOST_OF = (
    (r"^(?!max_|first_)\w*layers?$|^depths?$", 4096),
    (r"experts$|^num_labels$", 2**16),
    (r"size|dim|heads|rank|^d_|_d$|channels|groups|width|vocab|position|^n_ctx$", 2**27),
    (r"^num_|^n_|_freq$|_step$|_interval$|window|length", 2**31),
)
