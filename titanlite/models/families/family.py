"""`Family`: the table that maps a model family to its Hugging Face configuration and checkpoint
keys.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.log import warn_once
from titanlite.config.model import ModelConfig
from titanlite.models.families.config_json import (
    MOST_LAYERS,
    MOST_PARAMETERS,
    PARTIAL,
    NotNativeError,
    describe_unreadable,
    find_quantization,
    read_config,
    show,
)
from titanlite.models.families.parts import Layer, standard_layer
from titanlite.models.families.rope import (
    check_rope_scaling,
    find_foreign,
    find_wrong,
    read_scaling,
    rope_to_hf,
)

# ModelConfig field -> Hugging Face key, if all families agree.
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


def without(keys: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return `keys` without the ModelConfig fields `names`."""
    return {ours: theirs for ours, theirs in keys.items() if ours not in names}


# Sizes of every family's `debug` flavor, for tests and first experiments: under a million
# parameters.
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
_KINDS: Mapping[str, Any] = {item.name: item.type for item in fields(ModelConfig)} | {
    "pad_token_id": int
}
TEXT_CONFIG = "text_config"  # key of the text model's part in a larger model's config.json
_NULL_IS_ZERO = ("q_lora_rank", "sliding_window")  # ModelConfig fields, if null in config.json
# Attributes of transformers' configuration for which the decoder supports only these values.
UNIVERSALLY_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "is_causal": (True,),
}


def _list_feed_forwards(config: ModelConfig) -> list[str]:
    dense = config.num_dense_layers if config.num_experts else config.num_layers
    return ["dense" if number < dense else "sparse" for number in range(config.num_layers)]


def _find_interval(kinds: list[Any]) -> int:
    """Return the interval of layers with full attention: the number of the first one, counted from
    1. If there is none, return transformers' default.
    """
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else 4


def _find_windows(kinds: list[Any]) -> str:
    """Return the shortest pattern of layers with and without a window that, repeated, gives the
    list.
    """
    text = "".join("s" if kind == "sliding_attention" else "f" for kind in kinds)
    lengths = range(1, len(text))
    return next((text[:n] for n in lengths if (text[:n] * len(text)).startswith(text)), text)


def _list_mixers(config: ModelConfig) -> list[str]:
    every = config.full_attention_interval or 1
    return [
        "sliding_attention"
        if config.has_window(i)
        else "linear_attention"
        if (i + 1) % every
        else "full_attention"
        for i in range(config.num_layers)
    ]


# Lists in config.json with the kind of each layer, by key, and the ModelConfig fields that express
# such a list.
_LISTS: Mapping[str, Callable[[ModelConfig], list[str]]] = {
    "mlp_layer_types": _list_feed_forwards,
    "layer_types": _list_mixers,
}
_FROM_LIST: Mapping[str, Callable[[list[Any]], int | str]] = {
    "num_dense_layers": lambda kinds: kinds.count("dense"),
    "full_attention_interval": _find_interval,
    "window_pattern": _find_windows,
}


def _find_other_patterns(config: Any, model: ModelConfig) -> Iterator[str]:
    """Yield a message for each list of layers in transformers' `config` that differs from the list
    of `model`, whose fields cannot express every list.
    """
    for key, list_kinds in _LISTS.items():
        given = getattr(config, key, None)
        expected = list_kinds(model)
        if given is not None and given != expected:
            yield (
                f"{key} = {show(given)} is not supported by the native decoder, only "
                f"{show(expected)} is here."
            )


# Whole numbers, each with its smallest value: a size whose default is 0 belongs to a part that a
# model may not have.
_LEAST_SIZES = {
    item.name: 1 if item.default else 0 for item in fields(ModelConfig) if item.type is int
}
_MOST_SIZE = 2**27
_LEAST = 1e-30
# Smallest and largest value of other numbers, and of sizes with another limit.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "num_layers": (1, MOST_LAYERS),
    # the norm of zeros: hidden states would vanish next to a larger epsilon
    "rms_norm_eps": (_LEAST, 1.0),
    "initializer_range": (0.0, 1.0),
    "rope_theta": (_LEAST, 1e15),
    "routed_scaling_factor": (-1e6, 1e6),
}
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_DELTA_SIZES = tuple(name for name in _LEAST_SIZES if name.startswith("linear_"))


def check_model_config(config: ModelConfig) -> list[str]:
    """Return the contradictions inside `config`, one message each."""
    is_latent = any(getattr(config, name) for name in ("q_lora_rank", *_LATENT_SIZES))
    needed: list[str] = list(_LATENT_SIZES if is_latent else ())
    if config.full_attention_interval:
        needed += _DELTA_SIZES
        if config.num_experts:
            needed.append("shared_expert_intermediate_size")
    least = _LEAST_SIZES | dict.fromkeys(needed, 1)
    bounds = {**{name: (low, _MOST_SIZE) for name, low in least.items()}, **_BOUNDS}
    problems = [
        f"{name} = {getattr(config, name)} is not between {low} and {high}."
        for name, (low, high) in bounds.items()
        if not low <= getattr(config, name) <= high  # nan too
    ]
    if problems:
        return problems
    if config.num_heads % config.num_kv_heads:
        problems.append(
            f"num_heads ({config.num_heads}) is not a multiple of num_kv_heads "
            f"({config.num_kv_heads})."
        )
    if config.linear_num_value_heads % (config.linear_num_key_heads or 1):
        problems.append(
            f"linear_num_value_heads ({config.linear_num_value_heads}) is not a multiple of "
            f"linear_num_key_heads ({config.linear_num_key_heads})."
        )
    if not {*config.window_pattern} <= {*"sf"} or (
        "s" in config.window_pattern and not config.sliding_window
    ):
        problems.append(
            f"window_pattern = {show(config.window_pattern)} with sliding_window = "
            f"{config.sliding_window}: it has other letters than s and f, or an s without a window."
        )
    if config.head_dim % 2:
        problems.append(f"head_dim ({config.head_dim}) is odd; rotary embeddings need pairs.")
    elif (
        not 0 < config.partial_rotary_factor <= 1 or config.rotary_dim < 2 or config.rotary_dim % 2
    ):
        problems.append(
            f"partial_rotary_factor ({config.partial_rotary_factor}) of head_dim "
            f"({config.head_dim}) is not an even number between 2 and head_dim."
        )
    if is_latent and config.num_heads != config.num_kv_heads:
        problems.append(
            f"num_kv_heads ({config.num_kv_heads}) is not num_heads ({config.num_heads}): "
            "latent attention has a key and a value for each query head."
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
        available = config.num_experts // groups * config.num_limited_groups
        if config.num_experts % groups:
            problems.append(
                f"num_experts ({config.num_experts}) is not a multiple of num_expert_groups "
                f"({groups})."
            )
        elif config.num_limited_groups > groups:
            problems.append(
                f"num_limited_groups ({config.num_limited_groups}) is not between 1 and {groups}."
            )
        elif config.top_k > available:
            chosen = f" in {config.num_limited_groups} of {groups} groups" if groups > 1 else ""
            problems.append(f"top_k ({config.top_k}) is more than the {available} experts{chosen}.")
    heads = config.num_heads * (config.qk_head_dim + config.qk_nope_head_dim + config.v_head_dim)
    inner = (
        config.intermediate_size
        + (config.num_experts + config.num_shared_experts) * config.moe_intermediate_size
        + config.shared_expert_intermediate_size
        + config.linear_num_key_heads * config.linear_key_head_dim
        + config.linear_num_value_heads * config.linear_value_head_dim
    )
    total = config.hidden_size * (config.vocab_size + config.num_layers * (heads + inner))
    if not problems and total > MOST_PARAMETERS:  # each size is possible, but their product is not
        problems = [
            f"the model would have {total:.3g} parameters or more, but at most "
            f"{MOST_PARAMETERS:.3g} are supported."
        ]
    return problems


NEEDS_WINDOW = (
    lambda config: config.sliding_window > 0,
    "sliding_window ({sliding_window}) is not positive, as transformers demands.",
)
"""A rule for `Family.rules`."""


def preset(base: ModelConfig, sizes: tuple[int, int, int, int, int], **more: Any) -> ModelConfig:
    """Return a flavor: `base` with the given `sizes`, in the order of a model card (hidden, layers,
    heads, kv heads, inner).
    """
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")
    return replace(base, **dict(zip(names, sizes, strict=True)), **more)


class Larger(NamedTuple):
    """A model with further inputs, such as images, whose text model is in the family."""

    name: str  # Hugging Face `model_type`
    architecture: str  # Hugging Face class
    prefix: str  # of the text model's keys in checkpoints, in place of "model."


@dataclass(frozen=True)
class Family:
    """One model family: a map between transformers' configuration and `ModelConfig`."""

    name: str  # Hugging Face `model_type`
    architecture: str  # Hugging Face class, written into config.json
    keys: Mapping[str, str]  # ModelConfig field -> attribute of transformers' configuration
    # Sizes by flavor, at least one. Except for rotary embeddings, fields of ModelConfig that `keys`
    # does not name have the same value in all of them, and so in every model of the family.
    presets: Mapping[str, ModelConfig]
    # Other `model_type`s of the same model: they are read, and saved as this one.
    aliases: Sequence[str] = ()
    # Attributes that must have one of these values, because the decoder supports no others. The
    # first is written.
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Keys that are written because transformers' defaults describe a different model.
    written: Mapping[str, Any] = field(default_factory=dict)
    # Features of transformers' configuration, with its rotary table, that the decoder does not
    # support; one message each.
    find_lacking: Callable[[Any, Mapping[str, Any]], Iterable[str]] = lambda _config, _table: ()
    # A condition on configurations of this family, and the text of the problem if it is not met.
    rules: Sequence[tuple[Callable[[ModelConfig], bool], str]] = ()
    # Key with the number of layers for multi-token prediction, which are not computed: 0 is written
    # unless a folder has them.
    mtp_key: str | None = None
    # The composition of the layer with this number.
    layer: Callable[[ModelConfig, int], Layer] = standard_layer
    # key of the router's bias buffer in checkpoints, below `mlp.gate`, if the architecture has one
    expert_bias_key: str | None = None
    # number of dimensions that it has there; the last one is that of the experts, the others are 1
    expert_bias_dims: int = 1
    # If rows of stored tensors have a different order than in memory: pattern of names -> function
    # that yields, in stored order, (first row in memory, number of rows).
    row_orders: Mapping[str, Callable[[ModelConfig], Iterable[tuple[int, int]]]] = field(
        default_factory=dict
    )
    # If the family's keys of checkpoints differ from most families' keys: pattern in those ->
    # replacement, applied one after another.
    stored_names: Mapping[str, str] = field(default_factory=dict)
    # True: all experts of a layer are stored in one tensor, with inputs before outputs.
    transposes_experts: bool = False
    # The larger model that may contain this one.
    larger: Larger | None = None
    # True: a folder with all experts of a layer in one tensor is saved in the same layout.
    keeps_fused_experts: bool = False

    @property
    def base(self) -> ModelConfig:
        """A model of the family, for the fields that all its models have in common."""
        return next(iter(self.presets.values()))

    @property
    def rotates_partially(self) -> bool:
        """True if the models rotate a part of each head."""
        return self.base.partial_rotary_factor < 1

    @property
    def has_rope_by_kind(self) -> bool:
        """True if config.json has a rotary table for each kind of layer: a plain one for layers
        with a window.
        """
        return not self.base.has_scaled_windows

    @property
    def model_types(self) -> tuple[str, ...]:
        """Return each `model_type` of a config.json that describes a model of the family."""
        return (self.name, *self.aliases, *([self.larger.name] if self.larger else []))

    def is_in_larger(self, hf: Mapping[str, Any]) -> bool:
        """Return True if `hf`, the content of a config.json, describes the larger model."""
        return self.larger is not None and hf.get("model_type") == self.larger.name

    def from_hf(self, hf: Mapping[str, Any], where: str) -> ModelConfig:
        """Return the sizes that transformers' class reads from `hf`, the content of a config.json;
        `where` names it in errors.

        Warns of a balance loss that transformers would add.

        Raises NotNativeError: the decoder cannot express the model. Raises ConfigError:
        transformers rejects a value, or nothing can compute with it.
        """
        hf, config = self._read(hf, where)
        # Called again, as its model does: a length outside of the table takes precedence over the
        # one inside.
        config.standardize_rope_params()
        rope = getattr(config, "rope_parameters", None) or {}
        windowed = rope.get("sliding_attention") if self.has_rope_by_kind else None
        if windowed is not None:
            rope = rope["full_attention"]
        table = {
            "rope_type": "default",
            # of a class without rotary embeddings, which is the class for a name that transformers
            # does not know
            "rope_theta": getattr(config, "rope_theta", None),
            **rope,
        }
        plain = {"rope_type": "default", "rope_theta": table["rope_theta"]}
        foreign = find_foreign(table)
        wrong = [] if foreign else list(find_wrong(table))
        lacking = [
            *self._find_unsupported(hf, config),
            *foreign,
            *self.find_lacking(config, table),
        ]
        if windowed not in (None, plain):
            lacking.append(
                f"rope_parameters: sliding_attention = {show(windowed)} is not supported by the "
                f"native decoder, only {show(plain)} is."
            )
        values = dict[str, Any]()
        for ours, key in {**self.keys, "pad_token_id": "pad_token_id"}.items():
            if ours == "head_dim" and not hasattr(config, key):
                continue  # most classes do not declare it: it is an equal part of the hidden width
            value = getattr(config, key, None)
            kind = _KINDS[ours]
            if key in _LISTS and isinstance(value, list):
                value = _FROM_LIST[ours](value)
            if ours in _NULL_IS_ZERO and value == 0:
                lacking.append(f"{key} = 0 is not supported; null leaves it out.")
            # transformers tests flags for truth, so null means false
            if value is None and (kind is bool or ours in _NULL_IS_ZERO):
                value = kind()
            values[ours] = value
            if type(value) is not kind and (value is not None or ours != "pad_token_id"):
                wrong.append(f"{key} = {show(value)} is not of type {kind.__name__}.")
        if not wrong and not self.rotates_partially and table.get(PARTIAL, 1.0) != 1.0:
            lacking.append(f"{PARTIAL} = {table[PARTIAL]} is not supported, only 1.0 is.")
        raise_problems(ConfigError if wrong else NotNativeError, where, [*lacking, *wrong])
        values.setdefault("head_dim", values["hidden_size"] // max(1, values["num_heads"]))
        if (values["pad_token_id"] or 0) < 0:  # a negative id counts from the end
            values["pad_token_id"] += values["vocab_size"]
        model = replace(
            self.base,
            family=self.name,
            **values,
            rope_theta=float(table["rope_theta"]),
            rope_scaling=read_scaling(table),
            partial_rotary_factor=float(table.get(PARTIAL, 1.0)),
        )
        raise_problems(ConfigError, where, self.check(model))
        raise_problems(NotNativeError, where, list(_find_other_patterns(config, model)))
        if getattr(config, "output_router_logits", False):
            warn_once(
                f"{where}: output_router_logits is true: transformers would add a balance loss to "
                "the training loss. Nothing is added here because of it: set moe.aux_loss_coeff "
                "for a balance loss of the native decoder."
            )
        return model

    def _read(self, hf: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Any]:
        """Return the part of `hf` about the text model, and transformers' configuration of it."""
        each = {"per_layer_config": None}
        if not self.is_in_larger(hf):
            theirs = {"model_type": self.name, "architectures": [self.architecture]}
            return hf, read_config({**hf, **theirs, **each}, where)
        text = hf.get(TEXT_CONFIG)
        parts = {TEXT_CONFIG: {**text, **each}} if isinstance(text, Mapping) else {}
        larger = read_config({**hf, **parts}, where)
        config = larger.get_text_config()
        config.tie_word_embeddings = larger.tie_word_embeddings  # the class reads it here
        return {**hf, **(text or {})}, config

    def _find_unsupported(self, hf: Mapping[str, Any], config: Any) -> list[str]:
        """Return one message per feature that the native decoder does not implement."""
        lacking = []
        if config.model_type != self.name:
            lacking.append(
                f"{TEXT_CONFIG}.model_type = {show(config.model_type)} is not supported by the "
                f"native decoder, only {show(self.name)} is."
            )
        for key, allowed in {**UNIVERSALLY_REQUIRED, **self.required}.items():
            value = getattr(config, key, allowed[0])
            if value not in allowed:
                wanted = " or ".join(map(show, allowed))
                lacking.append(
                    f"{key} = {show(value)} is not supported by the native decoder, only {wanted} "
                    "is."
                )
        if hf.get("per_layer_config") is not None:
            lacking.append("per_layer_config is not supported by the native decoder.")
        if problem := describe_unreadable(find_quantization(hf)):
            lacking.append(problem)
        return lacking

    def check(self, config: ModelConfig) -> list[str]:
        """Return the contradictions inside `config`, and the values that transformers' class of
        this family rejects; one message each.
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

        The rotary table keeps entries of `original`, the config.json that the model came from, that
        titanlite does not use, such as other names of the same value.
        """
        original = original or {}
        hf = {
            theirs: _LISTS[theirs](config) if theirs in _LISTS else getattr(config, ours)
            for ours, theirs in self.keys.items()
        }
        hf |= {key: getattr(config, key) or None for key in _NULL_IS_ZERO if key in self.keys}
        hf |= {key: allowed[0] for key, allowed in self.required.items()}
        hf |= self.written
        if "num_dense_layers" in self.keys:  # serving engines read it, and may read nothing else
            hf["first_k_dense_replace"] = config.num_dense_layers
        table = original.get("rope_scaling") or original.get("rope_parameters") or {}
        table = table.get("full_attention", table)
        rope = {"rope_theta": config.rope_theta, **rope_to_hf(config.rope_scaling, table)}
        if self.rotates_partially or PARTIAL in original:
            rope[PARTIAL] = config.partial_rotary_factor
        if self.mtp_key is not None:
            hf[self.mtp_key] = 0
        if config.pad_token_id is not None:
            hf["pad_token_id"] = config.pad_token_id
        if self.has_rope_by_kind:
            plain = {"rope_type": "default", "rope_theta": config.rope_theta}
            rope = {"full_attention": rope, "sliding_attention": plain}
        return hf | {"rope_parameters": rope, "architectures": [self.architecture]}
