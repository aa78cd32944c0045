"""Checks of config.json before transformers' class reads it: absurd sizes, quantization."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from titanlite.base.errors import ConfigError

QUANTIZATION = ("quantization_config", "compression_config")
_MOST_SHOWN = 80
# A hundred times as many as in the largest models; more would overflow sizes.
MOST_PARAMETERS = 2**50
# transformers creates lists and modules with these numbers, which would take minutes, or all
# memory.
MOST_LAYERS = 4096
_MOST_EXPERTS = 2**20  # summed over all layers
_COUNTS = (
    (r"^(?!max_|first_)\w*layers?$|^depths?$", MOST_LAYERS),
    (r"experts$", 2**16),
    (r"^num_labels$", 2**16),
)


class NotNativeError(ConfigError):
    """A valid config.json with a feature that the native decoder does not have; transformers may
    have it.
    """


def show(value: Any) -> str:
    """Return `value` of a config.json in a form fit for a message: printable and short."""
    text = "null" if value is None else ascii(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def find_quantization(hf: Mapping[str, Any]) -> Any:
    """Return the description of quantized weights in `hf`, or in one of its parts; or None."""
    parts = [hf, *(value for value in hf.values() if isinstance(value, Mapping))]
    return next(
        (part[key] for part in parts for key in QUANTIZATION if part.get(key) is not None), None
    )


def describe_unreadable(quantization: Any) -> str:
    """Return why weights of `quantization` cannot be read; "" if they can be dequantized while they
    are read.
    """
    found = quantization if isinstance(quantization, Mapping) else {}
    method = found.get("quant_method")
    block = found.get("weight_block_size", [128, 128])
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


def find_absurd(hf: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield one message for each count in `hf` that no model has, and for each number that is not
    finite.

    Lists may hold infinities: some state-space models use them as bounds of time steps.
    """
    numbers = [
        (str(key), item)
        for key, value in hf.items()
        for item in (value if isinstance(value, list) else [value])
    ]
    for key, number in numbers:
        if isinstance(number, Mapping):
            yield from find_absurd(number, f"{path}{key}.")
        elif number is hf.get(key) and isinstance(number, float) and not math.isfinite(number):
            yield f"{path}{key} = {show(number)} is not a finite number."
    largest = []
    for pattern, most in _COUNTS:
        counts = [(key, n) for key, n in numbers if type(n) is int and re.search(pattern, key)]
        yield from (
            f"{path}{key} = {show(n)} is more than {most}." for key, n in counts if n > most
        )
        largest.append(min(max((n for _, n in counts), default=0), most))
    layers, experts, _ = largest
    if layers * experts > _MOST_EXPERTS:
        yield (
            f"{path}{layers} layers of {experts} experts have {layers * experts} in all, more than "
            f"{_MOST_EXPERTS}."
        )
