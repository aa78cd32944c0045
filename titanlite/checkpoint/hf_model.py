"""Save the sharded model as a Hugging Face folder that `from_pretrained` loads as it stands."""

import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titanlite.base.agree import gather_objects, get_rank, is_lost_peer, merge_problems
from titanlite.base.errors import CheckpointError, TransientError
from titanlite.base.log import logger
from titanlite.checkpoint.description import describe_model
from titanlite.checkpoint.folder import INDEX_FILE, OWN_FOLDER, UNFINISHED_FILES
from titanlite.checkpoint.model_source import weights_of
from titanlite.checkpoint.pieces import MASTER_PREFIX, SIDECAR_FILE, checkpoint_pieces, is_sidecar, whole
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.config.assets import assets_folder
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection
from titanlite.materialize import Plan, SourceProvider, TensorEntry, local_of, share_out
from titanlite.models.families import family_of
from titanlite.models.interface import Model, is_adapter

_T = TypeVar("_T")


class HFFormat:
    """The model's files in the checkpoints of a run: a Hugging Face folder. Another format overrides the methods."""

    # What is missing where the weights cannot be saved in the format, and how to go on with `unfinished_files`.
    part = "the model's own form"
    remedy = "All weights are kept, and a resume reads them. Finish the model with: python -m titanlite export {} OUT."

    def __init__(self, section: CheckpointSection, model: ModelSection) -> None:
        self.base, self._model, self._assets = section.initial_load_path, model, assets_folder(model, section)
        self._dtype: torch.dtype = getattr(torch, section.export_dtype)

    def initial_sources(self, model: Model) -> list[SourceProvider]:
        """Find what a new run begins with: a pretrained model, or nothing. Collective: every rank must call."""
        if self.base:
            return [weights_of(Path(self.base), model)]
        assets, is_meant = self._model.hf_assets_path, self._model.init == "random"
        if assets and not is_meant and any(Path(assets).glob("*.safetensors")) and dist.get_rank() == 0:
            logger.warning(
                "checkpoint: weights are random, though %s has some; to begin with those set model.path to it",
                assets,
            )
        return []

    def sources(self, folder: Path, model: Model) -> list[SourceProvider]:
        """Find the weights of the checkpoint in `folder`, to resume from. Collective: every rank must call."""
        return [weights_of(folder, model, exact=True)]

    def files(self, model: Model, plan: Plan) -> list[FileLayout]:
        """Lay out the weights in files of the format, over this rank's shards."""
        return model_files(plan, model.config, self._dtype, exact=True)

    def describe(self, model: Model, tokenizer: Any, end_of_turn_ids: Sequence[int]) -> dict[str, bytes]:
        """Build the files next to the weights, content by file name. On one rank."""
        return describe_model(model.config, tokenizer, self._dtype, self._assets, end_of_turn_ids)


def index_of(files: Sequence[FileLayout]) -> dict[str, bytes]:
    """Return the index of the model's `files` by its file name, if there are several."""
    models = [file for file in files if "/" not in file.name]
    if len(models) < 2:
        return {}
    places = sorted((item.key, file.name) for file in models for item, _ in file.items)
    size = sum(item.nbytes for file in models for item, _ in file.items)
    index = {"metadata": {"total_size": size}, "weight_map": dict(places)}
    return {INDEX_FILE: (json.dumps(index, indent=2) + "\n").encode()}


def check_layout(plan: Plan) -> None:
    """Check before training that the model's tensors have a place in its files, in the form of their values.

    Raises CheckpointError: they have none. The same on all ranks.
    """
    if encoded := [f"{entry.fqn} ({entry.form})" for entry in plan.entries if entry.encoding is not None]:
        raise CheckpointError(
            f"checkpoint: {encoded[0]} and {len(encoded) - 1} other tensors are kept in few bits, which no model is "
            "saved in. Save the adapters, and merge them: python -m titanlite export --merge."
        )
    if (own := getattr(plan.model, "checkpoint_format", None)) is not None:  # not of the native decoder
        own.check(plan)


def unfinished_files(plan: Plan) -> list[FileLayout]:
    """Lay out all tensors, or all adapters, under their run-time names and in their own dtypes. No collective.

    A resume reads them; `how_to_finish` says how the rest is made.
    """
    entries = [entry for entry in plan.entries if entry.info.persistent]
    entries = [entry for entry in entries if is_adapter(entry.fqn)] or entries
    items = []
    for entry, share in zip(entries, share_out((entry.tensor for entry in entries), plan.group), strict=True):
        piece = whole(MASTER_PREFIX + entry.fqn, entry.info.shape)
        items.append(Item.of(piece, entry.dtype, local_of(entry.tensor), entry.region, share.mine))
    return lay_out(items, f"{OWN_FOLDER}/{UNFINISHED_FILES.removesuffix('*.safetensors')}")


def model_files(plan: Plan, config: Any, dtype: torch.dtype, *, exact: bool = False) -> list[FileLayout]:
    """Lay out the model's files, the same on all ranks: in the model's order, with Hugging Face's keys.

    What the architecture has no key for goes to a file in the titanlite folder. With `exact`, so do parameters that
    lose bits in `dtype`, once more in their own dtype, for a resumed run to go on from.

    Collectives: those of the model's own format, and with pipeline stages one gather of small objects; every rank must
    call.
    """
    if (own := getattr(plan.model, "checkpoint_format", None)) is not None:
        return own.files(plan, dtype, exact=exact)
    family = family_of(config)
    model: list[Item] = []
    sidecar: list[Item] = []
    masters: list[Item] = []
    entries = [entry for entry in plan.entries if entry.info.persistent]
    used = _find_used([entry for entry in entries if is_sidecar(entry.fqn, family)], plan.group is not None)
    for entry, share in zip(entries, share_out((entry.tensor for entry in entries), plan.group), strict=True):
        stored, local, region, shape = entry.saved_dtype(dtype), local_of(entry.tensor), entry.region, entry.info.shape
        if is_sidecar(entry.fqn, family):
            if entry.fqn in used:
                sidecar.append(Item.of(whole(entry.fqn, shape), stored, local, region, share.mine))
            continue
        pieces = checkpoint_pieces(entry.fqn, shape, family)
        model += [Item.of(piece, stored, local, region, share.mine) for piece in pieces]
        if exact and stored.itemsize < entry.dtype.itemsize:
            masters.append(Item.of(whole(MASTER_PREFIX + entry.fqn, shape), entry.dtype, local, region, share.mine))
    return [
        *lay_out(model, "model"),
        *(lay_out(sidecar, f"{OWN_FOLDER}/{SIDECAR_FILE.removesuffix('.safetensors')}") if sidecar else []),
        *(lay_out(masters, f"{OWN_FOLDER}/weights") if masters else []),
    ]


def _find_used(buffers: Sequence[TensorEntry], in_stages: bool) -> set[str]:
    """Name the buffers that are not all zeros, on ranks of other pipeline stages too."""
    found = {entry.fqn for entry in buffers if bool(local_of(entry.tensor).count_nonzero())}
    return set().union(*gather_objects(found)) if in_stages else found


def warn_of_sidecar(config: Any, files: list[FileLayout]) -> None:
    """Warn that something was saved that Hugging Face's architecture does not have. On rank 0."""
    count = sum(len(file.items) for file in files if file.name == f"{OWN_FOLDER}/{SIDECAR_FILE}")
    if count and get_rank() == 0:
        logger.warning(
            "checkpoint: %s has no place for expert_bias, so transformers will choose other experts than this run "
            "did; the %d tensors are kept in %s/%s. For an exact export balance with moe.aux_loss_coeff instead.",
            *(family_of(config).architecture, count, OWN_FOLDER, SIDECAR_FILE),
        )


def attempt(group: dist.ProcessGroup, lost: list[str], part: str, build: Callable[[], _T], remedy: str) -> _T | None:
    """Return what `build` returns. If it fails on any rank, return None and add `part`, why, and `remedy` to `lost`.

    Collective over `group`, which nothing else uses: a rank that fails skips collectives that the others wait in.

    Raises TransientError: `build` failed here alone, and the others wait in a collective of it for too long.
    """
    result, mine = None, list[str]()
    try:
        result = build()
    except Exception as error:  # whatever it is, the rest is saved
        if is_lost_peer(error):
            raise
        logger.error("%s", traceback.format_exc())
        mine.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    try:
        problems = merge_problems(gather_objects(mine, group))
    except RuntimeError as waited:
        if not mine:
            raise
        raise TransientError(
            f"checkpoint: rank {dist.get_rank()} alone cannot build {part}: {mine[0]}. The others wait for it. "
            "The same command resumes from the newest checkpoint."
        ) from waited
    if problems:
        lost.append(f"{part} ({'; '.join(problems)}). {remedy}")
    return None if problems else result
