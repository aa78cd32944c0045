"""Keys of a Hugging Face config.json: the kind that transformers demands, and what a missing key and null mean there.

Transformers' configuration classes are strict: they refuse an integer for a float, and null where it is not declared.
Where null is declared, it can still mean something else than the default, or nothing that the model can compute with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MISSING: Any = object()
"""Stands for a default or a meaning that does not exist."""

_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", lambda value: type(value) is int),
    "float": ("a number with a decimal point", lambda value: isinstance(value, float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "None": ("null", lambda value: value is None),
}
QUANTIZATION = ("quantization_config", "compression_config")
_MOST_SHOWN = 80


@dataclass(frozen=True)
class Key:
    """One key of config.json.

    Attributes:
        kind: what transformers' class declares, in its words: "int | None".
        default: value of a missing key, or a function of the configuration that gives it; MISSING: it must be there.
        null: the same for null, where `kind` allows it; MISSING: transformers' model cannot compute with it.
    """

    kind: str
    default: Any = MISSING
    null: Any = MISSING

    def find_problem(self, key: str, value: Any) -> str | None:
        """Return what is wrong with `value`, if anything."""
        if not any(_KINDS[kind][1](value) for kind in self.kind.split(" | ")):
            wanted = " or ".join(_KINDS[kind][0] for kind in self.kind.split(" | "))
            hint = (
                f" Write {float(value)}." if type(value) is int and abs(value) < 2**31 and "float" in self.kind else ""
            )
            if value is None:
                return f"{key} is missing. It is null, but transformers expects {wanted}."
            return f"{key} = {show(value)} is of the wrong type: transformers expects {wanted}.{hint}"
        return None

    def read(self, key: str, hf: Mapping[str, Any]) -> Any:
        """Return the value of `key` in `hf`, whose kinds are right; MISSING if there is none to compute with."""
        value = hf.get(key, MISSING)
        meaning = self.default if value is MISSING else self.null if value is None else value
        return meaning(hf) if callable(meaning) else meaning


def show(value: Any) -> str:
    """`value` of a config.json as it may stand in a message: printable, and not long."""
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


def get_padding_row(hf: Mapping[str, Any]) -> int | None:
    """Return the embedding row that transformers gives no gradient; a negative `pad_token_id` counts from the end."""
    row = hf.get("pad_token_id")
    return row + hf["vocab_size"] if row is not None and row < 0 else row


def _heads(hf: Mapping[str, Any]) -> Any:
    return hf.get("num_attention_heads", MISSING)


def _share(hf: Mapping[str, Any]) -> Any:
    """Return what transformers takes for the width of a head: an equal share of the hidden width."""
    hidden, heads = hf.get("hidden_size", MISSING), _heads(hf)
    return MISSING if MISSING in (hidden, heads) else hidden // heads if heads > 0 else 0


HEADS, SHARE = _heads, _share

# What is read of all families; where a class differs, its family says so. Keys without effect on what the model
# computes are not here: transformers looks at them when the config.json to be saved is built, before training.
COMMON_DECLARED: Mapping[str, Key] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), Key("int")),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "max_position_embeddings"), Key("int")),
    "num_key_value_heads": Key("int | None", 32, HEADS),
    # Most classes do not declare it. Then its absence means a share of the width, and null breaks the model.
    "head_dim": Key("int", SHARE),
    "initializer_range": Key("float", 0.02),
    "rms_norm_eps": Key("float"),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias"), Key("bool", False)),
    "pad_token_id": Key("int | None"),
}
MOE_DECLARED: Mapping[str, Key] = {
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size", "num_local_experts"), Key("int")),
}
