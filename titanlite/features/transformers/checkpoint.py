"""A Hugging Face folder as the source of a transformers model's weights, and the layout in which
the model is saved.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from titanlite.base.agree import get_rank_and_size
from titanlite.base.errors import CheckpointError
from titanlite.base.text import describe_error
from titanlite.checkpoint.bias import is_bias, judge_absent_biases
from titanlite.checkpoint.folder import Stored, StoredTensor
from titanlite.checkpoint.hf_model import TIE_FLAG, StoredWeights, explain_untied, is_equal
from titanlite.checkpoint.names import explain_absent_head, explain_names
from titanlite.checkpoint.pieces import (
    MASTER_PREFIX,
    Piece,
    explain_unexpected,
    whole,
)
from titanlite.checkpoint.quantized import describe_misfit
from titanlite.checkpoint.reader import Placed
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.features.transformers.conversion import (
    ConvertingReader,
    Group,
    NotTraceable,
    Traced,
    TracedPart,
    loading_groups,
    saving_groups,
)
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import (
    Alias,
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
from titanlite.materialize.plan import named_tensors
from titanlite.models.interface import is_adapter

_UNTIE = ", and in its text_config if it has one; if both stay tied, correct the file"


class TransformersCheckpoint(StoredWeights):
    """The weights of a transformers model, read through transformers' own mapping. Tensors that the
    class allows to be absent may be missing.
    """

    def __init__(self, folder: str, stored: Stored, model: TransformersModel) -> None:
        super().__init__(folder, stored)
        self._model = model

    def __call__(
        self, tensors: Mapping[str, TensorInfo]
    ) -> Iterable[tuple[str, Source | InvalidClaim]]:
        used = self._claim_stored(tensors)
        for name, info in tensors.items():
            master = self.stored.tensors.get(MASTER_PREFIX + name)
            if master is not None:  # the model's own files have it too, in a smaller dtype
                used.add(master.key)
                parts = [Placed(master, whole(name, info.shape))]
                self._claim_tensor(name, info, parts, master.shape)
        self._drop_tied()
        self._allow_absent(tensors)
        problems = self._explain_absent(tensors)
        patterns = self._model.transformers_model._keys_to_ignore_on_load_unexpected or ()
        return [*self._claims.items(), *problems, *self._claim_rest(used, patterns)]

    def _claim_stored(self, tensors: Mapping[str, TensorInfo]) -> set[str]:
        """Claim all stored sources of `tensors`; return the keys of these sources."""
        self._claims: dict[str, Source | InvalidClaim] = {}
        self._whole: dict[str, Group] = {}
        converting = ConvertingReader(self.folder, self.stored, self._model, self._whole)
        keys = [key for key in self.stored.tensors if not key.startswith(MASTER_PREFIX)]
        groups, unexpected = loading_groups(keys, self._model) if keys else ([], [])
        for group in groups:
            self._claim(group, tensors, converting)
        return set(keys).difference(unexpected)

    def find_untied(self) -> dict[str, str]:
        """Return, by name, an error for each stored tensor that the model ties to another one with
        different values.
        """
        ties = self._model.ties()
        if not ties:
            return {}
        self._claim_stored({name: info for name, _, info in named_tensors(self._model)})
        found = {}
        for name, target in ties.items():
            own, other = self._claims.get(name), self._claims.get(target)
            if isinstance(own, Read) and isinstance(other, Read) and not is_equal(own, other):
                found[name] = explain_untied(self.name, target, TIE_FLAG, _UNTIE)
        return found

    def _claim(
        self, group: Group, tensors: Mapping[str, TensorInfo], converting: ConvertingReader
    ) -> None:
        try:
            for key in group.keys:
                if problem := describe_misfit(self.stored.tensors[key]):
                    raise ValueError(problem)
            stored = self.stored.tensors[group.keys[0]]
            if group.first in tensors and stored.is_packed:
                # The class of gpt-oss has these matrices transposed: (E, C, R).
                region = whole(stored.key, stored.shape).region.transposed()
                piece = Piece(stored.key, stored.shape, region, is_transposed=True)
                info = tensors[group.first]
                self._claim_tensor(group.first, info, [Placed(stored, piece)], region.lengths)
                return
            try:
                found = group.convert(
                    lambda key: Traced.source(key, self.stored.tensors[key].shape), self._model
                )
                placed = {
                    name: [self._place(part) for part in traced.parts]
                    for name, traced in found.items()
                }
            except NotTraceable:
                for name, value in group.convert(self._meta, self._model).items():
                    if name in tensors:
                        self._whole[name] = group
                        kept = self._keeps_float32(map(self.stored.tensors.__getitem__, group.keys))
                        self._claims[name] = Read(converting, name, tuple(value.shape), kept)
                return
        except ValueError as error:
            self._claims[group.first] = InvalidClaim(f"{self.name}: {error}.")
            return
        for name, parts in placed.items():
            if name in tensors:
                self._claim_tensor(name, tensors[name], parts, found[name].shape)
            else:
                self._claims[name] = InvalidClaim(explain_unexpected(self.name))

    def _claim_tensor(
        self, name: str, info: TensorInfo, parts: list[Placed], shape: tuple[int, ...]
    ) -> None:
        if shape != info.shape:
            self._claims[name] = InvalidClaim(
                f"{self.name} has it with shape {shape}, the model expects {info.shape}."
            )
            return
        self._claims[name] = self._claim_parts(name, shape, parts)
        self._whole.pop(name, None)

    def _meta(self, key: str) -> torch.Tensor:
        stored = self.stored.tensors[key]
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

    def _place(self, part: TracedPart) -> Placed:
        stored = self.stored.tensors[part.key]
        region = Region(part.starts, part.lengths)
        if stored.scale is None:
            stored = _block(stored, part)
            return Placed(stored, Piece(part.key, stored.shape, region))
        dims = len(stored.shape)
        is_whole = part.source_lengths == stored.shape
        has_rows = dims == 2 and part.source_lengths[1] == stored.shape[1]
        if part.lengths[-dims:] != part.source_lengths or not (is_whole or has_rows):
            raise NotTraceable("a part of FP8 that is not rows of a matrix")
        return Placed(stored, Piece(part.key, stored.shape, region, row=part.source_starts[0]))

    def _drop_tied(self) -> None:
        """Drop the second name of a tied tensor that is stored under both."""
        for name, target in self._model.ties().items():
            if name in self._claims and target in self._claims:
                del self._claims[name]
                if name in self.untied:
                    self._claims[name] = InvalidClaim(self.untied[name])

    def _allow_absent(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Claim the class's own initialization for tensors that the class allows to be missing."""
        patterns = self._model.transformers_model._keys_to_ignore_on_load_missing or ()
        for name, source in self._model.sources.items():
            if name not in tensors or name in self._claims or isinstance(source, Alias):
                continue
            if tensors[name].persistent and any(re.search(p, name) for p in patterns):
                self._claims[name] = source

    def _explain_absent(self, tensors: Mapping[str, TensorInfo]) -> list[tuple[str, InvalidClaim]]:
        """Return errors for absent tensors with a known reason: selection biases, unless
        `absent_bias` allows this, and the head, if the checkpoint has only the base model. Absent
        selection biases get the initial values of transformers' class.

        Raises CheckpointError: the names of most stored tensors differ from the expected ones by
        the same prefix.
        """
        declared = self._model.sources
        ties = self._model.ties()
        base = f"{self._model.transformers_model.base_model_prefix}."
        own = [name for name, info in tensors.items() if info.persistent and not is_adapter(name)]
        own = [name for name in own if name not in ties]
        absent = [name for name in own if name not in self._claims]
        if 2 * len(absent) > len(own) and (problem := explain_names(self.stored.tensors, own)):
            raise CheckpointError(f"{self.name}: {problem}")
        biases = [name for name in absent if is_bias(name)]
        self._claims |= {name: declared[name] for name in biases if name in declared}
        problems = judge_absent_biases(
            self.name, biases, sum(map(is_bias, own)), allowed=self.absent_bias
        )
        if base != "." and not any(
            name.startswith(base) for name in [*absent, *self.stored.tensors]
        ):
            problems += [(name, InvalidClaim(explain_absent_head(self.name))) for name in absent]
        return problems


def _block(stored: StoredTensor, part: TracedPart) -> StoredTensor:
    """Return the block of a stored tensor as a stored tensor.

    Raises NotTraceable: the bytes of the block are not contiguous in the file.
    """
    starts = part.source_starts
    lengths = part.source_lengths
    if lengths == stored.shape:
        return stored
    outer = next(dim for dim in range(len(lengths)) if lengths[dim] != stored.shape[dim])
    if lengths[outer + 1 :] != stored.shape[outer + 1 :] or math.prod(stored.shape[:outer]) != 1:
        raise NotTraceable("a cut that is not along the first dim")
    size = stored.nbytes // max(stored.shape[outer], 1)
    offset = stored.offset + starts[outer] * size
    return stored._replace(shape=lengths, offset=offset, nbytes=lengths[outer] * size)


def saved_entries(
    entries: Iterable[TensorEntry], model: TransformersModel
) -> dict[str, TensorEntry]:
    """Return the tensors that a checkpoint of `model` has, by the names under which transformers
    saves them; tied tensors once.
    """
    aliases = model.ties()
    ignored = model.transformers_model._keys_to_ignore_on_save or ()
    found = {}
    for entry in entries:
        if entry.info.persistent:
            name = next((name for name in entry.names if name not in aliases), entry.fqn)
            if name not in ignored:
                found[name] = entry
    return found


class StoredForm(NamedTuple):
    """A tensor of a checkpoint, with its stored name and shape, and its origin."""

    key: str
    shape: tuple[int, ...]
    entry: TensorEntry  # of which it is a region, or the first one that it is converted from
    region: Region | None  # None for the result of a conversion
    group: Group  # the conversion, of whole tensors


def stored_forms(
    entries: Mapping[str, TensorEntry], model: TransformersModel
) -> tuple[list[StoredForm], Callable[[str], str]]:
    """List the stored tensors of a checkpoint of `model`, in the model's order, with the keys and
    layouts of the checkpoint that it was loaded from.

    `entries` are from `saved_entries`. The second result is a function that renames the results of
    conversions.
    """
    groups, rename = saving_groups(entries, model)
    order = {name: i for i, name in enumerate(entries)}
    forms = []
    for group in sorted(groups, key=lambda group: order[group.keys[0]]):
        first = entries[group.keys[0]]
        try:
            traced = group.convert(
                lambda name: Traced.source(name, entries[name].info.shape), model
            )
            if any(len(t.parts) != 1 or t.parts[0].lengths != t.shape for t in traced.values()):
                raise NotTraceable("a stored tensor from several")
        except NotTraceable:
            values = group.convert(
                lambda name: torch.empty(entries[name].info.shape, device="meta"), model
            )
            forms += [
                StoredForm(rename(key), tuple(v.shape), first, None, group)
                for key, v in values.items()
            ]
            continue
        for key, tensor in traced.items():
            part = tensor.parts[0]
            region = Region(part.source_starts, part.source_lengths)
            forms.append(StoredForm(rename(key), tensor.shape, entries[part.key], region, group))
    return forms, rename


def transformers_items(
    entries: Mapping[str, TensorEntry],
    mine: Mapping[str, bool],
    model: TransformersModel,
    dtype: torch.dtype,
) -> list[Item]:
    """Return the stored tensors of `model`, with the keys and layouts of the checkpoint that it was
    loaded from.

    Tensors that are stored transposed or merged are gathered and converted whole; the ranks take
    turns to hold and write them, in host memory.

    Args:
        entries: from `saved_entries`.
        mine: by the same names, True if this rank writes its shard.
        dtype: dtype of parameters on disk; buffers keep their own.

    Collectives: one all-gather for each such tensor; every rank must call.
    """
    names = {entry.fqn: name for name, entry in entries.items()}
    forms, rename = stored_forms(entries, model)
    converted: dict[str, torch.Tensor] = {}
    current = ""
    num_converted = 0
    items = list[Item]()
    rank, world_size = get_rank_and_size()
    for form in forms:
        stored = form.entry.saved_dtype(dtype)
        if form.region is not None:
            local = local_of(form.entry.tensor)
            held = form.entry.region
            writes = mine[names[form.entry.fqn]]
            piece = Piece(form.key, form.shape, form.region)
            items.append(Item(piece, stored, local, held, writes, form.entry.fqn))
            continue
        if form.group.first != current:
            current = form.group.first
            found = _convert(form.group, entries, model)
            converted = {rename(key): value for key, value in found.items()}
        piece = whole(form.key, form.shape)
        local = converted[form.key]
        writes = num_converted % world_size == rank
        num_converted += 1
        local = local if writes else torch.empty_like(local, device="meta")
        items.append(Item(piece, stored, local, piece.region, writes, form.entry.fqn))
    return items


def _convert(
    group: Group, entries: Mapping[str, TensorEntry], model: TransformersModel
) -> dict[str, torch.Tensor]:
    """Return the targets of `group`, in host memory. Collectives: one all-gather per source."""
    sources: dict[str, torch.Tensor] = {}
    for name in group.keys:
        tensor = entries[name].tensor.detach()
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        sources[name] = tensor if tensor.is_meta else tensor.cpu()  # on meta in an export
    converted = group.convert(sources.__getitem__, model)
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
            forms, _ = stored_forms(saved_entries(plan.entries, self._model), self._model)
        except Exception as error:  # noqa: BLE001  of transformers' conversions, which raise all kinds
            return [
                f"checkpoint: the tensors of {architecture} cannot be saved as transformers has "
                f"them in files: {describe_error(error)}. Install another version of transformers, "
                "or train adapters (lora.rank)."
            ]
        counts = Counter(form.key for form in forms)
        return [
            f"checkpoint: the tensors of {architecture} cannot be saved: {key}: {count} tensors "
            "would have this name."
            for key, count in counts.items()
            if count > 1
        ]

    def files(self, plan: Plan, dtype: torch.dtype) -> list[FileLayout]:
        """Lay out the model's files; collectives as `transformers_items`."""
        entries = saved_entries(plan.entries, self._model)
        replicas = assign_owners(entry.tensor for entry in entries.values())
        mine = {name: replica.is_owner for name, replica in zip(entries, replicas, strict=True)}
        return lay_out(transformers_items(entries, mine, self._model, dtype), "model")
