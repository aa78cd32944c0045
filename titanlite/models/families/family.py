"""`Family`: the table that ties a model family to its Hugging Face configuration and checkpoint keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.errors import ConfigError, raise_problems

# ModelConfig field -> Hugging Face key, where all families agree.
COMMON_KEYS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
MOE_KEYS: Mapping[str, str] = {
    "top_k": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
# Other names under which transformers versions write the same key.
KEY_ALIASES: Mapping[str, str] = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: Hugging Face `model_type`.
        architecture: Hugging Face class, written into config.json.
        keys: ModelConfig field -> Hugging Face config key.
        presets: sizes by flavor.
        fixed: ModelConfig fields that the family does not configure.
        defaults: ModelConfig fields for keys that a config.json may leave out.
        required: Hugging Face keys that, if present, must have one of these values: the decoder has no other.
        expert_bias_key: name of the router's bias buffer in checkpoints; None if the architecture has none.
    """

    name: str
    architecture: str
    keys: Mapping[str, str]
    presets: Mapping[str, ModelConfig]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    expert_bias_key: str | None = None

    def from_hf(self, hf: Mapping[str, Any], where: str) -> ModelConfig:
        """Sizes from a Hugging Face configuration; `where` names it in errors.

        Raises:
            ConfigError: a key is missing, or asks for something that the decoder cannot express.
        """
        problems = []
        for key, allowed in {"hidden_act": ("silu",), **self.required}.items():
            if key in hf and hf[key] not in allowed:
                wanted = " or ".join(repr(value) for value in allowed)
                problems.append(f"{key} = {hf[key]!r} is not supported by the native decoder, only {wanted} is.")
        values: dict[str, Any] = {**self.defaults, **self.fixed, "family": self.name}
        for ours, theirs in self.keys.items():
            value = hf.get(theirs, hf.get(KEY_ALIASES.get(theirs, "")))
            if value is not None:
                values[ours] = value
        values.setdefault("num_kv_heads", values.get("num_heads"))
        if "head_dim" not in values and {"hidden_size", "num_heads"} <= values.keys():
            values["head_dim"] = values["hidden_size"] // values["num_heads"]
        problems += [f"{theirs} is missing." for ours, theirs in self.keys.items() if ours not in values]
        rope = hf.get("rope_parameters") or {
            **(hf.get("rope_scaling") or {}),
            "rope_theta": hf.get("rope_theta", 10000.0),
        }
        values["rope_theta"] = float(rope.get("rope_theta", 10000.0))
        try:
            values["rope_scaling"] = _rope_scaling(rope)
        except ConfigError as error:
            problems.append(str(error))
        raise_problems(ConfigError, where, problems)
        return ModelConfig(**values)

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """The Hugging Face configuration of `config`, as keyword arguments of the family's config class."""
        hf = {theirs: getattr(config, ours) for ours, theirs in self.keys.items()}
        hf |= {key: allowed[0] for key, allowed in self.required.items()}
        rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
        if config.rope_scaling is not None:
            used = _ROPE_KEYS[config.rope_scaling.rope_type]
            rope |= {"rope_type": config.rope_scaling.rope_type} | {k: getattr(config.rope_scaling, k) for k in used}
        return hf | {"rope_parameters": rope, "architectures": [self.architecture]}


_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type not in _ROPE_KEYS:
        raise ConfigError(
            f"rope_type '{rope_type}' is not supported by the native decoder, only {', '.join(_ROPE_KEYS)}."
        )
    known = {f.name for f in fields(RopeScaling)}
    return RopeScaling(**{**{k: v for k, v in rope.items() if k in known}, "rope_type": rope_type})
