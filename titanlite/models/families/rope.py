"""The rotary table `rope_parameters` of a config.json, as completed by transformers' classes."""

from collections.abc import Iterator, Mapping
from typing import Any

from titanlite.base.text import list_names
from titanlite.config.model import OPTIONAL_ROPE_FIELDS, ROPE_FIELDS, RopeScaling
from titanlite.models.families.config_json import PARTIAL, show

_MOST = 1e10
_BETWEEN = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


def find_foreign(table: Mapping[str, Any]) -> list[str]:
    """Return one message for each feature of `table` that the native decoder does not implement."""
    problems = []
    # transformers nests one table for each kind of layer under names such as "full_attention"
    nested = [
        key
        for key, value in table.items()
        if isinstance(value, Mapping) or key.endswith("_attention")
    ]
    if nested:
        problems.append(
            f"rope_parameters: {list_names(map(show, nested))}: the native decoder has one table "
            "for all layers."
        )
    rope_type = table["rope_type"]
    if rope_type not in ("default", *ROPE_FIELDS):
        problems.append(
            f"rope_type {show(rope_type)} is not supported by the native decoder, only "
            f"{', '.join(ROPE_FIELDS)}."
        )
    return problems


def find_wrong(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message for each value of `table` with which its type of scaling cannot compute."""
    for key in ("rope_theta", PARTIAL, *ROPE_FIELDS.get(str(table["rope_type"]), ())):
        value = table.get(key, 1.0 if key == PARTIAL else None)
        is_given = value is not None or key not in OPTIONAL_ROPE_FIELDS
        kinds = (bool,) if key == "truncate" else (int, float)
        if is_given and type(value) not in kinds:
            yield f"rope_parameters: {key} = {show(value)} is not a {kinds[-1].__name__}."


def read_scaling(table: Mapping[str, Any]) -> RopeScaling | None:
    """Return the scaling of a table without foreign or wrong values."""
    rope_type = table["rope_type"]
    if rope_type == "default":
        return None
    values = {key: table[key] for key in ROPE_FIELDS[rope_type] if table.get(key) is not None}
    if rope_type == "yarn":  # null means false
        values["truncate"] = bool(table.get("truncate", True))
    return RopeScaling(rope_type, **values)


def rope_to_hf(scaling: RopeScaling | None, original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of `scaling`.

    It keeps entries of `original` that titanlite does not use, if that is of the same type;
    optional values that are the default are written only if `original` has them.
    """
    rope_type = "default" if scaling is None else scaling.rope_type
    if original.get("rope_type", original.get("type", "default")) != rope_type:
        original = {}
    table = {key: value for key, value in original.items() if key not in ("rope_theta", PARTIAL)}
    table["rope_type"] = rope_type
    for key in ROPE_FIELDS.get(rope_type, ()):
        value = getattr(scaling, key)
        is_default = key in OPTIONAL_ROPE_FIELDS and value == getattr(RopeScaling, key)
        if key in original or not is_default:
            table[key] = value
    return table


def check_rope_scaling(scaling: RopeScaling, theta: float) -> list[str]:
    """Return one message for each value with which frequencies could not be computed."""
    problems = []
    for name in ROPE_FIELDS[scaling.rope_type]:
        value = getattr(scaling, name)
        low = -_MOST if name.startswith("mscale") else 1 / _MOST
        if name != "truncate" and value is not None and not low <= value <= _MOST:  # nan too
            problems.append(f"rope_scaling.{name} = {value} is not between {low:g} and {_MOST:g}.")
    if problems or scaling.rope_type == "linear":
        return problems
    names = _BETWEEN[scaling.rope_type]
    low, high = (getattr(scaling, name) for name in names)
    # in yarn, equal ones mean a step
    if low > high or (low == high and scaling.rope_type != "yarn"):
        problems.append(
            f"rope_scaling.{names[0]} ({low}) is not less than rope_scaling.{names[1]} ({high})."
        )
    if scaling.rope_type != "yarn":
        return problems
    if scaling.factor < 1:
        problems.append(
            f"rope_scaling.factor = {scaling.factor} is less than 1: sequences would be shorter."
        )
    if scaling.attention_scaling <= 0:
        problems.append(
            f"rope_scaling: mscale ({scaling.mscale}) and mscale_all_dim "
            f"({scaling.mscale_all_dim}) make a factor on queries and keys of "
            f"{scaling.attention_scaling:.3g}, which is not positive."
        )
    if theta <= 1:
        problems.append(
            f"rope_theta = {theta} is not more than 1, which rope_scaling of type 'yarn' needs."
        )
    return problems
