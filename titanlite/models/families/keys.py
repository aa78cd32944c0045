"""Keys of a Hugging Face config.json: the kind that transformers demands, and what a missing key and null mean there.

Transformers' configuration classes are strict: they refuse an integer for a float, and null where it is not declared.
Where null is declared, it can still mean something else than the default, or nothing that the model can compute with.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MISSING: Any = object()
"""Stands for a default or a meaning that does not exist."""

_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", lambda value: type(value) is int),
    "float": ("a number with a decimal point", lambda value: isinstance(value, float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "dict": ("an object", lambda value: isinstance(value, dict)),
    "list[int]": ("a list of integers", lambda value: _is_list_of(value, int)),
    "list[str]": ("a list of texts", lambda value: _is_list_of(value, str)),
    "None": ("null", lambda value: value is None),
}
QUANTIZATION = ("quantization_config", "compression_config")
_MOST_SHOWN = 80
# No key counts anything larger; a size of its own has a smaller limit in `limits`.
_MOST = 2**31


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


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
                f" Write {float(value)}." if type(value) is int and abs(value) < _MOST and "float" in self.kind else ""
            )
            if value is None:
                return f"{key} is missing. It is null, but transformers expects {wanted}."
            return f"{key} = {show(value)} is of the wrong type: transformers expects {wanted}.{hint}"
        if type(value) is int and abs(value) > _MOST:
            return f"{key} = {show(value)} is more than {_MOST}."
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
    has_blocks = block is None or (_is_list_of(block, int) and len(block) == 2 and min(block) > 0)
    if quantization is None or method == "mxfp4" or (is_fp8 and has_blocks):
        return ""
    given = {key: found[key] for key in ("quant_algo", "expert_dtype", "weight_block_size") if key in found}
    return (
        f"quantization_config: weights of quant_method {show(method)}{f' ({show(given)})' if given else ''} cannot be "
        "read, only those of 'fp8' (weight_block_size: two numbers, or null) and 'mxfp4' can. Give the folder of the "
        "weights that were quantized."
    )


def find_infinite(value: Any, path: str = "") -> Iterator[str]:
    """Yield the places in `value` with a number that is not finite, such as 1e400."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path} = {show(value)} is not a finite number."
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from find_infinite(item, f"{path}.{key}" if path else str(key))


def find_contradictions(hf: Mapping[str, Any]) -> list[str]:
    """Values of the right kinds that transformers refuses, or that break its model; one message each."""
    problems = []
    vocab_size, count = hf.get("vocab_size", 0), hf.get("num_hidden_layers")
    if hf.get("pad_token_id") is not None and not -vocab_size <= hf["pad_token_id"] < vocab_size:
        problems.append(
            f"pad_token_id = {hf['pad_token_id']} is no row of an embedding with vocab_size = {vocab_size}."
        )
    if hf.get("return_dict", True) is not True:
        problems.append(f"return_dict = {show(hf['return_dict'])}: transformers' models work with True alone.")
    if hf.get("decoder_sparse_step", 1) < 1:
        problems.append(f"decoder_sparse_step = {hf['decoder_sparse_step']} is not positive.")
    rotated = hf.get("qk_rope_head_dim")
    if rotated is not None and hf.get("head_dim", rotated) != rotated:
        problems.append(f"head_dim = {hf['head_dim']} is not qk_rope_head_dim = {rotated}, as transformers needs it.")
    for name in ("layer_types", "mlp_layer_types"):
        types = hf.get(name)
        if types is not None and len(types) != count:
            problems.append(f"{name} has {len(types)} entries, but num_hidden_layers = {count}.")
    if set(hf.get("mlp_layer_types") or ()) - {"sparse", "dense"}:
        problems.append(f"mlp_layer_types = {show(hf['mlp_layer_types'])}: transformers knows 'sparse' and 'dense'.")
    labels, ids = hf.get("id2label") or {}, hf.get("label2id") or {}
    if not all(_is_number(name) and isinstance(label, str) for name, label in labels.items()):
        problems.append(f"id2label = {show(labels)}: transformers expects texts by number.")
    if {type(number) for number in ids.values()} not in (set(), {int}, {str}):
        problems.append(f"label2id = {show(ids)}: transformers expects numbers by text.")
    if not 0 <= hf.get("num_labels", 0) <= _MOST_LABELS:
        problems.append(f"num_labels = {hf['num_labels']} is not between 0 and {_MOST_LABELS}.")
    for name in ("dtype", "torch_dtype"):
        if hf.get(name) is not None and hf[name] not in _DTYPES:
            problems.append(f"{name} = {show(hf[name])} is no dtype of weights: {', '.join(_DTYPES)}.")
    if hf.get("problem_type") not in _PROBLEM_TYPES:
        problems.append(f"problem_type = {show(hf['problem_type'])} is none that transformers knows.")
    return problems


def _is_number(text: Any) -> bool:
    return str(text).isascii() and str(text).removeprefix("-").isdigit()


def get_padding_row(hf: Mapping[str, Any]) -> int | None:
    """Return the embedding row that transformers gives no gradient; a negative `pad_token_id` counts from the end."""
    row = hf.get("pad_token_id")
    return row + hf["vocab_size"] if row is not None and row < 0 else row


def find_other_loss(hf: Mapping[str, Any]) -> list[str]:
    """Return what transformers would add to the training loss, and titanlite does not."""
    if not hf.get("output_router_logits"):
        return []
    coefficient = hf.get("router_aux_loss_coef", hf.get("router_aux_loss_coefficient"))
    return [
        f"output_router_logits is true: transformers would add a balance loss, weighed by router_aux_loss_coef "
        f"({'its default' if coefficient is None else show(coefficient)}), to the training loss. Nothing is added here "
        "because of it: set moe.aux_loss_coeff for a balance loss of the native decoder."
    ]


_MOST_LABELS = 2**16
_DTYPES = ("float32", "float16", "bfloat16", "float64", "float", "half", "double", "float8_e4m3fn", "float8_e5m2")
_PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")


def _heads(hf: Mapping[str, Any]) -> Any:
    return hf.get("num_attention_heads", MISSING)


def _share(hf: Mapping[str, Any]) -> Any:
    """Return what transformers takes for the width of a head: an equal share of the hidden width."""
    hidden, heads = hf.get("hidden_size", MISSING), _heads(hf)
    return MISSING if MISSING in (hidden, heads) else hidden // heads if heads > 0 else 0


HEADS, SHARE = _heads, _share

# Of every class, and without effect on what the model computes.
_BASE: Mapping[str, Key] = {
    **dict.fromkeys(("transformers_version", "dtype", "torch_dtype", "problem_type"), Key("str | None")),
    **dict.fromkeys(("output_hidden_states", "return_dict"), Key("bool | None")),
    **dict.fromkeys(("is_encoder_decoder", "use_cache"), Key("bool")),
    **dict.fromkeys(("chunk_size_feed_forward", "num_labels"), Key("int")),
    **dict.fromkeys(("id2label", "label2id"), Key("dict | None")),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), Key("int | None")),
    "architectures": Key("list[str] | None"),
    "eos_token_id": Key("int | list[int] | None"),
}
# Of all families; where a class differs, its family says so.
COMMON_DECLARED: Mapping[str, Key] = {
    **_BASE,
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), Key("int")),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "max_position_embeddings"), Key("int")),
    "num_key_value_heads": Key("int | None", 32, HEADS),
    # Most classes do not declare it. Then its absence means a share of the width, and null breaks the model.
    "head_dim": Key("int", SHARE),
    "hidden_act": Key("str", "silu"),
    "initializer_range": Key("float", 0.02),
    "rms_norm_eps": Key("float"),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias"), Key("bool", False)),
    "attention_dropout": Key("float | int", 0.0),
    "is_causal": Key("bool"),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), Key("dict | None")),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), Key("list[str] | None")),
}
MOE_DECLARED: Mapping[str, Key] = {
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size", "num_local_experts"), Key("int")),
    "output_router_logits": Key("bool"),
}
WINDOW_DECLARED: Mapping[str, Key] = {
    "use_sliding_window": Key("bool", False),
    "sliding_window": Key("int | None", 4096),
    "max_window_layers": Key("int", 28),
}
