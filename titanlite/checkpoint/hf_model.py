"""Save the sharded model as a Hugging Face folder that `from_pretrained` loads as it stands."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.commit import commit_folder
from titanlite.checkpoint.folder import INDEX_FILE, OWN_FOLDER, read_json
from titanlite.checkpoint.keys import MASTER_PREFIX, SIDECAR_FILE, checkpoint_pieces, is_sidecar, whole
from titanlite.checkpoint.transformers_checkpoint import saved_entries, transformers_items
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.config import AnyModelConfig, ModelConfig, TransformersConfig
from titanlite.errors import CheckpointError
from titanlite.logger import logger
from titanlite.materialize import Plan, TensorEntry
from titanlite.materialize.agree import gather_objects
from titanlite.materialize.layout import local_of
from titanlite.materialize.replicas import share_out
from titanlite.models.build import AnyModel
from titanlite.models.families import family_of
from titanlite.models.families.family import KEY_ALIASES
from titanlite.models.hf_config import load_config_and_class
from titanlite.models.transformers_model import TransformersModel

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


def save_hf_model(
    model: AnyModel,
    plan: Plan,
    tokenizer: Any,
    folder: Path,
    dtype: torch.dtype,
    assets: Path | None = None,
) -> None:
    """Write weights, config.json, generation_config.json and tokenizer into `folder`, as `save_pretrained` would.

    The folder appears in one step, see `commit_folder`. Parameters are cast to `dtype`; buffers keep theirs.

    Args:
        model: the model, materialized.
        plan: its plan.
        tokenizer: a transformers tokenizer, or None to leave it out.
        folder: where to; an older folder is replaced.
        dtype: dtype of the parameters on disk.
        assets: folder of the model that training began with; what its config.json and generation_config.json say
            beyond the architecture is kept.

    Raises:
        CheckpointError: on all ranks, if any rank could not write; `folder` is untouched.

    Collectives: three small ones; every rank must call, and all ranks must see the same file system.
    """
    files = model_files(plan, model.config, dtype)
    commit_folder(folder, files, lambda path: write_hf_files(path, files, model.config, tokenizer, dtype, assets))
    warn_of_sidecar(model.config, files)


def model_files(plan: Plan, config: AnyModelConfig, dtype: torch.dtype, *, exact: bool = False) -> list[FileLayout]:
    """Layout of the model's files, the same on all ranks: in the model's order, with Hugging Face's keys.

    What the architecture has no key for goes to a file in the titanlite folder. With `exact`, so do parameters that
    lose bits in `dtype`, once more in their own dtype, for a resumed run to go on from.

    Raises:
        CheckpointError: a tensor is kept in another form than its values. The same on all ranks.

    Collectives: for a model of transformers those of `transformers_items`, with pipeline stages one gather of small
    objects; every rank must call.
    """
    if encoded := [f"{entry.fqn} ({entry.form})" for entry in plan.entries if entry.encoding is not None]:
        raise CheckpointError(
            f"checkpoint: {encoded[0]} and {len(encoded) - 1} other tensors are kept in few bits, which no model is "
            "saved in. Save the adapters, and merge them: python -m titanlite export --merge."
        )
    if isinstance(config, TransformersConfig):
        return _transformers_files(plan, dtype, exact=exact)
    family = family_of(config)
    model: list[Item] = []
    sidecar: list[Item] = []
    masters: list[Item] = []
    entries = [entry for entry in plan.entries if entry.info.persistent]
    used = _find_used([entry for entry in entries if is_sidecar(entry.fqn, family)], plan.group is not None)
    for entry, share in zip(entries, share_out((entry.tensor for entry in entries), plan.group), strict=True):
        local, region = local_of(entry.tensor), entry.region
        stored = dtype if entry.info.kind == "parameter" else entry.dtype
        if is_sidecar(entry.fqn, family):
            if entry.fqn in used:
                piece = whole(entry.fqn, entry.info.shape)
                sidecar.append(Item(entry.fqn, stored, piece.region, piece.shape, local, region, share.mine))
            continue
        for piece in checkpoint_pieces(entry.fqn, entry.info.shape, family):
            model.append(Item(piece.key, stored, piece.region, piece.shape, local, region, share.mine))
        if exact and stored.itemsize < entry.dtype.itemsize:
            piece = whole(MASTER_PREFIX + entry.fqn, entry.info.shape)
            masters.append(Item(piece.key, entry.dtype, piece.region, piece.shape, local, region, share.mine))
    return [
        *lay_out(model, "model"),
        *(lay_out(sidecar, f"{OWN_FOLDER}/{SIDECAR_FILE.removesuffix('.safetensors')}") if sidecar else []),
        *(lay_out(masters, f"{OWN_FOLDER}/weights") if masters else []),
    ]


def _find_used(buffers: Sequence[TensorEntry], in_stages: bool) -> set[str]:
    """Names of those that are not all zeros. The ranks that hold one decide alike, and tell other stages."""
    found = {entry.fqn for entry in buffers if bool(local_of(entry.tensor).count_nonzero())}
    return set().union(*gather_objects(found)) if in_stages else found


def _transformers_files(plan: Plan, dtype: torch.dtype, *, exact: bool) -> list[FileLayout]:
    assert isinstance(plan.model, TransformersModel)
    entries = saved_entries(plan.entries, plan.model)
    shares = share_out(entry.tensor for entry in entries.values())
    mine = {name: share.mine for name, share in zip(entries, shares, strict=True)}
    masters = []
    for name, entry in entries.items():
        if exact and entry.info.kind == "parameter" and dtype.itemsize < entry.dtype.itemsize:
            piece = whole(MASTER_PREFIX + entry.fqn, entry.info.shape)
            local = local_of(entry.tensor)
            masters.append(Item(piece.key, entry.dtype, piece.region, piece.shape, local, entry.region, mine[name]))
    return [
        *lay_out(transformers_items(entries, mine, plan.model, dtype), "model"),
        *(lay_out(masters, f"{OWN_FOLDER}/weights") if masters else []),
    ]


def warn_of_sidecar(config: AnyModelConfig, files: list[FileLayout]) -> None:
    """Say that something was saved that Hugging Face's architecture does not have. On rank 0."""
    count = sum(len(file.items) for file in files if file.name == f"{OWN_FOLDER}/{SIDECAR_FILE}")
    if isinstance(config, ModelConfig) and count and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "checkpoint: %s has no place for expert_bias, so transformers will choose other experts than this run "
            "did; the %d tensors are kept in %s/%s. For an exact export balance with moe.aux_loss_coeff instead.",
            *(family_of(config).architecture, count, OWN_FOLDER, SIDECAR_FILE),
        )


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
    hf_config.save_pretrained(folder)
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
        _name_tokenizer_class(folder / "tokenizer_config.json")


def _transformers_config(config: TransformersConfig, dtype: torch.dtype) -> Any:
    """The configuration that the model was built from, with the dtype of what is saved."""
    hf_config, _ = load_config_and_class(config.hf, config.family)
    hf_config.architectures, hf_config.dtype = [config.architecture], dtype
    vars(hf_config).pop("auto_map", None)  # names files with code, which are not written
    return hf_config


def _native_config(config: ModelConfig, tokenizer: Any, dtype: torch.dtype, assets: Path | None) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    base = dict(_base_config(assets, config))
    if tokenizer is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            base.setdefault(name, getattr(tokenizer, name))
    try:
        return AutoConfig.for_model(
            config.family, **{**base, **family_of(config).to_hf(config), "dtype": str(dtype).removeprefix("torch.")}
        )
    except (TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint: transformers refuses what {assets}/config.json says: {reason}") from None


def _base_config(assets: Path | None, config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """What the original config.json says about things that titanlite has no setting for."""
    path = None if assets is None else assets / "config.json"
    if path is None or not path.exists():
        return
    replaced = {"model_type", "architectures", "dtype", *_REPLACED_KEYS, *KEY_ALIASES.values()}
    original = json.loads(path.read_text(encoding="utf-8"))
    if original.get("model_type") == config.family:
        yield from ((key, value) for key, value in original.items() if key not in replaced)


def _name_tokenizer_class(path: Path) -> None:
    """Transformers 5 writes a class name that transformers 4, and so many versions of vLLM, does not know."""
    table = json.loads(path.read_text(encoding="utf-8"))
    if table.get("tokenizer_class") == "TokenizersBackend":
        table["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
