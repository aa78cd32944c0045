"""`Family`: the table that ties a model family to its Hugging Face configuration and checkpoint
keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.log import warn_once
from titanlite.config.model import ModelConfig
from titanlite.models.families.keys import (
    COMMON_DECLARED,
    MISSING,
    MOST_PARAMETERS,
    PARTIAL,
    Key,
    NotNativeError,
    Rope,
    check_rope_scaling,
    describe_unreadable,
    find_absurd,
    find_other_loss,
    find_quantization,
    read_rope,
    rope_table,
    rope_to_hf,
    show,
)

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
# Sizes of every family's `debug` flavor: a model of under a million parameters, for tests and first
# looks.
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
DEBUG_EXPERTS = {**DEBUG_SIZES, "num_experts": 8, "top_k": 2, "moe_intermediate_size": 32}
# Other names under which transformers versions write the same key.
KEY_ALIASES: Mapping[str, str] = {
    "num_experts": "num_local_experts",
    "n_routed_experts": "num_local_experts",
}
_KINDS = {item.name: item.type for item in fields(ModelConfig)} | {"pad_token_id": int}
_KIND_NAMES = {int: "an integer", float: "a number with a decimal point", bool: "true or false"}
# ModelConfig fields whose 0 is written null, as a config.json has what is not there.
NONE_IS_ZERO = {"q_lora_rank"}
# What every config.json may ask for and the decoder does not have.
UNIVERSALLY_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "is_causal": (True,),
    "per_layer_config": (None,),
}


# The norm of nothing: hidden states would vanish beside the epsilon.
_MOST = {
    "rms_norm_eps": 1.0,
    "initializer_range": 1.0,
    "rope_theta": 1e15,
    "routed_scaling_factor": 1e6,
}
_POSITIVE = (
    *(
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
    ),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta"),
)
_POSITIVE_MOE = ("top_k", "moe_intermediate_size")


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
        problems.append(
            f"num_heads ({config.num_heads}) is not a multiple of num_kv_heads "
            f"({config.num_kv_heads})."
        )
    if config.head_dim % 2:
        problems.append(f"head_dim ({config.head_dim}) is odd; rotary embeddings need pairs.")
    elif (
        not 0 < config.partial_rotary_factor <= 1 or config.rotary_dim < 2 or config.rotary_dim % 2
    ):
        problems.append(
            f"partial_rotary_factor ({config.partial_rotary_factor}) of head_dim "
            f"({config.head_dim}) is no even number between 2 and head_dim."
        )
    if any((config.kv_lora_rank, config.q_lora_rank, config.qk_nope_head_dim, config.v_head_dim)):
        problems += [
            f"{name} = {getattr(config, name)} is not positive, as latent attention needs it."
            for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
            if getattr(config, name) <= 0
        ]
        problems += (
            [f"q_lora_rank = {config.q_lora_rank} is negative."] if config.q_lora_rank < 0 else []
        )
        if config.num_heads != config.num_kv_heads:
            problems.append(
                f"num_kv_heads ({config.num_kv_heads}) is not num_heads ({config.num_heads}), "
                "which latent attention makes keys and values for."
            )
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        problems.append(
            f"pad_token_id ({config.pad_token_id}) is not less than vocab_size "
            f"({config.vocab_size})."
        )
    if config.rope_scaling is not None:
        problems += check_rope_scaling(config.rope_scaling, config.rope_theta)
    if config.num_experts > 0:
        groups = config.num_expert_groups
        if config.top_k > config.num_experts:
            problems.append(
                f"top_k ({config.top_k}) is more than num_experts ({config.num_experts})."
            )
        elif groups < 1 or config.num_experts % groups:
            problems.append(
                f"num_experts ({config.num_experts}) is not a multiple of num_expert_groups "
                f"({groups})."
            )
        elif not 1 <= config.num_limited_groups <= groups:
            problems.append(
                f"num_limited_groups ({config.num_limited_groups}) is not between 1 and {groups}."
            )
        elif config.top_k > config.num_experts // groups * config.num_limited_groups:
            problems.append(
                f"top_k ({config.top_k}) is more than the experts in {config.num_limited_groups} "
                f"of {groups} groups ({config.num_experts // groups * config.num_limited_groups})."
            )
    heads = config.num_heads * (config.qk_head_dim + config.qk_nope_head_dim + config.v_head_dim)
    inner = (
        config.intermediate_size
        + (config.num_experts + config.num_shared_experts) * config.moe_intermediate_size
    )
    total = config.hidden_size * (config.vocab_size + config.num_layers * (heads + inner))
    if not problems and total > MOST_PARAMETERS:  # sizes are each possible, but not their product
        problems = [
            f"the model would have {total:.3g} parameters or more, and {MOST_PARAMETERS:.3g} are "
            "the most."
        ]
    return problems


def preset(base: ModelConfig, sizes: tuple[int, int, int, int, int], **more: Any) -> ModelConfig:
    """Return a flavor: `base` with sizes in the order of a model card: hidden, layers, heads, kv
    heads, inner.
    """
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")
    return replace(base, **dict(zip(names, sizes, strict=True)), **more)


@dataclass(frozen=True)
class Family:
    """One model family."""

    name: str  # Hugging Face `model_type`
    architecture: str  # Hugging Face class, written into config.json
    keys: Mapping[str, str]  # ModelConfig field -> Hugging Face key
    presets: Mapping[str, ModelConfig]  # sizes by flavor
    # ModelConfig fields that the family does not configure
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # What keys mean in transformers' class that are missing or null; others must be there.
    declared: Mapping[str, Key] = field(default_factory=lambda: COMMON_DECLARED)
    # The same for `partial_rotary_factor`, also in the rotary table; with a default of 1 there is
    # no other value.
    partial_rotary: Key = field(default=Key(1.0, 1.0))
    # Keys that, if present, must have one of these values: the decoder has no other. The first one
    # is written.
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # What must hold for a configuration of this family, and the text of the problem if it does not.
    rules: Sequence[tuple[Callable[[ModelConfig], bool], str]] = ()
    # Key that counts layers for multi-token prediction, which are not computed: 0 is written unless
    # a folder has them.
    mtp_key: str | None = None
    # of the router's bias buffer in checkpoints, if the architecture has one
    expert_bias_key: str | None = None

    def from_hf(self, hf: Mapping[str, Any], where: str) -> ModelConfig:
        """Sizes from a Hugging Face configuration; `where` names it in errors.

        Warns of entries of the rotary table without effect, and of a balance loss that transformers
        would add.

        Raises NotNativeError, for what the decoder cannot express, or ConfigError: a key is
        missing, wrong, or contradicts another one.
        """
        problems = self._find_wrong_kinds(hf)
        lacking = self._find_lacking(hf)
        values: dict[str, Any] = {**self.fixed, "family": self.name}
        if not problems:
            row = hf.get("pad_token_id")  # a negative one counts from the end
            values["pad_token_id"] = row + hf["vocab_size"] if row is not None and row < 0 else row
            values |= {ours: self._read(theirs, hf) for ours, theirs in self.keys.items()}
            problems += [
                f"{self.keys[name]} = 0 is not positive; null leaves it out."
                for name in NONE_IS_ZERO & values.keys()
                if values[name] == 0
            ]
            values |= {name: 0 for name in NONE_IS_ZERO & values.keys() if values[name] is None}
        rope = Rope()
        try:
            rope = read_rope(hf, self.partial_rotary, is_latent="kv_lora_rank" in self.keys)
        except NotNativeError as error:
            lacking.append(str(error))
        except ConfigError as error:
            problems.append(str(error))
        raise_problems(ConfigError if problems else NotNativeError, where, [*lacking, *problems])
        values |= {"rope_theta": rope.theta, "rope_scaling": rope.scaling, PARTIAL: rope.partial}
        config = ModelConfig(**values)
        if config.head_dim % 2 == 0 and config.rotary_dim % 2:
            raise NotNativeError(
                f"{where}: {PARTIAL} rotates {config.rotary_dim} of {config.head_dim}, an odd "
                "number."
            )
        raise_problems(ConfigError, where, self.check(config))
        for text in filter(None, [*rope.without_effect, find_other_loss(hf)]):
            warn_once(f"{where}: {text}")
        return config

    def check(self, config: ModelConfig) -> list[str]:
        """Contradictions inside `config`, and what transformers' class of this family refuses; one
        message each.
        """
        problems = check_model_config(config)
        if problems:
            return problems
        return [text.format(**vars(config)) for holds, text in self.rules if not holds(config)]

    def to_hf(
        self, config: ModelConfig, original: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the Hugging Face configuration of `config`, as keyword arguments of the family's
        config class.

        The rotary table keeps the entries of `original`, the config.json that the model came from,
        that mean nothing here, such as other names for the same thing.
        """
        hf = {theirs: getattr(config, ours) for ours, theirs in self.keys.items()}
        hf |= {
            self.keys[ours]: None
            for ours in NONE_IS_ZERO & self.keys.keys()
            if not getattr(config, ours)
        }
        hf |= {key: allowed[0] for key, allowed in self.required.items()}
        rope = {
            "rope_theta": config.rope_theta,
            **rope_to_hf(config.rope_scaling, rope_table(original or {})),
        }
        if self.partial_rotary.default != 1.0 or PARTIAL in (original or {}):
            rope[PARTIAL] = config.partial_rotary_factor
        if self.mtp_key is not None:
            hf[self.mtp_key] = 0
        if config.pad_token_id is not None:
            hf["pad_token_id"] = config.pad_token_id
        return hf | {"rope_parameters": rope, "architectures": [self.architecture]}

    def _read(self, key: str, hf: Mapping[str, Any]) -> Any:
        """Return the value of `key`, which may stand under its other name."""
        alias = KEY_ALIASES.get(key, "")
        return self.declared.get(key, Key()).read(
            key, {key: hf[alias], **hf} if alias in hf else hf
        )

    def _find_wrong_kinds(self, hf: Mapping[str, Any]) -> list[str]:
        """Keys whose values transformers refuses, or cannot compute with."""
        problems = list(find_absurd(hf))
        rotated = hf.get("qk_rope_head_dim")
        if rotated is not None and hf.get("head_dim", rotated) != rotated:
            problems.append(
                f"head_dim = {show(hf['head_dim'])} is not qk_rope_head_dim = {show(rotated)}."
            )
        for ours, key in {**self.keys, "pad_token_id": "pad_token_id"}.items():
            declared, alias, kind = (
                self.declared.get(key, Key()),
                KEY_ALIASES.get(key, ""),
                _KINDS[ours],
            )
            value = hf.get(key, hf.get(alias, MISSING))
            if key in hf and alias in hf and hf[key] != hf[alias]:
                problems.append(
                    f"{key} = {show(hf[key])}, but {alias} = {show(hf[alias])}. Give one."
                )
            elif value is MISSING and declared.default is MISSING:
                problems.append(f"{key} is missing.")
            elif value is None and declared.null is MISSING:
                problems.append(
                    f"{key} = null: transformers' model cannot compute with it. Give its value."
                )
            elif value is not MISSING and value is not None and type(value) is not kind:
                hint = (
                    f" Write {float(value)}."
                    if type(value) is int and kind is float and abs(value) < 2**31
                    else ""
                )
                wanted = f"transformers expects {_KIND_NAMES[kind]}"
                problems.append(f"{key} = {show(value)} is of the wrong type: {wanted}.{hint}")
        return problems

    def _find_lacking(self, hf: Mapping[str, Any]) -> list[str]:
        """Return what the decoder does not have, one message each."""
        lacking = []
        for key, allowed in {**UNIVERSALLY_REQUIRED, **self.required}.items():
            value = hf.get(key, allowed[0])
            if key not in hf and key in self.declared and self.declared[key].default is not MISSING:
                value = self.declared[key].default
            if any(type(value) is type(one) and value == one for one in allowed):
                continue
            if key == "sliding_window" and self._has_full_attention(hf):
                continue
            wanted = " or ".join(repr(one) for one in allowed)
            default = "" if key in hf else ", which transformers takes where the key is missing,"
            lacking.append(
                f"{key} = {value!a}{default} is not supported by the native decoder, only {wanted} "
                "is."
            )
        if problem := describe_unreadable(find_quantization(hf)):
            lacking.append(problem)
        types = hf.get("layer_types")
        if isinstance(types, list) and any(kind != "full_attention" for kind in types):
            lacking.append(
                "layer_types has other entries than 'full_attention', which the native decoder "
                "lacks."
            )
        return lacking

    def _has_full_attention(self, hf: Mapping[str, Any]) -> bool:
        """Return True if a sliding window that `hf` has is used by none of its layers."""
        first = self.declared.get("max_window_layers")
        if first is None:
            return False
        if hf.get("layer_types") is not None:
            return True  # looked at by themselves
        first, count = hf.get("max_window_layers", first.default), hf.get("num_hidden_layers")
        return type(first) is int and type(count) is int and first >= count
