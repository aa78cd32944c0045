"""Rotary embeddings in a Hugging Face config.json: base, scaling, and the rotated part of a head."""

import math
from collections.abc import Mapping
from typing import Any

from titanlite.config.model import ROPE_FIELDS, RopeScaling
from titanlite.errors import ConfigError

PARTIAL = "partial_rotary_factor"
_ORIGINAL_LENGTH = "original_max_position_embeddings"


class NotNativeError(ConfigError):
    """A sound config.json that asks for something that the native decoder lacks; transformers may have it."""


def rope_table(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters`, or the older `rope_scaling`."""
    table = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"rope_parameters or rope_scaling = {table!r} is not a table.")
    return table


def read_rope(hf: Mapping[str, Any], table: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
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


def rope_to_hf(scaling: RopeScaling | None, original: Mapping[str, Any]) -> dict[str, Any]:
    """The table that `read_rope` reads, without what may be left out and says nothing, unless `original` says it."""
    rope_type = "default" if scaling is None else scaling.rope_type
    kept = original if original.get("rope_type", original.get("type", "default")) == rope_type else {}
    kept = {key: value for key, value in kept.items() if key not in ("rope_theta", PARTIAL)}
    if scaling is None:
        return kept | {"rope_type": rope_type}
    needed, optional = ROPE_FIELDS[rope_type]
    plain = RopeScaling()
    said = [key for key in optional if key in kept or getattr(scaling, key) != getattr(plain, key)]
    return kept | {"rope_type": rope_type} | {key: getattr(scaling, key) for key in (*needed, *said)}


def check_rope_scaling(scaling: RopeScaling, theta: float) -> list[str]:
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
