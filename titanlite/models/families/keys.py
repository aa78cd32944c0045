"""Keys of a Hugging Face config.json: what a missing key and null mean, and quantized weights.

Transformers' configuration classes are strict: they refuse an integer for a float, and null where it is not declared.
Where null is declared, it can still mean something else than the default, or nothing that the model can compute with.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MISSING: Any = object()
"""Stands for a default or a meaning that does not exist."""

QUANTIZATION = ("quantization_config", "compression_config")
_MOST_SHOWN = 80


@dataclass(frozen=True)
class Key:
    """Meaning of a key of config.json that is missing or null: a value, or a function of the configuration."""

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
    parts = [hf, *(value for key, value in hf.items() if key.endswith("_config") and isinstance(value, Mapping))]
    return next((part[key] for part in parts for key in QUANTIZATION if part.get(key) is not None), None)


def describe_unreadable(quantization: Any) -> str:
    """Return why weights of `quantization` cannot be read; empty if they can, dequantized on the way."""
    found = quantization if isinstance(quantization, Mapping) else {}
    method, block = found.get("quant_method"), found.get("weight_block_size", [128, 128])
    is_fp8 = method == "fp8" and found.get("expert_dtype", "fp8") == "fp8"
    is_pair = isinstance(block, list) and [type(size) for size in block] == [int, int]
    has_blocks = block is None or (is_pair and min(block) > 0)
    if quantization is None or method == "mxfp4" or (is_fp8 and has_blocks):
        return ""
    given = {key: found[key] for key in ("quant_algo", "expert_dtype", "weight_block_size") if key in found}
    return (
        f"quantization_config: weights of quant_method {show(method)}{f' ({show(given)})' if given else ''} cannot be "
        "read, only those of 'fp8' (weight_block_size: two numbers, or null) and 'mxfp4' can. Give the folder of the "
        "weights that were quantized."
    )


def _heads(hf: Mapping[str, Any]) -> Any:
    return hf.get("num_attention_heads", MISSING)


def _share(hf: Mapping[str, Any]) -> Any:
    """Return what transformers takes for the width of a head: an equal share of the hidden width."""
    hidden, heads = hf.get("hidden_size", MISSING), _heads(hf)
    return MISSING if MISSING in (hidden, heads) else hidden // heads if heads > 0 else 0


HEADS, SHARE = _heads, _share

# What transformers' classes agree on; where one differs, its family says so. Keys without effect on what the model
# computes are not here: transformers looks at them when the config.json to be saved is built, before training.
COMMON_DECLARED: Mapping[str, Key] = {
    "num_key_value_heads": Key(32, HEADS),
    "head_dim": Key(SHARE),  # most classes do not declare it, and null breaks their model
    "initializer_range": Key(0.02),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias"), Key(False)),
    "pad_token_id": Key(None, None),
}


# A hundred times what the largest models have; beyond, sizes overflow, and layers take minutes to be described.
MOST_PARAMETERS = 2**50


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
        for number in value if isinstance(value, list) else [value]:
            most = next((most for pattern, most in _MOST_OF if re.search(pattern, str(key))), None)
            if type(number) is int and most is not None and abs(number) > most:
                yield f"{name} = {show(number)} is more than {most}."


# What transformers makes modules, lists or tables of; then widths, whose products torch bounds.
_MOST_OF = (
    (r"^(?!max_|first_)\w*layers?$|^depths?$", 4096),
    (r"experts$|^num_labels$", 2**16),
    (r"size|dim|heads|rank|^d_|_d$|channels|groups|width|vocab|position|^n_ctx$", 2**27),
    (r"^num_|^n_|_freq$|_step$|_interval$|window|length", 2**31),
)
