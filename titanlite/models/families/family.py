"""`Family`: the table that ties a model family to its Hugging Face configuration and checkpoint keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.errors import ConfigError, raise_problems
from titanlite.models.families.limits import check_model_config
from titanlite.models.families.rope import PARTIAL, NotNativeError, read_rope, rope_table, rope_to_hf

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
            rope = rope_table(hf)
            values["rope_theta"], values["rope_scaling"] = read_rope(hf, rope)
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
            raise NotNativeError(f"{where}: {PARTIAL} rotates {config.rotary_dim} of {config.head_dim}, an odd number.")
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
        rope = {"rope_theta": config.rope_theta, **rope_to_hf(config.rope_scaling, rope_table(original or {}))}
        if PARTIAL in self.defaults:
            rope[PARTIAL] = config.partial_rotary_factor
        if self.mtp_key is not None:
            hf[self.mtp_key] = 0
        return hf | {"rope_parameters": rope, "architectures": [self.architecture]}

    def _partial_rotary(self, hf: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, float]:
        """What the configuration says of the rotated part of a head; families with a default for it may have one."""
        partial = table.get(PARTIAL, hf.get(PARTIAL))
        if partial is None:
            return {}
        if isinstance(partial, bool) or not isinstance(partial, int | float):
            raise ConfigError(f"{PARTIAL} = {partial!r} is not a number.")
        if partial != 1.0 and PARTIAL not in self.defaults:
            raise NotNativeError(f"{PARTIAL} = {partial} is not supported by the native decoder, only 1.0 is.")
        return {PARTIAL: float(partial)}


def is_readable_quantization(quantization: Any) -> bool:
    """True without quantization, and for block-scaled FP8, which is dequantized while it is read."""
    if quantization is None:
        return True
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return False
    block = quantization.get("weight_block_size", [128, 128])
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


_FIELD_KINDS: Mapping[str, Any] = {
    f.name: {int: int, float: (int, float), bool: bool, str: str}.get(f.type, object)  # type: ignore[call-overload]
    for f in fields(ModelConfig)
}
