"""The files of a saved model that hold no tensors: its configuration and generation settings.

They are built and checked once, before anything is trained; a save only writes them.
"""

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from titanlite import __version__
from titanlite.base.errors import CheckpointError
from titanlite.base.files import render, saving_as
from titanlite.base.hf_objects import get_config_class
from titanlite.checkpoint.folder import read_json
from titanlite.config import AnyModelConfig, ModelConfig, TransformersConfig
from titanlite.models.families import family_of
from titanlite.models.families.config_json import (
    format_refusal,
    load_config_and_class,
    save_config,
)
from titanlite.models.families.family import TEXT_CONFIG

# Token ids by their names in config.json, such as `eos_token_id`.
TokenIds = Mapping[str, int | None]
_GENERATION = "generation_config.json"

# Files that an image-and-text model needs next to the tokenizer.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
# Keys that are not copied from the original config.json: titanlite writes its own values.
_REPLACED_KEYS = {
    "model_type",
    "architectures",
    "dtype",
    "quantization_config",
    "transformers_version",
    "torch_dtype",
    "rope_theta",
    "rope_scaling",
    "original_max_position_embeddings",
    "num_local_experts",  # another name of the number of experts
    "auto_map",  # names files with code, which are not written
}


def describe_model(
    config: AnyModelConfig,
    token_ids: TokenIds,
    dtype: torch.dtype,
    assets: Path | None,
    end_of_turn_ids: Sequence[int] = (),
) -> dict[str, bytes]:
    """Return the files next to the weights (content by file name), after transformers has read
    them. Call on one rank.

    `dtype` is the dtype of the parameters on disk. Values that titanlite has no setting for are
    taken from `assets`, the folder of the model that training began with, and then from
    `token_ids`. `end_of_turn_ids` are added to the ids that end a text.

    Raises CheckpointError: transformers rejects a value; names the value and the file that it is
    from.
    """

    from transformers import GenerationConfig  # takes a second to import, and only saving needs it

    source = "of the model" if assets is None else f"from {assets}"

    def write(folder: Path) -> None:
        if isinstance(config, TransformersConfig):
            hf_config, _ = load_config_and_class(config.hf, config.family)
            hf_config.architectures = [config.architecture]
            hf_config.dtype = dtype
            vars(hf_config).pop("auto_map", None)  # names files with code, which are not written
        else:
            hf_config = _native_config(config, token_ids, dtype, assets)
        with saving_as(f"config.json ({source})"):
            save_config(hf_config, folder)
        with saving_as(f"{_GENERATION} ({source})"):
            if assets is not None and (assets / _GENERATION).exists():
                GenerationConfig.from_dict(read_json(assets / _GENERATION, str(assets)))
                shutil.copyfile(assets / _GENERATION, folder / _GENERATION)
            else:
                GenerationConfig.from_model_config(hf_config).save_pretrained(folder)
        if end_of_turn_ids:
            _add_end_of_turn(folder / _GENERATION, end_of_turn_ids)
        if assets is not None and isinstance(config, TransformersConfig):
            copy_processor(assets, folder)

    return render("the description of the model", write)


def copy_processor(assets: Path, folder: Path) -> None:
    """Copy the files of an image-and-text model that are next to the tokenizer, unless `folder` has
    them.
    """
    for name in _PROCESSOR_FILES:
        if (assets / name).exists() and not (folder / name).exists():
            shutil.copyfile(assets / name, folder / name)


@cache
def describe_versions() -> dict[str, str]:
    """Return the versions of the packages that write a checkpoint."""
    return {
        "titanlite": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _native_config(
    config: ModelConfig, token_ids: TokenIds, dtype: torch.dtype, assets: Path | None
) -> Any:
    """Build transformers' configuration of the model, which checks all values.

    Raises CheckpointError: transformers rejects values; names the files and settings that they are
    from.
    """
    values = _values_of(config, token_ids, assets)
    values["dtype"] = str(dtype).removeprefix("torch.")
    family = family_of(config)
    try:
        hf_config = get_config_class(family.name, family.architecture)(**copy.deepcopy(values))
        if hasattr(hf_config, "validate"):  # some classes have no validation
            hf_config.validate()
    except Exception as error:
        origins = "[model] and the tokenizer"
        if assets is not None:
            origins = f"{assets}/config.json, {origins}"
        raise CheckpointError(
            f"checkpoint: transformers {version('transformers')} refuses the config.json to be "
            f"saved: {format_refusal(error)}. Its values are from {origins}. Correct it there."
        ) from error
    return hf_config


def _values_of(config: ModelConfig, token_ids: TokenIds, assets: Path | None) -> dict[str, Any]:
    """Return the values for config.json; keys that titanlite has no setting for keep the original's
    values.
    """
    path = None if assets is None else assets / "config.json"
    original = read_json(path, str(assets)) if path is not None and path.exists() else {}
    family = family_of(config)
    if family.is_in_larger(original):
        original = {"model_type": family.name, **(original.get(TEXT_CONFIG) or {})}
    if original.get("model_type") not in family.model_types:
        original = {}
    ours = family.to_hf(config, original)
    base = without_replaced(original)
    # Lists with one entry per layer are derived anew.
    if (count := original.get("num_hidden_layers")) != config.num_layers:
        base = {key: v for key, v in base.items() if not (isinstance(v, list) and len(v) == count)}
        if "max_window_layers" in base:
            base["max_window_layers"] = config.num_layers
    return {**token_ids, **base, **ours}


def without_replaced(original: Mapping[str, Any]) -> dict[str, Any]:
    """Return an original config.json without the keys for which titanlite writes its own values."""
    return {key: value for key, value in original.items() if key not in _REPLACED_KEYS}


def _add_end_of_turn(path: Path, ids: Sequence[int]) -> None:
    """Add `ids` to `eos_token_id`: after a base model was tuned on chats, turns and documents end
    with different tokens.
    """
    config = read_json(path, f"checkpoint: {path.parent}")
    eos = config.get("eos_token_id")
    known = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if missing := [token for token in ids if token not in known]:
        config["eos_token_id"] = known + missing
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
