"""Save the sharded model as a Hugging Face folder that `from_pretrained` loads as it stands."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.commit import commit_folder
from titanlite.checkpoint.description import write_hf_files
from titanlite.checkpoint.folder import OWN_FOLDER
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
from titanlite.models.transformers_model import TransformersModel


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
