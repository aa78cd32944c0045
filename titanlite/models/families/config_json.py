"""config.json as transformers reads and writes it: checks before it is read, and the configuration
of a model that transformers implements.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.hf_objects import build_config, decode
from titanlite.base.log import logger
from titanlite.base.text import cut
from titanlite.config.model import TransformersConfig

_THETA = "rope_theta"
PARTIAL = "partial_rotary_factor"
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
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
    "top_k",
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


def transformers_config(hf: Mapping[str, Any], where: str, why: str = "") -> TransformersConfig:
    """Build the configuration of the model that `hf` describes; `where` names it in errors, `why`
    is for the log.

    Raises ConfigError: no class of transformers generates text from it, its weights are in a format
    that cannot be read, or transformers rejects the configuration.
    """
    if problem := describe_unreadable(find_quantization(hf)):
        raise ConfigError(f"{where}: {problem}")
    hf = {  # weights are dequantized while they are read, and saved dequantized
        k: {n: v for n, v in part.items() if n not in QUANTIZATION}
        if isinstance(part, dict)
        else part
        for k, part in hf.items()
        if k not in QUANTIZATION
    }
    config, cls = load_config_and_class(hf, where)
    text = config.get_text_config()
    # The decoder part of such a class (BartForCausalLM) declares that it is not one.
    if any(
        getattr(part, "is_encoder_decoder", False)
        for part in (config, text, type(config), type(text))
    ):
        raise ConfigError(
            f"{where}: {cls.__name__} belongs to an encoder-decoder, which cannot be trained here. "
            "Use a model that has a decoder only."
        )
    hidden = _number(text, "hidden_size") or 0
    heads = _number(text, "num_attention_heads") or 1
    width = heads * (_number(text, "head_dim") or hidden // heads)
    plain, rotary, values = (
        _number(text, f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v")
    )
    if plain and rotary and values:  # latent attention: the mean of keys and values
        width = heads * (plain + rotary + values) // 2
    return TransformersConfig(
        family=config.model_type,
        architecture=cls.__name__,
        hf=hf,
        vocab_size=_number(text, "vocab_size") or 0,
        hidden_size=hidden,
        num_layers=_number(text, "num_hidden_layers") or 0,
        attention_width=width,
        max_position_embeddings=_number(text, "max_position_embeddings"),
        num_experts=_number(text, *_NUM_EXPERTS) or 0,
        top_k=_number(text, *_TOP_K) or 0,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        takes_images=hasattr(config, "vision_config"),
        rope_limit=_get_rope_limit(text),
        why=why,
    )


def cut_layers(config: TransformersConfig, count: int) -> TransformersConfig:
    """Return `config` with only the first `count` layers of its text model."""
    parsed = load_config_and_class(config.hf, config.family)[0]
    text = parsed.get_text_config()
    name = next((key for key in config.hf if getattr(parsed, key, None) is text), "")
    part = dict(config.hf[name] if name else config.hf)
    for key, value in part.items():
        if isinstance(value, list) and len(value) == config.num_layers:  # such as `layer_types`
            part[key] = value[:count]
    names = {"num_hidden_layers", text.attribute_map.get("num_hidden_layers", "num_hidden_layers")}
    part |= dict.fromkeys(names.intersection(part) or names, count)
    return replace(config, hf={**config.hf, name: part} if name else part, num_layers=count)


def _get_rope_limit(text: Any) -> int | None:
    """Return the sequence length beyond which a rotary embedding depends on the longest position of
    a forward, the smallest one if there are several; None if there is none.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    # a single table, or one for each kind of layer
    tables = [rope, *(table for table in rope.values() if isinstance(table, dict))]
    limits = []
    for table in tables:
        if table.get("rope_type") == "longrope":
            longest = getattr(text, "max_position_embeddings", None)
            limits.append(table.get("original_max_position_embeddings") or longest)
    return min(limits) if limits else None


def load_config_and_class(hf: Mapping[str, Any], where: str) -> tuple[Any, type]:
    """Return transformers' configuration, and the class that config.json names, or else the auto
    classes' class for text.

    Raises ConfigError: there is no such class, or transformers rejects the configuration.
    """
    import transformers
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    version = transformers.__version__
    model_type = hf.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{where}: model_type '{model_type}' is not the name of one.")
    if "auto_map" in hf and model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{where}: model_type '{model_type}' comes with Python code of its own, which is never "
            f"run here. Use a model that transformers {version} implements."
        )
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{where}: model_type '{model_type}' has neither a native decoder nor a class in "
            f"transformers {version}. Correct it, install a newer transformers, or train with a "
            "Family of your own in model.name."
        )
    config = read_config(hf, where)
    classes = list[Any]()
    known = set[Any]()
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM):
        found: Any = auto._model_mapping.get(type(config), None)  # type: ignore[attr-defined]
        classes += (
            list(found) if isinstance(found, tuple | list) else [found] if found is not None else []
        )
        known.update(auto._model_mapping._model_mapping.values())  # type: ignore[attr-defined]
    named = hf.get("architectures") or []
    # the mappings may list the class under the type of the larger model (musicgen for
    # musicgen_decoder)
    if not classes:
        classes = [getattr(transformers, str(name)) for name in named if str(name) in known]
        classes = [cls for cls in classes if cls.config_class is type(config)]
    if not classes:
        raise ConfigError(
            f"{where}: transformers {version} has no class that generates text for model_type "
            f"'{model_type}'."
        )
    cls = next((cls for cls in classes if cls.__name__ in named), classes[0])
    # as in `from_config`: the configuration of the text part
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return next((part for part in parts if type(part) is cls.config_class), config), cls


def read_config(hf: Mapping[str, Any], where: str) -> Any:
    """Return the object of transformers' configuration class for `hf`, the content of a
    config.json; `where` names it in errors.

    Raises ConfigError: transformers rejects it, or would take minutes to read it.
    """
    raise_problems(ConfigError, where, list(find_absurd(decode(hf))))

    def build(table: Mapping[str, Any]) -> Any:
        return build_config({**table, "model_type": hf["model_type"]})

    try:
        return build(hf)
    except Exception as error:  # noqa: BLE001 - transformers refuses values with all kinds of them
        named = ", ".join(f"{key} = {show(hf[key])}" for key in find_refused(build, hf, error))
        text = f"{named}: {format_refusal(error)}" if named else format_refusal(error)
        raise ConfigError(f"{where}: transformers refuses it: {text}. Correct it there.") from None


def find_refused(
    build: Callable[[Mapping[str, Any]], Any], values: Mapping[str, Any], error: Exception
) -> list[str]:
    """Return the keys of `values` that cause `error` in `build`: without any one of them, `build`
    raises no error, or a different one.
    """
    named = re.match(r"Validation error for field '(\w+)'", str(error))
    if named and named[1] in values:
        return [named[1]]
    found = []
    for key in values:
        try:
            build({name: value for name, value in values.items() if name != key})
        except Exception as other:  # noqa: BLE001 - of transformers, all kinds of them
            if str(other) == str(error):
                continue
        found.append(key)
    return found


def format_refusal(error: Exception) -> str:
    """Return class and text of `error` in one line; for transformers' strict classes, the text of
    the underlying error.
    """
    text = " ".join(str(error).split()).partition(". Errors: ")[0]
    text = re.sub(r"<class '(\w+)'>", r"\1", text).rstrip(".")
    strict = re.fullmatch(r"(?:Class v|V)alidation error for \w+ '\w+': (.*)", text)
    return cut(strict[1] if strict else f"{type(error).__name__}: {text}")


def save_config(config: Any, folder: Path) -> None:
    """Write transformers' `config` as config.json.

    The file has the names of transformers 5, and also names that transformers 4 and llama.cpp read:
    `rope_theta` and `rope_scaling` beside `rope_parameters`, and `num_experts`.
    """
    config.save_pretrained(folder)
    path = folder / "config.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    both = _with_older_keys(table)
    read, expected = (build_config(form).to_dict() for form in (both, table))
    # if both have a key, the table counts
    own = expected.keys() - (expected.get("rope_parameters") or {})
    if all(read.get(key) == expected[key] for key in own):
        path.write_text(json.dumps(both, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    else:
        logger.warning(
            "config.json: transformers 4 will not read the rotary embeddings; 5 would misread its "
            "keys."
        )


def _with_older_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(table)
    rope = table.get("rope_parameters") or {}
    # not for one table per kind of layer, for which transformers 4 has no common names
    if _THETA in rope:
        both |= {key: rope[key] for key in (_THETA, PARTIAL) if key in rope}
        scaling = {key: value for key, value in rope.items() if key not in (_THETA, PARTIAL)}
        both["rope_scaling"] = scaling if len(scaling) > 1 else None
    if "num_local_experts" in table:
        both["num_experts"] = table["num_local_experts"]
    return both


def _number(config: Any, *names: str) -> int | None:
    """Return the first attribute that is a number; for a list with one number per layer, the
    largest.
    """
    for name in names:
        try:
            value: Any = getattr(config, name, None)
        # one per layer (Gemma 4); transformers has no value for the whole model
        except RuntimeError:
            value = [getattr(layer, name, None) for layer in config.per_layer_config]
        if (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(item, int) for item in value)
        ):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
