"""The files of a transformers model: its weights as `from_pretrained` reads them."""

from collections import Counter

import torch

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.checkpoint.folder import OWN_FOLDER, Stored
from titanlite.checkpoint.keys import MASTER_PREFIX, whole
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.features.transformers.checkpoint import (
    TransformersCheckpoint,
    saved_entries,
    stored_forms,
    transformers_items,
)
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import Plan
from titanlite.materialize.layout import local_of
from titanlite.materialize.replicas import share_out


class TransformersFormat:
    """The `checkpoint_format` of a `TransformersModel`."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model

    def sources(self, folder: str, stored: Stored) -> TransformersCheckpoint:
        """Return the stored weights in `folder`. Collective: of tied tensors stored twice, rank 0 reads both."""
        checkpoint = TransformersCheckpoint(folder, stored, self._model)
        checkpoint.untied = on_first_rank(checkpoint.find_untied)
        return checkpoint

    def check(self, plan: Plan) -> None:
        """Find out before training whether the tensors have a place in the model's files.

        Raises:
            CheckpointError: they have none. The same on all ranks.
        """
        architecture = self._model.config.architecture
        try:
            forms, _ = stored_forms(saved_entries(plan.entries, self._model), self._model)
        except Exception as error:  # of transformers' conversions, which raise all kinds of them
            raise CheckpointError(
                f"checkpoint: the tensors of {architecture} cannot be saved as transformers has them in files: "
                f"{type(error).__name__}: {error}. Install another version of transformers, or train adapters "
                "(lora.rank)."
            ) from error
        counts = Counter(form.key for form in forms)
        raise_problems(
            CheckpointError,
            f"checkpoint: the tensors of {architecture} cannot be saved",
            [f"{key}: {count} tensors would have this name." for key, count in counts.items() if count > 1],
        )

    def files(self, plan: Plan, dtype: torch.dtype, *, exact: bool) -> list[FileLayout]:
        """Layout of the model's files, as `checkpoint.hf_model.model_files`; its collectives: `transformers_items`."""
        entries = saved_entries(plan.entries, self._model)
        shares = share_out(entry.tensor for entry in entries.values())
        mine = {name: share.mine for name, share in zip(entries, shares, strict=True)}
        masters = []
        for name, entry in entries.items():
            if exact and entry.saved_dtype(dtype).itemsize < entry.dtype.itemsize:
                piece = whole(MASTER_PREFIX + entry.fqn, entry.info.shape)
                local = local_of(entry.tensor)
                masters.append(Item(piece.key, entry.dtype, piece.region, piece.shape, local, entry.region, mine[name]))
        return [
            *lay_out(transformers_items(entries, mine, self._model, dtype), "model"),
            *(lay_out(masters, f"{OWN_FOLDER}/weights") if masters else []),
        ]
