"""`Family`: the table that ties a model family to its Hugging Face configuration and checkpoint keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from titanlite.config.model import ROPE_FIELDS, ModelConfig, RopeScaling
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
# Sizes of every family's `debug` flavor: a model of under a million parameters, for tests and first looks.
DEBUG_SIZES: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
}
# Other names under which transformers versions write the same key.
KEY_ALIASES: Mapping[str, str] = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
# ModelConfig fields whose 0 is written null, as a config.json has what is not there.
NONE_IS_ZERO = {"q_lora_rank"}
# Features that every config.json may ask for and the decoder lacks.
UNIVERSALLY_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "is_causal": (True, None),
}
QUANTIZATION_PROBLEM = (
    "quantization_config: of quantized weights only FP8 with a scale per block (quant_method 'fp8' with a "
    "weight_block_size of two numbers) can be read."
)


class NotNativeError(ConfigError):
    """A sound config.json that asks for something that the native decoder lacks; transformers may have it."""


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
        mtp_key: Hugging Face key that counts the layers for multi-token prediction behind the last one; those are
            left out, and 0 is written. None if the architecture has none.
        expert_bias_key: name of the router's bias buffer in checkpoints; None if the architecture has none.
    """

    name: str
    architecture: str
    keys: Mapping[str, str]
    presets: Mapping[str, ModelConfig]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    mtp_key: str | None = None
    expert_bias_key: str | None = None

    def from_hf(self, hf: Mapping[str, Any], where: str) -> ModelConfig:
        """Sizes from a Hugging Face configuration; `where` names it in errors.

        Raises:
            NotNativeError: it asks for something that the decoder cannot express.
            ConfigError: a key is missing or of a wrong type.
        """
        lacking: list[str] = []
        problems: list[str] = []
        for key, allowed in {**UNIVERSALLY_REQUIRED, **self.required}.items():
            if key in hf and hf[key] not in allowed:
                wanted = " or ".join(repr(value) for value in allowed)
                lacking.append(f"{key} = {hf[key]!r} is not supported by the native decoder, only {wanted} is.")
        if not is_readable_quantization(hf.get("quantization_config")):
            lacking.append(QUANTIZATION_PROBLEM)
        if set(hf.get("layer_types") or []) - {"full_attention"}:
            lacking.append("layer_types has other entries than 'full_attention', which the native decoder lacks.")
        values: dict[str, Any] = {**self.defaults, **self.fixed, "family": self.name}
        for ours, theirs in self.keys.items():
            value = hf.get(theirs, hf.get(KEY_ALIASES.get(theirs, "")))
            if value is None and ours in NONE_IS_ZERO and theirs in hf:
                value = 0
            if value is not None:
                values[ours] = value
                kind = _FIELD_KINDS[ours]
                if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                    problems.append(f"{theirs} = {value!r} is of the wrong type.")
        values.setdefault("num_kv_heads", values.get("num_heads"))
        has_own_width = self.keys.get("head_dim") == "head_dim"
        if (
            has_own_width
            and "head_dim" not in values
            and {"hidden_size", "num_heads"} <= values.keys()
            and not problems + lacking
        ):
            values["head_dim"] = values["hidden_size"] // max(values["num_heads"], 1)
        problems += [
            f"{theirs} is missing."
            for ours, theirs in self.keys.items()
            if ours not in values and not (ours == "head_dim" and has_own_width)
        ]
        try:
            rope = _rope_table(hf)
            values["rope_theta"], values["rope_scaling"] = _rope(hf, rope)
            values |= self._partial_rotary(hf, rope)
            scaling: RopeScaling | None = values["rope_scaling"]
            is_other = scaling is not None and scaling.rope_type != "yarn"
            if is_other and "kv_lora_rank" in self.keys and rope.get("mscale_all_dim"):
                raise NotNativeError("mscale_all_dim is supported by the native decoder with rope_type 'yarn' alone.")
        except NotNativeError as error:
            lacking.append(str(error))
        except ConfigError as error:
            problems.append(str(error))
        raise_problems(ConfigError if problems else NotNativeError, where, [*lacking, *problems])
        config = ModelConfig(**values)
        if config.head_dim % 2 == 0 and config.rotary_dim % 2:
            raise NotNativeError(
                f"{where}: {_PARTIAL} rotates {config.rotary_dim} of {config.head_dim}, an odd number."
            )
        raise_problems(ConfigError, where, check_model_config(config))
        return config

    def to_hf(self, config: ModelConfig, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The Hugging Face configuration of `config`, as keyword arguments of the family's config class.

        The rotary table keeps the entries of `original`, the config.json that the model came from, that mean nothing
        here, such as other names for the same thing.
        """
        hf = {theirs: getattr(config, ours) for ours, theirs in self.keys.items()}
        hf |= {self.keys[ours]: None for ours in NONE_IS_ZERO & self.keys.keys() if not getattr(config, ours)}
        hf |= {key: allowed[0] for key, allowed in self.required.items()}
        rope = {"rope_theta": config.rope_theta, **_rope_to_hf(config.rope_scaling, _rope_table(original or {}))}
        if _PARTIAL in self.defaults:
            rope[_PARTIAL] = config.partial_rotary_factor
        if self.mtp_key is not None:
            hf[self.mtp_key] = 0
        return hf | {"rope_parameters": rope, "architectures": [self.architecture]}

    def _partial_rotary(self, hf: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, float]:
        """What the configuration says of the rotated part of a head; families with a default for it may have one."""
        partial = table.get(_PARTIAL, hf.get(_PARTIAL))
        if partial is None:
            return {}
        if isinstance(partial, bool) or not isinstance(partial, int | float):
            raise ConfigError(f"{_PARTIAL} = {partial!r} is not a number.")
        if partial != 1.0 and _PARTIAL not in self.defaults:
            raise NotNativeError(f"{_PARTIAL} = {partial} is not supported by the native decoder, only 1.0 is.")
        return {_PARTIAL: float(partial)}


_PARTIAL = "partial_rotary_factor"
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def is_readable_quantization(quantization: Any) -> bool:
    """True without quantization, and for block-scaled FP8, which is dequantized while it is read."""
    if quantization is None:
        return True
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return False
    block = quantization.get("weight_block_size", [128, 128])
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def _rope_table(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters`, or the older `rope_scaling`."""
    table = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"rope_parameters or rope_scaling = {table!r} is not a table.")
    return table


def _rope(hf: Mapping[str, Any], table: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `table` or from the older `rope_theta`.

    Raises:
        NotNativeError: something the decoder lacks.
        ConfigError: a value that is no number.
    """
    theta = next((t for t in (table.get("rope_theta"), hf.get("rope_theta")) if t is not None), None)
    if theta is None and "rope_theta" in hf:
        raise ConfigError("rope_theta = null is not a number.")
    theta = 10000.0 if theta is None else theta  # transformers' default where a config.json does not say
    rope_type: Any = table.get("rope_type", table.get("type", "default"))
    if rope_type != "default" and rope_type not in ROPE_FIELDS:
        raise NotNativeError(
            f"rope_type '{rope_type}' is not supported by the native decoder, only {', '.join(ROPE_FIELDS)}."
        )
    needed, optional = ROPE_FIELDS.get(rope_type, ((), ()))
    values: dict[str, Any] = {key: table.get(key) for key in needed}
    if _ORIGINAL_LENGTH in needed and hf.get(_ORIGINAL_LENGTH) is not None:
        values[_ORIGINAL_LENGTH] = hf[_ORIGINAL_LENGTH]  # counts for transformers where both are there
    if _ORIGINAL_LENGTH in needed and values[_ORIGINAL_LENGTH] is None:
        values[_ORIGINAL_LENGTH] = hf.get("max_position_embeddings")
    if rope_type == "yarn" and values["factor"] is None and "factor" in table:
        values["factor"] = _get_length_ratio(hf, values[_ORIGINAL_LENGTH])
    values |= {key: table[key] for key in optional if table.get(key) is not None}
    if "truncate" in optional and "truncate" in table and table["truncate"] is None:
        values["truncate"] = False  # as transformers takes it
    numbers = {"rope_theta": theta} | {key: value for key, value in values.items() if key != "truncate"}
    wrong = [
        f"{k} = {v!r}"
        for k, v in numbers.items()
        if not isinstance(v, int | float) or isinstance(v, bool) or not math.isfinite(v)
    ]
    if wrong:
        raise ConfigError(f"rotary embedding of type '{rope_type}': {', '.join(wrong)} is not a number.")
    if not isinstance(values.get("truncate", True), bool):
        raise ConfigError(f"rotary embedding of type '{rope_type}': truncate = {values['truncate']!r} is not a bool.")
    return float(theta), RopeScaling(**{"rope_type": rope_type, **values}) if values else None


def _get_length_ratio(hf: Mapping[str, Any], original: Any) -> Any:
    """The factor that YaRN has where the table says null; None if it cannot be had."""
    longest = hf.get("max_position_embeddings")
    lengths = [length for length in (longest, original) if type(length) is int and length > 0]
    return lengths[0] / lengths[1] if len(lengths) == 2 else None


def _rope_to_hf(scaling: RopeScaling | None, original: Mapping[str, Any]) -> dict[str, Any]:
    """The table that `_rope` reads, without what may be left out and says nothing, unless `original` says it."""
    rope_type = "default" if scaling is None else scaling.rope_type
    kept = original if original.get("rope_type", original.get("type", "default")) == rope_type else {}
    kept = {key: value for key, value in kept.items() if key not in ("rope_theta", _PARTIAL)}
    if scaling is None:
        return kept | {"rope_type": rope_type}
    needed, optional = ROPE_FIELDS[rope_type]
    plain = RopeScaling()
    said = [key for key in optional if key in kept or getattr(scaling, key) != getattr(plain, key)]
    return kept | {"rope_type": rope_type} | {key: getattr(scaling, key) for key in (*needed, *said)}


def _check_rope_scaling(scaling: RopeScaling, theta: float) -> list[str]:
    """Values with which frequencies would be none."""
    needed, optional = ROPE_FIELDS[scaling.rope_type]
    positive = [name for name in (*needed, *optional) if name not in ("mscale", "mscale_all_dim", "truncate")]
    problems = [
        f"rope_scaling.{name} = {value} is not positive."
        for name in positive
        if (value := getattr(scaling, name)) is not None and value <= 0
    ]
    if problems or scaling.rope_type == "linear":
        return problems
    if scaling.rope_type == "yarn" and scaling.factor < 1:
        problems.append(f"rope_scaling.factor = {scaling.factor} is less than 1: sequences would be shorter.")
    if scaling.rope_type == "yarn" and scaling.attention_scaling <= 0:
        problems.append(
            f"rope_scaling: mscale ({scaling.mscale}) and mscale_all_dim ({scaling.mscale_all_dim}) make a factor on "
            f"queries and keys of {scaling.attention_scaling:.3g}, which is not positive."
        )
    low, high = ("low_freq_factor", "high_freq_factor") if scaling.rope_type == "llama3" else ("beta_slow", "beta_fast")
    if getattr(scaling, low) >= getattr(scaling, high):
        problems.append(
            f"rope_scaling.{low} ({getattr(scaling, low)}) is not less than rope_scaling.{high} "
            f"({getattr(scaling, high)})."
        )
    if scaling.rope_type == "yarn" and theta <= 1:
        problems.append(f"rope_theta = {theta} is not more than 1, which rope_scaling of type 'yarn' needs.")
    return problems


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
        problems += _check_rope_scaling(config.rope_scaling, config.rope_theta)
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
_FIELD_KINDS: Mapping[str, Any] = {
    f.name: {int: int, float: (int, float), bool: bool, str: str}.get(f.type, object)  # type: ignore[call-overload]
    for f in fields(ModelConfig)
}
