"""A Hugging Face folder as the source of a transformers model's weights, and the layout in which
the model is saved.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from titanlite.base.agree import get_rank_and_size
from titanlite.base.errors import CheckpointError
from titanlite.base.text import describe_error
from titanlite.checkpoint.bias import is_bias, judge_absent_biases
from titanlite.checkpoint.folder import Stored
from titanlite.checkpoint.hf_model import StoredWeights, explain_untied, is_equal
from titanlite.checkpoint.names import explain_absent_head, explain_names
from titanlite.checkpoint.pieces import (
    MASTER_PREFIX,
    Piece,
    whole,
)
from titanlite.checkpoint.quantized import describe_misfit
from titanlite.checkpoint.reader import Placed
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.features.transformers.conversion import (
    ConvertingReader,
    Group,
    Traced,
    TracedPart,
    loading_groups,
    parts_of,
    saving_groups,
)
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import (
    InvalidClaim,
    Plan,
    Read,
    Region,
    Source,
    TensorEntry,
    TensorInfo,
    assign_owners,
    local_of,
)
from titanlite.models.interface import is_adapter

_UNTIE = ", and in its text_config if it has one; if both stay tied, correct the file"


class TransformersCheckpoint(StoredWeights):
    """The weights of a transformers model, read through transformers' own mapping. Tensors that the
    class allows to be absent may be missing.
    """

    def __init__(self, folder: str, stored: Stored, model: TransformersModel) -> None:
        super().__init__(folder, stored)
        self._model = model
        self._claims: dict[str, Source | InvalidClaim] = {}
        self._whole: dict[str, Group] = {}
        self._converting = ConvertingReader(folder, stored, self._whole)
        keys = [key for key in stored if not key.startswith(MASTER_PREFIX)]
        groups, unexpected = loading_groups(keys, model)
        for group in groups:
            self._claim(group)
        self._used = set(keys).difference(unexpected)

    def __call__(
        self, tensors: Mapping[str, TensorInfo]
    ) -> Iterable[tuple[str, Source | InvalidClaim]]:
        used = set(self._used)
        for name in tensors:
            master = self.stored.get(MASTER_PREFIX + name)
            if master is not None:  # the model's own files have it too, in a smaller dtype
                used.add(master.key)
                parts = [Placed(master, whole(name, master.shape))]
                self._claims[name] = self._claim_parts(name, master.shape, parts)
        self._drop_tied()
        problems = self._claim_absent(tensors)
        patterns = self._model.transformers_model._keys_to_ignore_on_load_unexpected or ()
        return [*self._claims.items(), *problems, *self._claim_rest(used, patterns)]

    def find_untied(self) -> dict[str, str]:
        """Return, by name, an error for each stored tensor that the model ties to another one with
        different values.
        """
        found = {}
        for name, target in self._model.ties().items():
            own, other = self._claims.get(name), self._claims.get(target)
            if isinstance(own, Read) and isinstance(other, Read) and not is_equal(own, other):
                found[name] = explain_untied(self.name, target, _UNTIE)
        return found

    def _claim(self, group: Group) -> None:
        stored = [self.stored[key] for key in group.keys]
        first = stored[0]
        try:
            for tensor in stored:
                if problem := describe_misfit(tensor):
                    raise ValueError(problem)
            if first.is_packed:
                # The class of gpt-oss has these matrices transposed: (E, C, R).
                region = whole(first.key, first.shape).region.transposed()
                piece = Piece(first.key, first.shape, region, is_transposed=True)
                self._claims[group.first] = self._claim_parts(
                    group.first, region.lengths, [Placed(first, piece)]
                )
                return
            found = group.convert(lambda key: Traced.source(key, self.stored[key].shape))
        except ValueError as error:
            self._claims[group.first] = InvalidClaim(f"{self.name}: {error}.")
            return
        for name, traced in found.items():
            shape = tuple(traced.shape)
            if placed := self._place(parts_of(traced)):
                self._claims[name] = self._claim_parts(name, shape, placed)
            else:
                self._whole[name] = group
                kept = self._keeps_float32(group.keys)
                self._claims[name] = Read(self._converting, name, shape, kept)

    def _place(self, parts: Iterable[TracedPart]) -> list[Placed]:
        """Return the places of `parts` in the files; empty if they cannot be read by themselves."""
        placed = []
        for part in parts:
            stored = self.stored[part.key]
            source = Region(part.source_starts, part.source_lengths)
            row = 0
            if stored.scale is None:
                first, count = next(source.runs(stored.shape))
                can_be_read = count == source.numel  # contiguous in the file
                size = stored.dtype.itemsize
                stored = stored._replace(
                    shape=source.lengths, offset=stored.offset + first * size, nbytes=count * size
                )
            else:
                dims = len(stored.shape)
                row = source.starts[0]
                has_rows = dims == 2 and source.lengths[1] == stored.shape[1]
                can_be_read = part.lengths[-dims:] == source.lengths and (
                    has_rows or source.lengths == stored.shape
                )
            if not can_be_read:
                return []
            region = Region(part.starts, part.lengths)
            placed.append(Placed(stored, Piece(part.key, stored.shape, region, row)))
        return placed

    def _drop_tied(self) -> None:
        """Drop the second name of a tied tensor that is stored under both."""
        for name, target in self._model.ties().items():
            if name in self._claims and target in self._claims:
                del self._claims[name]
                if name in self.untied:
                    self._claims[name] = InvalidClaim(self.untied[name])

    def _claim_absent(self, tensors: Mapping[str, TensorInfo]) -> list[tuple[str, InvalidClaim]]:
        """Claim the class's own initialization for absent tensors that the class allows to be
        missing, and for absent selection biases.

        Return errors for absent tensors with a known reason: selection biases, unless `absent_bias`
        allows this, and the head, if the checkpoint has only the base model.

        Raises CheckpointError: the names of most stored tensors differ from the expected ones by
        the same prefix.
        """
        declared = self._model.sources
        ties = self._model.ties()
        patterns = self._model.transformers_model._keys_to_ignore_on_load_missing or ()
        base = f"{self._model.transformers_model.base_model_prefix}."
        own = [name for name, info in tensors.items() if info.persistent and not is_adapter(name)]
        own = [name for name in own if name not in ties]
        absent = []
        for name in own:
            if name in self._claims:
                continue
            if name in declared and any(re.search(pattern, name) for pattern in patterns):
                self._claims[name] = declared[name]
            else:
                absent.append(name)
        if 2 * len(absent) > len(own) and (problem := explain_names(self.stored, own)):
            raise CheckpointError(f"{self.name}: {problem}")
        biases = [name for name in absent if is_bias(name)]
        self._claims |= {name: declared[name] for name in biases if name in declared}
        problems = judge_absent_biases(
            self.name, biases, sum(map(is_bias, own)), allowed=self.absent_bias
        )
        if base != "." and not any(name.startswith(base) for name in [*absent, *self.stored]):
            problems += [(name, InvalidClaim(explain_absent_head(self.name))) for name in absent]
        return problems


class StoredForm(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        piece: the place of a region of `entry`; the whole tensor if it is converted.
        entry: the first one that it is converted from, if there are several.
        group: the conversion, of whole tensors; None if the stored tensor is a region of `entry`.
    """

    piece: Piece
    entry: TensorEntry
    group: Group | None


def stored_forms(
    plan: Plan, model: TransformersModel
) -> tuple[dict[str, TensorEntry], list[StoredForm]]:
    """Return the tensors of `plan` that a checkpoint of `model` has, by the names under which
    transformers saves them, tied tensors once; and the stored tensors, in the model's order, with
    the keys and layouts of the checkpoint that it was loaded from.
    """
    aliases = model.ties()
    ignored = model.transformers_model._keys_to_ignore_on_save or ()
    entries: dict[str, TensorEntry] = {}
    for entry in plan.entries:
        if entry.info.persistent:
            name = next((name for name in entry.names if name not in aliases), entry.fqn)
            if name not in ignored:
                entries[name] = entry
    order = {name: i for i, name in enumerate(entries)}
    forms = []
    for group in sorted(saving_groups(entries, model), key=lambda group: order[group.keys[0]]):
        found = group.convert(lambda name: Traced.source(name, entries[name].info.shape))
        for key, traced in found.items():
            shape = tuple(traced.shape)
            parts = parts_of(traced)
            if len(parts) == 1:
                region = Region(parts[0].source_starts, parts[0].source_lengths)
                form = StoredForm(Piece(key, shape, region), entries[parts[0].key], None)
            else:
                form = StoredForm(whole(key, shape), entries[group.keys[0]], group)
            forms.append(form)
    return entries, forms


def _convert(group: Group, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Return the targets of `group`, in host memory. Collectives: one all-gather per source."""
    sources: dict[str, torch.Tensor] = {}
    for name in group.keys:
        tensor = entries[name].tensor.detach()
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        sources[name] = tensor if tensor.is_meta else tensor.cpu()  # on meta in an export
    converted = group.convert(sources.__getitem__)
    return {key: value.contiguous() for key, value in converted.items()}


class TransformersFormat:
    """The `CheckpointFormat` of a `TransformersModel`."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model

    def sources(self, folder: str, stored: Stored) -> TransformersCheckpoint:
        """Return the weights `stored` in `folder` as a source."""
        return TransformersCheckpoint(folder, stored, self._model)

    def check(self, plan: Plan) -> list[str]:
        """Return the problems of tensors that the model's files have no key for. The same on all
        ranks.
        """
        architecture = self._model.config.architecture
        try:
            _, forms = stored_forms(plan, self._model)
        except Exception as error:  # noqa: BLE001  of transformers' conversions, which raise all kinds
            return [
                f"checkpoint: the tensors of {architecture} cannot be saved as transformers has "
                f"them in files: {describe_error(error)}. Install another version of transformers, "
                "or train adapters (lora.rank)."
            ]
        counts = Counter(form.piece.key for form in forms)
        return [
            f"checkpoint: the tensors of {architecture} cannot be saved: {key}: {count} tensors "
            "would have this name."
            for key, count in counts.items()
            if count > 1
        ]

    def files(self, plan: Plan, dtype: torch.dtype) -> list[FileLayout]:
        """Lay out the model's files.

        Tensors that are converted whole are gathered; the ranks take turns to hold and write them,
        in host memory.

        Collectives: one all-gather for each such tensor; every rank must call.
        """
        entries, forms = stored_forms(plan, self._model)
        replicas = assign_owners(entry.tensor for entry in entries.values())
        owned = {
            entry.fqn: replica.is_owner
            for entry, replica in zip(entries.values(), replicas, strict=True)
        }
        current: Group | None = None
        converted: dict[str, torch.Tensor] = {}
        turn = 0
        items = list[Item]()
        rank, world_size = get_rank_and_size()
        for piece, entry, group in forms:
            if group is None:
                local = local_of(entry.tensor)
                held = entry.region
                writes = owned[entry.fqn]
            else:
                if group is not current:
                    current = group
                    converted = _convert(group, entries)
                local = converted[piece.key]
                held = piece.region
                writes = turn % world_size == rank
                turn += 1
                local = local if writes else torch.empty_like(local, device="meta")
            stored = entry.saved_dtype(dtype)
            items.append(Item(piece, stored, local, held, writes, entry.fqn))
        return lay_out(items, "model")
