"""Keys of a Hugging Face config.json: what one means that is missing or null, absurd values, and
rotary embeddings.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.base.errors import ConfigError
from titanlite.base.text import find_near, list_names
from titanlite.config.model import ROPE_FIELDS, RopeScaling

MISSING: Any = object()
"""Stands for a default or a meaning that does not exist."""

QUANTIZATION = ("quantization_config", "compression_config")
_MOST_SHOWN = 80


@dataclass(frozen=True)
class Key:
    """Meaning of a key of config.json that is missing or null: a value, or a function of the
    configuration.
    """

    default: Any = MISSING  # it must be there
    null: Any = MISSING  # transformers' class refuses it, or its model cannot compute with it

    def read(self, key: str, hf: Mapping[str, Any]) -> Any:
        """Return the value of `key` in `hf`; MISSING if there is none to compute with."""
        value = hf.get(key, MISSING)
        meaning = self.default if value is MISSING else self.null if value is None else value
        return meaning(hf) if callable(meaning) else meaning


def show(value: Any) -> str:
    """Return `value` of a config.json as it may stand in a message: printable, and not long."""
    text = "null" if value is None else ascii(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def find_quantization(hf: Mapping[str, Any]) -> Any:
    """Return what `hf`, or one of its parts, says of quantized weights; or None."""
    parts = [
        hf,
        *(
            value
            for key, value in hf.items()
            if key.endswith("_config") and isinstance(value, Mapping)
        ),
    ]
    return next(
        (part[key] for part in parts for key in QUANTIZATION if part.get(key) is not None), None
    )


def describe_unreadable(quantization: Any) -> str:
    """Return why weights of `quantization` cannot be read; empty if they can, dequantized on the
    way.
    """
    found = quantization if isinstance(quantization, Mapping) else {}
    method, block = found.get("quant_method"), found.get("weight_block_size", [128, 128])
    is_fp8 = method == "fp8" and found.get("expert_dtype", "fp8") == "fp8"
    is_pair = isinstance(block, list) and [type(size) for size in block] == [int, int]
    has_blocks = block is None or (is_pair and min(block) > 0)
    if quantization is None or method == "mxfp4" or (is_fp8 and has_blocks):
        return ""
    given = {
        key: found[key]
        for key in ("quant_algo", "expert_dtype", "weight_block_size")
        if key in found
    }
    return (
        "quantization_config: weights of quant_method "
        f"{show(method)}{f' ({show(given)})' if given else ''} cannot be read, only those of 'fp8' "
        "(weight_block_size: two numbers, or null) and 'mxfp4' can. Give the folder of the weights "
        "that were quantized."
    )


def _heads(hf: Mapping[str, Any]) -> Any:
    return hf.get("num_attention_heads", MISSING)


def _share(hf: Mapping[str, Any]) -> Any:
    """Return what transformers takes for the width of a head: an equal share of the hidden
    width.
    """
    hidden, heads = hf.get("hidden_size", MISSING), _heads(hf)
    return MISSING if MISSING in (hidden, heads) else hidden // heads if heads > 0 else 0


HEADS, SHARE = _heads, _share

# What transformers' classes agree on; where one differs, its family says so. Keys without effect on
# what the model computes are not here: transformers looks at them when the config.json to be saved
# is built, before training.
COMMON_DECLARED: Mapping[str, Key] = {
    "num_key_value_heads": Key(32, HEADS),
    "head_dim": Key(SHARE),  # most classes do not declare it, and null breaks their model
    "initializer_range": Key(0.02),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias"), Key(False)),
    "pad_token_id": Key(None, None),
}


# A hundred times what the largest models have; beyond, sizes overflow, and layers take minutes to
# be described.
MOST_PARAMETERS = 2**50


def find_other_loss(hf: Mapping[str, Any]) -> str:
    """Return what transformers would add to the training loss and titanlite does not; empty:
    nothing.
    """
    if not hf.get("output_router_logits"):
        return ""
    coefficient = hf.get("router_aux_loss_coef", hf.get("router_aux_loss_coefficient"))
    return (
        "output_router_logits is true: transformers would add a balance loss, weighed by "
        f"router_aux_loss_coef ({'its default' if coefficient is None else show(coefficient)}), to "
        "the training loss. Nothing is added here because of it: set moe.aux_loss_coeff for a "
        "balance loss of the native decoder."
    )


def find_absurd(hf: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Sizes in `hf` that no model has, before transformers makes lists of such lengths; numbers
    that are not finite.

    Lists may hold infinities: some state-space models bound their time steps by them.
    """
    hf = {str(key): value for key, value in hf.items()}
    for key, value in hf.items():
        name = f"{path}{key}"
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} = {show(value)} is not a finite number."
        elif _is_number(value) and re.search("dropout|pdrop", key) and not 0 <= value <= 1:
            yield f"{name} = {show(value)} is no probability: it is not between 0 and 1."
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, Mapping):
                yield from find_absurd(number, f"{name}.")
            most = next((most for pattern, most in _MOST_OF if re.search(pattern, key)), None)
            if type(number) is int and most is not None and abs(number) > most:
                yield f"{name} = {show(number)} is more than {most}."
    layers, experts = (
        max(
            (value for key, value in hf.items() if type(value) is int and re.search(pattern, key)),
            default=0,
        )
        for pattern in (_LAYERS, _EXPERTS)
    )
    if layers <= 4096 and experts <= 2**16 and layers * experts > _MOST_EXPERTS:
        yield (
            f"{path}{layers} layers of {experts} experts have {layers * experts} in all, more than "
            f"{_MOST_EXPERTS}."
        )


_LAYERS, _EXPERTS, _MOST_EXPERTS = r"^(?!max_|first_)\w*layers?$|^depths?$", r"experts$", 2**20
# What transformers makes modules, lists or tables of; then widths, whose products are looked at in
# the model.
_MOST_OF = (
    (_LAYERS, 4096),
    (rf"{_EXPERTS}|^num_labels$", 2**16),
    (r"size|dim|heads|rank|^d_|_d$|channels|groups|width|vocab|position|^n_ctx$", 2**27),
    (r"^num_|^n_|_freq$|_step$|_interval$|window|length", 2**31),
)


PARTIAL = "partial_rotary_factor"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_TYPE, _OLD_TYPE = "rope_type", "type"
_NEWER, _OLDER = "rope_parameters", "rope_scaling"
# Labels under which transformers 5 nests one table for each kind of layer.
_MOST = 1e10
_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


class NotNativeError(ConfigError):
    """A sound config.json that asks for something that the native decoder does not have;
    transformers may have it.
    """


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings as transformers 5 understands a config.json."""

    theta: float = 10000.0  # base of the frequencies; transformers' default
    scaling: RopeScaling | None = None
    partial: float = 1.0  # of each head
    # sentences about entries of the table that transformers passes over
    without_effect: tuple[str, ...] = ()


def rope_table(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the older `rope_scaling`, which counts where it has entries, or `rope_parameters`."""
    for name in (_OLDER, _NEWER):
        if hf.get(name) is not None and not isinstance(hf[name], Mapping):
            raise ConfigError(f"{name} = {show(hf[name])} is not a table.")
    return hf.get(_OLDER) or hf.get(_NEWER) or {}


def read_rope(hf: Mapping[str, Any], partial: Key, *, is_latent: bool) -> Rope:
    """Return the rotary embeddings of `hf`, whichever form it has.

    `partial` is what the family says of `partial_rotary_factor`: only one with another default than
    1 supports it. If it `is_latent`, YaRN changes the softmax scale.

    Raises NotNativeError: the decoder does not have it. Raises ConfigError: a wrong value, or a
    contradiction.
    """
    table = rope_table(hf)
    rope = _read_table(hf, table, partial, is_latent)
    if hf.get(_OLDER) and hf.get(_NEWER):
        other = _read_table(hf, hf[_NEWER], partial, is_latent)
        ours, theirs = ((one.theta, one.scaling, one.partial) for one in (rope, other))
        if ours != theirs:
            raise ConfigError(
                f"{_OLDER} = {show(table)} and {_NEWER} = {show(hf[_NEWER])} contradict each "
                "other, or a key next to them. Keep one of them."
            )
    return rope


def _read_table(
    hf: Mapping[str, Any], table: Mapping[str, Any], partial: Key, is_latent: bool
) -> Rope:
    name = next((name for name in (_OLDER, _NEWER) if hf.get(name) is table), _NEWER)
    nested = [
        key for key, value in table.items() if isinstance(value, Mapping) or key in _LAYER_KINDS
    ]
    if nested:
        raise NotNativeError(
            f"{name}: {list_names(map(show, nested))}: the native decoder has one table for all "
            "layers, not several."
        )
    rope_type: Any = table.get(_TYPE, table.get(_OLD_TYPE, "default"))
    if not isinstance(rope_type, str):
        raise ConfigError(f"{name}: {_TYPE} = {show(rope_type)} is not a text.")
    if rope_type != "default" and rope_type not in ROPE_FIELDS:
        raise NotNativeError(
            f"rope_type {rope_type!a} is not supported by the native decoder, only "
            f"{', '.join(ROPE_FIELDS)}."
        )
    theta = _get_number(hf, table, name, "rope_theta", Rope.theta)
    scaling = _read_scaling(hf, table, rope_type)
    if scaling is not None and is_latent and table.get("mscale_all_dim"):
        if scaling.rope_type != "yarn":
            raise NotNativeError(
                "mscale_all_dim is supported by the native decoder with rope_type 'yarn' alone."
            )
        if table.get("factor") is None:
            raise ConfigError(
                f"{name}: factor = null: with mscale_all_dim transformers needs its value."
            )
    rotated = _get_number(hf, table, name, PARTIAL, MISSING)
    if rotated is MISSING:
        rotated = partial.read(PARTIAL, hf)
    if rotated != 1.0 and partial.default == 1.0:
        raise NotNativeError(
            f"{PARTIAL} = {rotated} is not supported by the native decoder, only 1.0 is."
        )
    return Rope(
        float(theta), scaling, float(rotated), tuple(_find_without_effect(table, name, rope_type))
    )


def _find_without_effect(table: Mapping[str, Any], name: str, rope_type: str) -> Iterator[str]:
    """Sentences about the entries that transformers passes over: of another type, or of none."""
    known = {
        _TYPE,
        _OLD_TYPE,
        "rope_theta",
        PARTIAL,
        *(key for keys in ROPE_FIELDS.get(rope_type, ()) for key in keys),
    }
    if table.get(_OLD_TYPE, rope_type) != rope_type:
        yield (
            f"{name}: type = {show(table[_OLD_TYPE])} has no effect next to rope_type = "
            f"'{rope_type}'."
        )
    extra = []
    for key in sorted(table.keys() - known):
        types = [
            kind for kind, (needed, optional) in ROPE_FIELDS.items() if key in needed + optional
        ]
        near = find_near(key, known)
        hint = (
            f" (only for {', '.join(types)})"
            if types
            else f" (did you mean '{near}'?)"
            if near
            else ""
        )
        extra.append(f"{show(key)}{hint}")
    if extra:
        why = (
            ""
            if {_TYPE, _OLD_TYPE} & table.keys()
            else ": there is no rope_type, so nothing is scaled"
        )
        yield f"{name}: {list_names(extra)} has no effect for rope_type '{rope_type}'{why}."


def _get_number(
    hf: Mapping[str, Any], table: Mapping[str, Any], name: str, key: str, default: Any
) -> Any:
    """Return the number `key` of the table, else of `hf`, which may have null if the number is not
    needed.
    """
    for source, prefix, may_be_null in (
        (table, f"{name}: ", False),
        (hf, "", key in table or default is MISSING),
    ):
        value = source.get(key, MISSING)
        if value is not MISSING and not _is_number(value) and not (value is None and may_be_null):
            raise ConfigError(f"{prefix}{key} = {show(value)} is not a number.")
    value = table.get(key, hf.get(key))
    return default if value is None else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_scaling(
    hf: Mapping[str, Any], table: Mapping[str, Any], rope_type: str
) -> RopeScaling | None:
    if rope_type == "default":
        return None
    needed, optional = ROPE_FIELDS[rope_type]
    values: dict[str, Any] = {key: table.get(key) for key in needed}
    if _ORIGINAL_LENGTH in needed:  # next to the table it counts for more than in it
        values[_ORIGINAL_LENGTH] = hf.get(
            _ORIGINAL_LENGTH, table.get(_ORIGINAL_LENGTH, hf.get("max_position_embeddings"))
        )
    if rope_type == "yarn" and values["factor"] is None and "factor" in table:
        lengths = [hf.get("max_position_embeddings"), values[_ORIGINAL_LENGTH]]
        if all(type(length) is int and length > 0 for length in lengths):
            values["factor"] = lengths[0] / lengths[1]
    values |= {key: table[key] for key in optional if table.get(key) is not None}
    if "truncate" in optional and "truncate" in table and table["truncate"] is None:
        values["truncate"] = False  # as transformers takes it
    wrong = [
        f"{key} = {show(value)}"
        for key, value in values.items()
        if key != "truncate" and not _is_number(value)
    ]
    if wrong:
        raise ConfigError(
            f"rotary embedding of type '{rope_type}': {list_names(wrong)} is not a number."
        )
    if not isinstance(values.get("truncate", True), bool):
        raise ConfigError(
            f"rotary embedding of type '{rope_type}': truncate = {show(values['truncate'])} is not "
            "a bool."
        )
    return RopeScaling(**{"rope_type": rope_type, **values})


def rope_to_hf(scaling: RopeScaling | None, original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table that `read_rope` reads; optional values that are the default only if
    `original` has them.
    """
    rope_type = "default" if scaling is None else scaling.rope_type
    kept = (
        original if original.get("rope_type", original.get("type", "default")) == rope_type else {}
    )
    kept = {key: value for key, value in kept.items() if key not in ("rope_theta", PARTIAL)}
    if scaling is None:
        return kept | {"rope_type": rope_type}
    needed, optional = ROPE_FIELDS[rope_type]
    plain = RopeScaling()
    said = [key for key in optional if key in kept or getattr(scaling, key) != getattr(plain, key)]
    return (
        kept | {"rope_type": rope_type} | {key: getattr(scaling, key) for key in (*needed, *said)}
    )


def check_rope_scaling(scaling: RopeScaling, theta: float) -> list[str]:
    """Values with which frequencies would be none."""
    needed, optional = ROPE_FIELDS[scaling.rope_type]
    positive = [
        name
        for name in (*needed, *optional)
        if name not in ("mscale", "mscale_all_dim", "truncate")
    ]
    problems = [
        f"rope_scaling.{name} = {value} is not positive."
        for name in positive
        if (value := getattr(scaling, name)) is not None and value <= 0
    ]
    problems += [
        f"rope_scaling.{name} = {value} is not between {-_MOST} and {_MOST}."
        for name, value in vars(scaling).items()
        if isinstance(value, int | float) and not -_MOST <= value <= _MOST  # nan too
    ]
    if problems or scaling.rope_type == "linear":
        return problems
    if scaling.rope_type == "yarn" and scaling.factor < 1:
        problems.append(
            f"rope_scaling.factor = {scaling.factor} is less than 1: sequences would be shorter."
        )
    if scaling.rope_type == "yarn" and scaling.attention_scaling <= 0:
        problems.append(
            f"rope_scaling: mscale ({scaling.mscale}) and mscale_all_dim "
            f"({scaling.mscale_all_dim}) make a factor on queries and keys of "
            f"{scaling.attention_scaling:.3g}, which is not positive."
        )
    low, high = (
        ("low_freq_factor", "high_freq_factor")
        if scaling.rope_type == "llama3"
        else ("beta_slow", "beta_fast")
    )
    if getattr(scaling, low) >= getattr(scaling, high):
        problems.append(
            f"rope_scaling.{low} ({getattr(scaling, low)}) is not less than rope_scaling.{high} "
            f"({getattr(scaling, high)})."
        )
    if scaling.rope_type == "yarn" and theta <= 1:
        problems.append(
            f"rope_theta = {theta} is not more than 1, which rope_scaling of type 'yarn' needs."
        )
    return problems
