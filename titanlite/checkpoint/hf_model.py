"""The model's files in a Hugging Face folder: read as a source of weights, and written for
`from_pretrained`.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from titanlite.base.agree import get_rank, on_first_rank
from titanlite.base.errors import CheckpointError
from titanlite.base.log import logger
from titanlite.checkpoint.bias import is_bias, judge_absent_biases, warn_of_collapsed_bias
from titanlite.checkpoint.description import TokenIds, describe_model
from titanlite.checkpoint.folder import (
    INDEX_FILE,
    OWN_FOLDER,
    Stored,
    read_headers,
    read_json,
    read_model_headers,
    shown,
)
from titanlite.checkpoint.names import explain_absent_head, explain_names, with_base_prefix
from titanlite.checkpoint.pieces import (
    BASE,
    EMBEDDING,
    HEAD,
    IGNORED_SUFFIXES,
    MASTER_PREFIX,
    SIDECAR_FILE,
    Layout,
    Piece,
    checkpoint_pieces,
    explain_unexpected,
    find_layout,
    find_passthrough,
    is_sidecar,
    whole,
)
from titanlite.checkpoint.quantized import attach_scales, describe_misfit
from titanlite.checkpoint.reader import Placed, SafetensorsReader, read_region
from titanlite.checkpoint.writer import FileLayout, Item, lay_out, lay_out_tensors
from titanlite.config import ModelConfig
from titanlite.config.assets import assets_folder
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection
from titanlite.materialize import (
    InvalidClaim,
    Plan,
    Read,
    Source,
    SourceProvider,
    TensorEntry,
    TensorInfo,
    assign_owners,
    local_of,
)
from titanlite.models.families import family_of
from titanlite.models.families.config_json import describe_unreadable, find_quantization
from titanlite.models.interface import Model, is_adapter

_CHUNK_ELEMENTS = 4 << 20
_WIDE = (torch.float32, torch.float64)
TIE_FLAG = "tie_word_embeddings"
_OVERRIDE = ", or in training model.overrides.tie_word_embeddings = false"


class CheckpointFormat(Protocol):
    """How the weights of one kind of model are stored in files. All methods are collective."""

    def sources(self, folder: str, stored: Stored) -> Any:
        """Return the weights `stored` in `folder` as a source for `materialize`."""
        ...

    def check(self, plan: Plan) -> list[str]:
        """Return the problems of tensors that the files have no key for, the same on all ranks."""
        ...

    def files(self, plan: Plan, dtype: torch.dtype) -> list[FileLayout]:
        """Lay out the model's files with parameters in `dtype`, the same on all ranks."""
        ...


def format_of(model: Any) -> CheckpointFormat:
    """Return the format of the weights of `model`."""
    if getattr(model, "checkpoint_format", None) is None:
        model.checkpoint_format = NativeFormat(model.config)
    return model.checkpoint_format


def weights_of(
    folder: Path, model: Model, *, exact: bool = False, absent_bias: bool = False
) -> Any:
    """Return the weights of the Hugging Face model in `folder`, as a source for
    `materialize(model)`.

    An `expert_bias` for which the architecture has no key is read from the titanlite subfolder;
    with `exact`, full-precision copies of parameters are read from there too. With `absent_bias`,
    an `expert_bias` that is not stored begins with zeros. The result's `untied` holds the problem
    of each tied tensor that is stored twice with different values, by name.

    Raises CheckpointError, on all ranks: there is no model there, or files are missing or damaged.

    Collectives: broadcasts of data that rank 0 reads; every rank must call. A tied head that is
    stored too is compared with the embedding.
    """
    source = format_of(model).sources(str(folder), _read_stored(folder, exact))
    source.absent_bias = absent_bias
    source.untied = on_first_rank(source.find_untied)
    return source


def _read_stored(folder: Path, exact: bool) -> Stored:
    def read() -> tuple[Path, Stored]:
        own = [*folder.glob(SIDECAR_FILE)]
        if exact:
            own += sorted((folder / OWN_FOLDER).glob("weights*.safetensors"))
        stored = read_model_headers(folder) | read_headers(own, f"checkpoint {folder}")
        has_config = (folder / "config.json").exists()
        hf_config = read_json(folder / "config.json", f"checkpoint {folder}") if has_config else {}
        quantization = find_quantization(hf_config)
        if problem := describe_unreadable(quantization):
            raise CheckpointError(f"checkpoint {folder}: config.json: {problem}")
        block = (quantization or {}).get("weight_block_size", (128, 128))
        return folder, attach_scales(stored, block and tuple(block))

    first, stored = on_first_rank(read)
    if first != folder:  # this machine's copy is in a different folder
        stored = {key: tensor.moved(first, folder) for key, tensor in stored.items()}
    warn_of_collapsed_bias(folder, stored)
    return stored


class StoredWeights:
    """A `SourceProvider` of all persistent tensors of a model, from the tensors `stored` in
    `folder`.

    Complete and strict: tensors that are missing, unexpected, or of a different shape are errors,
    all of them reported at once.

    Attributes:
        passthrough: stored tensors that the model does not compute; known after the claims.
        untied: the problem of each tied tensor that is stored twice with different values, by name.
        absent_bias: True if a selection bias of the family may be absent; it is then zero, or as
            its class initializes it.
    """

    complete = True

    def __init__(self, folder: str, stored: Stored) -> None:
        self.name = f"checkpoint {folder}"
        self.folder = folder
        self.stored = stored
        self.passthrough: list[str] = []
        self.untied: Mapping[str, str] = {}
        self.absent_bias = False
        self._placed: dict[str, Sequence[Placed]] = {}
        self.reader = SafetensorsReader(folder, self._placed)
        # If a minority of the bytes is float32, those tensors are float32 on purpose, as routers
        # are; if the majority is, the whole folder is in float32.
        own = [tensor for key, tensor in stored.items() if not key.startswith(MASTER_PREFIX)]
        wide = {tensor.key: tensor.nbytes for tensor in own if tensor.dtype in _WIDE}
        is_minority = 2 * sum(wide.values()) < sum(tensor.nbytes for tensor in own)
        self._kept_float32 = set(wide) if is_minority else set[str]()

    def _claim_parts(self, name: str, shape: tuple[int, ...], parts: Sequence[Placed]) -> Read:
        """Return the source of a tensor that consists of the stored `parts`."""
        self._placed[name] = parts
        return Read(self.reader, name, shape, self._keeps_float32(p.stored.key for p in parts))

    def _keeps_float32(self, keys: Iterable[str]) -> bool:
        """Return True if a tensor that consists of the stored `keys` is saved in float32 again."""
        return not self._kept_float32.isdisjoint(keys)

    def _claim_rest(
        self, used: Collection[str], patterns: Iterable[str] = ()
    ) -> list[tuple[str, InvalidClaim]]:
        """Divide the keys that are not `used` into passthrough tensors, which are recorded, and
        unexpected ones, which are returned with an error.
        """
        self.passthrough = find_passthrough(self.stored, used, patterns)
        known = {*used, *self.passthrough}
        return [
            (shown(key), InvalidClaim(explain_unexpected(self.name)))
            for key in self.stored
            if key not in known and not key.endswith(IGNORED_SUFFIXES)
        ]


class HFCheckpoint(StoredWeights):
    """The weights of the native decoder, under its family's keys."""

    def __init__(self, folder: str, stored: Stored, config: ModelConfig) -> None:
        self._config = config
        self._family = family_of(config)
        larger = self._family.larger
        super().__init__(folder, with_base_prefix(stored, larger.prefix if larger else BASE))
        self.layout = find_layout(self.stored, self._family)
        self._has_head = config.tie_word_embeddings or stored is self.stored or HEAD in self.stored

    def __call__(
        self, tensors: Mapping[str, TensorInfo]
    ) -> Iterable[tuple[str, Source | InvalidClaim]]:
        claims: list[tuple[str, Source | InvalidClaim]] = []
        stored = self.stored
        all_pieces = {
            name: self._pieces(name, info.shape)
            for name, info in tensors.items()
            if info.persistent
        }
        self._check_names(all_pieces)
        used = {piece.key for pieces in all_pieces.values() for piece in pieces}
        for name, own_pieces in all_pieces.items():
            shape = tensors[name].shape
            master = whole(MASTER_PREFIX + name, shape)
            pieces = [master] if master.key in stored else own_pieces
            used.add(master.key)
            parts = [Placed(stored[piece.key], piece) for piece in pieces if piece.key in stored]
            if not parts:
                continue  # the plan decides whether it may be absent
            problems = dict.fromkeys(map(self._misfit, pieces))
            claims += [(name, InvalidClaim(problem)) for problem in problems if problem]
            claims.append((name, self._claim_parts(name, shape, parts)))
        claims += [(name, InvalidClaim(problem)) for name, problem in self.untied.items()]
        if not self._has_head and HEAD in all_pieces:
            claims.append((HEAD, InvalidClaim(explain_absent_head(self.name))))
        biases = [
            pieces[0].key
            for name, pieces in all_pieces.items()
            if is_bias(name) and not is_sidecar(name, self._family)
        ]
        absent = [key for key in biases if key not in stored]
        claims += judge_absent_biases(self.name, absent, len(biases), allowed=self.absent_bias)
        return claims + self._claim_rest(used)

    def _check_names(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Raise CheckpointError if the names of most stored tensors differ from the expected ones
        by the same prefix.
        """
        keys = [piece[0].key for name, piece in pieces.items() if not is_adapter(name)]
        has_most = 2 * len(self.stored.keys() & set(keys)) >= len(keys)
        if not has_most and (problem := explain_names(self.stored, keys)):
            raise CheckpointError(f"{self.name}: {problem}")

    def find_untied(self) -> dict[str, str]:
        """Return the problem, by name, of a stored head whose values differ from the embedding that
        it is tied to.
        """
        keys = (HEAD, self.layout.key(EMBEDDING))
        stored = self.stored
        if not self._config.tie_word_embeddings or not stored.keys() >= {*keys}:
            return {}
        reader = SafetensorsReader.of_tensors(self.folder, (stored[key] for key in keys))
        if is_equal(*(Read(reader, key, stored[key].shape) for key in keys)):
            return {}
        return {HEAD: explain_untied(self.name, EMBEDDING, _OVERRIDE)}

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """Return the pieces in the model's own files. Experts may be fused there in any family."""
        is_fused = self.layout.key(name) in self.stored
        layout = replace(self.layout, is_fused=is_fused)
        pieces = list(checkpoint_pieces(name, shape, self._config, layout))
        stored = self.stored.get(pieces[0].key)
        # MXFP4 is never transposed, unlike other fused experts
        return [whole(stored.key, shape)] if stored is not None and stored.is_packed else pieces

    def _misfit(self, piece: Piece) -> str:
        """Return why no stored tensor fits this piece of the model, or ""."""
        stored = self.stored.get(piece.key)
        if stored is None:
            return f"missing, {self.name} does not have {shown(piece.key)}."
        if stored.shape != piece.shape:
            return (
                f"{self.name} has {shown(piece.key)} with shape {stored.shape}, the model expects "
                f"{piece.shape}."
            )
        problem = describe_misfit(stored)
        return problem and f"{self.name}: {problem}."


def is_equal(first: Read, second: Read) -> bool:
    """Return True if both hold the same values, whatever their dtypes. Reads two chunks of 32 MiB
    at a time.

    A reader that converts its tensors reads whole tensors instead, once.
    """
    if first.shape != second.shape:
        return False
    region = whole(first.name, first.shape).region
    readers = (first.reader, second.reader)
    is_streamed = all(isinstance(reader, SafetensorsReader) for reader in readers)
    for part in region.slabs(_CHUNK_ELEMENTS) if is_streamed else [region]:
        values = [  # float64 represents all other dtypes exactly
            read_region(read.reader, read.name, part, torch.float64) for read in (first, second)
        ]
        if not torch.equal(*values):
            return False
    return True


def explain_untied(where: str, target: str, otherwise: str) -> str:
    """Return the reason why a tensor tied to `target`, but stored in `where` with different values,
    has no source.
    """
    return (
        f"{where} has it with different values than {target}, to which config.json ties it. "
        "transformers would load both tensors; here one of them would be lost. Set "
        f"{TIE_FLAG} = false in its config.json{otherwise}."
    )


class NativeFormat:
    """The `CheckpointFormat` of the native decoder: Hugging Face's keys, in the model's order.

    Tensors for which the architecture has no key are in the titanlite subfolder.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.layout = Layout()

    def sources(self, folder: str, stored: Stored) -> "HFCheckpoint":
        """Return the weights `stored` in `folder` as a source; later saves use the same layout of
        keys.
        """
        checkpoint = HFCheckpoint(folder, stored, self._config)
        self.layout = checkpoint.layout
        return checkpoint

    def check(self, plan: Plan) -> list[str]:
        return []

    def files(self, plan: Plan, dtype: torch.dtype) -> list[FileLayout]:
        family = family_of(self._config)
        used = _find_used(plan, [entry for entry in plan.entries if is_sidecar(entry.fqn, family)])
        entries = [
            entry
            for entry in plan.entries
            if entry.info.persistent and (entry.fqn in used or not is_sidecar(entry.fqn, family))
        ]
        owners = assign_owners((entry.tensor for entry in entries), plan.group)
        model: list[Item] = []
        sidecar: list[Item] = []
        for entry, owner in zip(entries, owners, strict=True):
            local = local_of(entry.tensor)
            saved = entry.saved_dtype(dtype)
            held = sidecar if entry.fqn in used else model
            held += [
                Item(piece, saved, local, entry.region, owner.is_owner, entry.fqn)
                for piece in checkpoint_pieces(
                    entry.fqn, entry.info.shape, self._config, self.layout
                )
            ]
        stem = SIDECAR_FILE.removesuffix(".safetensors")
        return lay_out(model, "model") + (lay_out(sidecar, stem) if sidecar else [])


def master_files(plan: Plan, dtype: torch.dtype) -> list[FileLayout]:
    """Lay out full-precision copies of the parameters that lose bits in `dtype`, for a resumed run,
    in the titanlite subfolder. The same on all ranks.
    """
    masters = [
        (MASTER_PREFIX + entry.fqn, entry.tensor)
        for entry in plan.entries
        if entry.saved_dtype(dtype).itemsize < entry.dtype.itemsize
    ]
    return lay_out_tensors(masters, f"{OWN_FOLDER}/weights", plan.group)


class HFFormat:
    """The model's files in a run's checkpoints: a Hugging Face folder. A subclass for another
    format overrides the methods.
    """

    def __init__(self, section: CheckpointSection, model: ModelSection) -> None:
        self.base = section.initial_load_path
        self._model = model
        self._assets = assets_folder(model, section)
        self._absent_bias = section.allow_missing_expert_bias
        self._dtype: torch.dtype = getattr(torch, section.export_dtype)

    def initial_sources(self, model: Model) -> list[SourceProvider]:
        """Find the sources of a new run's weights: a pretrained model, or none. Collective: every
        rank must call.
        """
        if self.base:
            return [weights_of(Path(self.base), model, absent_bias=self._absent_bias)]
        assets = self._model.hf_assets_path
        is_meant = self._model.init == "random"
        if (
            assets
            and not is_meant
            and any(Path(assets).glob("*.safetensors"))
            and dist.get_rank() == 0
        ):
            logger.warning(
                "checkpoint: weights are random, although %s has weights; to begin with them, set "
                "model.path to it",
                assets,
            )
        return []

    def sources(self, folder: Path, model: Model) -> list[SourceProvider]:
        """Find the weights of the checkpoint in `folder`, to resume from. Collective: every rank
        must call.
        """
        return [weights_of(folder, model, exact=True)]

    def files(self, plan: Plan) -> list[FileLayout]:
        """Lay out the model's files, with this rank's shards of the weights."""
        return [*format_of(plan.model).files(plan, self._dtype), *master_files(plan, self._dtype)]

    def describe(
        self, model: Model, token_ids: TokenIds, end_of_turn_ids: Sequence[int]
    ) -> dict[str, bytes]:
        """Build the files next to the weights, content by file name. Call on one rank."""
        return describe_model(model.config, token_ids, self._dtype, self._assets, end_of_turn_ids)


def index_of(files: Sequence[FileLayout]) -> dict[str, bytes]:
    """Return the content of the index file by its name if the model has several `files`; else
    {}.
    """
    models = [file for file in files if file.is_of_model]
    if len(models) < 2:
        return {}
    places = sorted((item.key, file.name) for file in models for item in file.items)
    size = sum(item.nbytes for file in models for item in file.items)
    index = {"metadata": {"total_size": size}, "weight_map": dict(places)}
    return {INDEX_FILE: (json.dumps(index, indent=2) + "\n").encode()}


def check_layout(plan: Plan) -> list[str]:
    """Return the problems of tensors that the model's files cannot hold: they have no key, or their
    values are quantized. The same on all ranks.
    """
    encoded = [
        f"{entry.fqn} ({entry.form})" for entry in plan.entries if entry.encoding is not None
    ]
    if encoded:
        return [
            f"checkpoint: {encoded[0]} and {len(encoded) - 1} other tensors are quantized, and no "
            "model is saved quantized. Save the adapters, and merge them: python -m titanlite "
            "export --merge."
        ]
    return format_of(plan.model).check(plan)


def _find_used(plan: Plan, buffers: Sequence[TensorEntry]) -> set[str]:
    """Return the names of the buffers that hold a value other than zero, or that are still on meta.
    Collective with pipeline stages.
    """
    return plan.names_on_any_stage(
        {
            entry.fqn
            for entry in buffers
            if not entry.is_remote
            and (entry.tensor.is_meta or local_of(entry.tensor).count_nonzero())
        }
    )


def warn_of_sidecar(config: Any, files: list[FileLayout]) -> None:
    """Warn on rank 0 of saved tensors that Hugging Face's architecture does not have."""
    count = sum(len(file.items) for file in files if file.name == SIDECAR_FILE)
    if count and get_rank() == 0:
        logger.warning(
            "checkpoint: %s has no place for expert_bias, so transformers will choose "
            "different experts than this run did; the %d tensors are kept in %s. For an exact "
            "export, balance with moe.aux_loss_coeff instead.",
            family_of(config).architecture,
            count,
            SIDECAR_FILE,
        )
