"""The only loader of objects that transformers builds from a folder or a config.json, which may be
untrusted.

A model's code is neither run nor downloaded, nothing is unpickled, no question appears on the
terminal, and the network is not used. `tests/unit/base/test_hf_objects.py` finds any other use of
transformers' loaders.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from titanlite.base.files import check_regular, read_json

_TEXT_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab")
# Values other than the known ones name kernels on the hub, `owner/repository`, whose code
# transformers downloads and runs.
_IMPLEMENTATIONS = {
    f"{hidden}{what}_implementation" for hidden in ("", "_") for what in ("attn", "experts")
}
_OWN_IMPLEMENTATIONS = (None, "eager", "sdpa")


def load_from_folder(name: str, folder: str | Path) -> Any:
    """Return the object that the transformers class `name`, such as AutoTokenizer, loads from a
    local folder.

    Raises OSError: a file of the folder is not a regular one. Raises any Exception of transformers:
    a ValueError that names `trust_remote_code` if the classes are code in the folder.
    """
    import transformers

    # some models have a folder for each part
    for path in (*Path(folder).glob("*"), *Path(folder).glob("*/*")):
        if path.suffix in _TEXT_FILES and not path.is_dir():
            check_regular(path)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if name.startswith("AutoModel"):
        options["use_safetensors"] = True
    if name == "AutoTokenizer" and (model_type := _find_unknown(Path(folder))):
        options["config"] = get_config_class(model_type)()
    with _no_terminal():
        return getattr(transformers, name).from_pretrained(str(folder), **options)


def _find_unknown(folder: Path) -> str:
    """Return a model name in the folder's config.json that AutoTokenizer would not know, or ""."""
    with suppress(OSError, ValueError):  # invalid JSON: transformers reports it
        hf = read_json(folder / "config.json")
        model_type = hf.get("model_type") if isinstance(hf, dict) and "auto_map" not in hf else None
        return model_type if isinstance(model_type, str) and not is_known(model_type) else ""
    return ""


def load_tokenizer_file(file: Path) -> Any:
    """Return the tokenizer of a single tokenizer.json. Raises as `load_from_folder`."""
    from transformers import PreTrainedTokenizerFast

    check_regular(file)
    return PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False)


def build_config(hf: Mapping[str, Any]) -> Any:
    """Return the configuration object of `hf`, the content of a config.json.

    Raises Exception: any error of transformers.
    """
    cls = get_config_class(hf["model_type"], *(hf.get("architectures") or []))
    return cls.from_dict(decode(hf))


def is_known(model_type: str) -> bool:
    """Return True if transformers has a configuration class for `model_type`."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def get_config_class(model_type: str, *architectures: str) -> Any:
    """Return transformers' configuration class of `model_type`.

    If transformers does not know it, it is the name of a user's own family. The result is then the
    class of the first known entry of `architectures`, or else the generic class, under this name.
    """
    import transformers

    if is_known(model_type):
        return transformers.CONFIG_MAPPING[model_type]
    models = (getattr(transformers, name, None) for name in architectures)
    base = next(
        (model.config_class for model in models if model is not None), transformers.PreTrainedConfig
    )
    return type(base.__name__, (base,), {"model_type": model_type})


def decode(value: Any) -> Any:
    """Return a copy of a JSON value, with floats in place of transformers' {"__float__":
    "Infinity"}, and without the keys that select kernels for attention or experts: a file must not
    choose them.
    """
    if isinstance(value, Mapping):
        tag = value.get("__float__", "") if len(value) == 1 else ""
        if tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {
            key: decode(item)
            for key, item in value.items()
            if key not in _IMPLEMENTATIONS or item in _OWN_IMPLEMENTATIONS
        }
    return [decode(item) for item in value] if isinstance(value, list | tuple) else value


def build_from_config(cls: Any, config: Any, dtype: Any) -> Any:
    """Return a model of the class `cls`, from a configuration that `build_config` returned."""
    return cls._from_config(config, dtype=dtype)


@contextmanager
def _no_terminal() -> Iterator[None]:
    """Replace standard input by an empty one: transformers asks on the terminal wherever it does
    not pass on `trust_remote_code`.
    """
    terminal = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = terminal
