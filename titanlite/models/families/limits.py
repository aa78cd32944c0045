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
    problems = [
        f"{name} = {getattr(config, name)} is more than {most}."
        for name, most in _MOST.items()
        if not getattr(config, name) <= most  # nan too
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
    return problems or _find_too_large(config)


def _find_too_large(config: ModelConfig) -> list[str]:
    """Return a problem if sizes are each possible, but not their product."""
    heads = config.num_heads * (config.qk_head_dim + config.qk_nope_head_dim + config.v_head_dim)
    experts = (config.num_experts + config.num_shared_experts) * config.moe_intermediate_size
    total = config.hidden_size * (config.vocab_size + config.num_layers * (heads + config.intermediate_size + experts))
    if total <= MOST_PARAMETERS:
        return []
    return [f"the model would have {total:.3g} parameters or more, and {MOST_PARAMETERS:.3g} are the most."]


# A hundred times what the largest models have; beyond, sizes overflow, and layers take minutes to be described.
MOST_PARAMETERS = 2**50
_MOST: Mapping[str, float] = {
    **dict.fromkeys(("vocab_size", "intermediate_size", "moe_intermediate_size"), 2**24),
    **dict.fromkeys(("hidden_size", "kv_lora_rank", "q_lora_rank"), 2**20),
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "qk_nope_head_dim", "v_head_dim"), 2**16),
    **dict.fromkeys(("num_experts", "top_k"), 2**16),
    "num_layers": 4096,
    "num_shared_experts": 2**10,
    **dict.fromkeys(("max_position_embeddings", "num_dense_layers"), 2**31),
    # The norm of nothing: hidden states would vanish beside the epsilon.
    "rms_norm_eps": 1.0,
    "initializer_range": 1.0,
    "rope_theta": 1e15,
    "routed_scaling_factor": 1e6,
}


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
        elif (
            re.search("dropout|pdrop", str(key))
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and not 0 <= value <= 1
        ):
            yield f"{name} = {show(value)} is no probability: it is not between 0 and 1."
        for number in value if isinstance(value, list) else [value]:
            most = next((most for pattern, most in _MOST_OF if re.search(pattern, str(key))), None)
            if type(number) is int and most is not None and abs(number) > most:
                yield f"{name} = {show(number)} is more than {most}."
    layers, experts = (
        max((value for key, value in hf.items() if type(value) is int and re.search(pattern, str(key))), default=0)
        for pattern in (_LAYERS, _EXPERTS)
    )
    if layers <= 4096 and experts <= 2**16 and layers * experts > _MOST_EXPERTS:
        yield f"{path}{layers} layers of {experts} experts have {layers * experts} in all, more than {_MOST_EXPERTS}."


_LAYERS, _EXPERTS = r"^(?!max_|first_)\w*layers?$|^depths?$", r"experts$"
_MOST_EXPERTS = 2**20
# What transformers makes modules, lists or tables of, then widths, whose products torch bounds.
_MOST_OF = (
    (_LAYERS, 4096),
    (_EXPERTS, 2**16),
    (r"^num_labels$", 2**16),
    (r"^max_position_embeddings$|^n_positions$|^n_ctx$|^max_\w*_positions$", 2**27),
    (r"vocab", 2**26),  # of hashed n-grams, 20 million
    (r"size|dim|heads|rank|^d_|_d$|channels|groups|width", 2**24),
    (r"^num_|^n_|_freq$|_step$|_interval$|window|length", 2**31),
)
