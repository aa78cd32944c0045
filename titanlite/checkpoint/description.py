"""Everything of a saved model beside its tensors: index, configuration, generation settings and tokenizer."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.folder import INDEX_FILE, read_json
from titanlite.checkpoint.writer import FileLayout
from titanlite.config import AnyModelConfig, ModelConfig, TransformersConfig
from titanlite.errors import CheckpointError
from titanlite.models.families import family_of
from titanlite.models.families.family import KEY_ALIASES
from titanlite.models.hf_config import load_config_and_class, save_config
from titanlite.run_files import read_regular

# What an image-and-text model needs beside a tokenizer.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
# What a config.json that is the base of ours must not hand down: our own values take their place.
_REPLACED_KEYS = {
    *("quantization_config", "transformers_version", "torch_dtype"),
    *("rope_theta", "rope_scaling", "original_max_position_embeddings"),
    "auto_map",  # names files with code, which are not written
}
# What transformers 5 notes in tokenizer_config.json about how it loaded the tokenizer; true of that machine only.
_HOW_LOADED = ("is_local", "local_files_only", "name_or_path", "trust_remote_code", "backend")


def write_hf_files(
    folder: Path,
    files: list[FileLayout],
    config: AnyModelConfig,
    tokenizer: Any,
    dtype: torch.dtype,
    assets: Path | None,
    end_of_turn_ids: Sequence[int] = (),
) -> None:
    """Write index, configuration and tokenizer beside the weights. On one rank.

    `end_of_turn_ids` end a text as well, beside what the model's own generation_config.json says.
    """
    from transformers import GenerationConfig  # costs a second, and only saving needs it

    models = [file for file in files if "/" not in file.name]
    if len(models) > 1:
        places = sorted((item.key, file.name) for file in models for item, _ in file.items)
        index = {
            "metadata": {"total_size": sum(item.nbytes for file in models for item, _ in file.items)},
            "weight_map": dict(places),
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    if isinstance(config, TransformersConfig):
        hf_config = _transformers_config(config, dtype)
    else:
        hf_config = _native_config(config, tokenizer, dtype, assets)
    save_config(hf_config, folder, config.hf if isinstance(config, TransformersConfig) else None)
    if assets is not None and (assets / "generation_config.json").exists():
        shutil.copyfile(assets / "generation_config.json", folder / "generation_config.json")
    else:
        GenerationConfig.from_model_config(hf_config).save_pretrained(folder)
    if end_of_turn_ids:
        _add_end_of_turn(folder / "generation_config.json", end_of_turn_ids)
    save_tokenizer(tokenizer, folder)
    if assets is not None and isinstance(config, TransformersConfig):
        for name in _PROCESSOR_FILES:
            if (assets / name).exists() and not (folder / name).exists():
                shutil.copyfile(assets / name, folder / name)


def _add_end_of_turn(path: Path, ids: Sequence[int]) -> None:
    """A base model that was tuned on chats ends its turns with another token than its texts."""
    config = read_json(path, f"checkpoint: {path.parent}")
    eos = config.get("eos_token_id")
    known = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if missing := [token for token in ids if token not in known]:
        config["eos_token_id"] = known + missing
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a transformers tokenizer, if there is one. On one rank."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        _rewrite_tokenizer_config(folder / "tokenizer_config.json")


def _transformers_config(config: TransformersConfig, dtype: torch.dtype) -> Any:
    """The configuration that the model was built from, with the dtype of what is saved."""
    hf_config, _ = load_config_and_class(config.hf, config.family)
    hf_config.architectures, hf_config.dtype = [config.architecture], dtype
    vars(hf_config).pop("auto_map", None)  # names files with code, which are not written
    return hf_config


def _native_config(config: ModelConfig, tokenizer: Any, dtype: torch.dtype, assets: Path | None) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    original = _read_original(assets, config)
    replaced = {"model_type", "architectures", "dtype", *_REPLACED_KEYS, *KEY_ALIASES.values()}
    base = {key: value for key, value in original.items() if key not in replaced}
    if tokenizer is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            base.setdefault(name, getattr(tokenizer, name))
    ours = family_of(config).to_hf(config, original)
    try:
        return AutoConfig.for_model(config.family, **{**base, **ours, "dtype": str(dtype).removeprefix("torch.")})
    except (TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint: transformers refuses what {assets}/config.json says: {reason}") from None


def _read_original(assets: Path | None, config: ModelConfig) -> dict[str, Any]:
    """The config.json of the model that training began with, if it is of the same family; empty: there is none."""
    path = None if assets is None else assets / "config.json"
    if path is None or not path.exists():
        return {}
    original = json.loads(read_regular(path))
    return original if original.get("model_type") == config.family else {}


def _rewrite_tokenizer_config(path: Path) -> None:
    """Turn what only transformers 5 understands into what 4 does too, and with it many versions of vLLM."""
    table = json.loads(path.read_text(encoding="utf-8"))
    if table.get("tokenizer_class") == "TokenizersBackend":
        table["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(table.get("extra_special_tokens"), list):  # 4 expects a table there, and raises otherwise
        table["additional_special_tokens"] = table.pop("extra_special_tokens")
    table = {key: value for key, value in table.items() if key not in _HOW_LOADED}
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
