"""A Hugging Face folder as the source of a model's weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.folder import (
    FP8,
    OWN_FOLDER,
    UNFINISHED_FILES,
    Stored,
    companions,
    read_headers,
    read_json,
    read_model_headers,
    shown,
)
from titanlite.checkpoint.pieces import (
    IGNORED_SUFFIXES,
    MASTER_PREFIX,
    SIDECAR_FILE,
    Piece,
    checkpoint_pieces,
    explain_unexpected,
    find_passengers,
    is_sidecar,
    whole,
)
from titanlite.checkpoint.reader import Placed, SafetensorsReader, place
from titanlite.config import ModelConfig
from titanlite.materialize import Read, ReadRequest, Region, Source, TensorInfo, Unfit
from titanlite.models.families import Family, family_of
from titanlite.models.families.keys import describe_unreadable, find_quantization
from titanlite.models.interface import Model

_CHUNK_ELEMENTS = 4 << 20
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FLAG, _OVERRIDE = "tie_word_embeddings", ", or in training model.overrides.tie_word_embeddings = false"


def weights_of(folder: Path, model: Model, *, exact: bool = False) -> Any:
    """Return the weights of the Hugging Face model in `folder`, as a source for `materialize(model)`.

    `untied` names tied tensors that are stored twice, and what is wrong with each.

    Raises CheckpointError, collectives: as `hf_checkpoint`.
    """
    if (own := model.checkpoint_format) is not None:
        return own.sources(str(folder), _read_stored(folder, exact))
    return hf_checkpoint(folder, model.config, exact=exact)


def hf_checkpoint(folder: Path, config: ModelConfig, *, exact: bool = False) -> "HFCheckpoint":
    """Return the weights of the Hugging Face model in `folder`, as a source for `materialize` of the native decoder.

    `expert_bias` that the architecture has no key for is taken from the folder's titanlite part. So are, with `exact`,
    parameters that were saved once more in the precision of the run.

    Raises CheckpointError: on all ranks; there is no model there, or files are missing or damaged.

    Collectives: two broadcasts of what rank 0 reads; every rank must call. A tied head that is stored too is
    compared with the embedding.
    """
    stored = _read_stored(folder, exact)
    checkpoint = HFCheckpoint(str(folder), stored, family_of(config))
    if config.tie_word_embeddings and {_HEAD, _EMBEDDING} <= stored.tensors.keys():
        checkpoint.untied = on_first_rank(checkpoint.find_untied)
    return checkpoint


def _read_stored(folder: Path, exact: bool) -> Stored:
    def read() -> Stored:
        unfinished = sorted((folder / OWN_FOLDER).glob(UNFINISHED_FILES)) if exact else []
        stored = read_headers(unfinished, f"checkpoint {folder}") if unfinished else read_model_headers(folder)
        wide = {key: t.nbytes for key, t in stored.tensors.items() if t.dtype in (torch.float32, torch.float64)}
        # A minority of the bytes is in float32 on purpose, as routers are; a majority is a folder in float32.
        kept = frozenset(wide if 2 * sum(wide.values()) < sum(t.nbytes for t in stored.tensors.values()) else ())
        own = [folder / OWN_FOLDER / SIDECAR_FILE, *sorted((folder / OWN_FOLDER).glob("weights*.safetensors"))]
        own = [path for path in own if path.exists() and (exact or path.name == SIDECAR_FILE)]
        if own and not unfinished:
            extra = read_headers(own, f"checkpoint {folder}")
            stored = Stored(stored.tensors | extra.tensors, stored.file_bytes | extra.file_bytes)
        has_config = (folder / "config.json").exists()
        hf_config = read_json(folder / "config.json", f"checkpoint {folder}") if has_config else {}
        quantization = find_quantization(hf_config)
        if problem := describe_unreadable(quantization):
            raise CheckpointError(f"checkpoint {folder}: config.json: {problem}")
        block = {"weight_block_size": (128, 128), **(quantization or {})}["weight_block_size"]
        return replace(stored, block=block and tuple(block), in_float32=kept)

    return on_first_rank(read)


class HFCheckpoint:
    """A `SourceProvider`: every persistent tensor of the model is read from the stored tensors that make it up.

    Complete and strict: what is missing, unexpected, or of another shape is an error, all of them at once.
    """

    complete = True

    def __init__(self, folder: str, stored: Stored, family: Family) -> None:
        self.name = f"checkpoint {folder}"
        self.passengers = list[str]()  # what the model does not compute, once this was called
        self._folder, self.stored, self._family = folder, stored, family
        self.untied: Mapping[str, str] = {}  # what is wrong with tied tensors that are stored twice
        self.reader: SafetensorsReader | None = None

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source | Unfit]]:
        claims: list[tuple[str, Source | Unfit]] = []
        placed: dict[str, tuple[tuple[int, ...], Sequence[Placed]]] = {}
        used: set[str] = set()
        self.reader = SafetensorsReader(self._folder, placed, self.stored.file_bytes)
        for name, info in tensors.items():
            if not info.persistent:
                continue
            pieces = self._pieces(name, info.shape)
            used.update([piece.key for piece in pieces])
            if pieces[0].key.startswith(MASTER_PREFIX):  # the model's own files have it too, with fewer bits
                used.update([piece.key for piece in checkpoint_pieces(name, info.shape, self._family)])
            found = [piece for piece in pieces if piece.key in self.stored.tensors]
            if not found:
                continue  # the plan knows whether it may be absent
            missing = [piece.key for piece in pieces if piece.key not in self.stored.tensors]
            problems = [f"missing, {self.name} does not have {shown(key)}." for key in missing]
            parts = [part for piece in found for part in self._place(piece, used, problems)]
            claims += [(name, Unfit(problem)) for problem in problems]
            placed[name] = (info.shape, parts)
            kept = not self.stored.in_float32.isdisjoint(piece.key for piece in found)
            claims.append((name, Read(self.reader, name, info.shape, kept)))
        claims += [(name, Unfit(problem)) for name, problem in self.untied.items()]
        self.passengers = find_passengers(self.stored.tensors, used)
        known = used.union(self.passengers)
        claims += [
            (shown(key), Unfit(explain_unexpected(self.name)))
            for key in self.stored.tensors
            if key not in known and not key.endswith(IGNORED_SUFFIXES)
        ]
        return claims

    def find_untied(self) -> dict[str, str]:
        """Return what is wrong with a stored head that the model ties to the embedding: other values. By name."""
        places: dict[str, tuple[tuple[int, ...], Sequence[Placed]]] = {}
        for key in (_HEAD, _EMBEDDING):
            shape = self.stored.tensors[key].shape
            places[key] = shape, self._place(whole(key, shape), set(), [])
        reader = SafetensorsReader(self._folder, places, self.stored.file_bytes)
        reads = [Read(reader, key, shape) for key, (shape, _) in places.items()]
        return {} if is_equal(*reads) else {_HEAD: explain_untied(self.name, _EMBEDDING, _FLAG, _OVERRIDE)}

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        if MASTER_PREFIX + name in self.stored.tensors:
            return [whole(MASTER_PREFIX + name, shape)]
        if is_sidecar(name, self._family) or name in self.stored.tensors:
            return [whole(name, shape)]  # also fused experts, as transformers has them in memory
        return list(checkpoint_pieces(name, shape, self._family))

    def _place(self, piece: Piece, used: set[str], problems: list[str]) -> list[Placed]:
        stored = self.stored.tensors[piece.key]
        if stored.shape != piece.shape:
            problems.append(
                f"{self.name} has {shown(piece.key)} with shape {stored.shape}, the model expects {piece.shape}."
            )
        used.update(companions(piece.key) if stored.dtype in FP8 else ())
        try:
            return place(stored, piece.region, self.stored.tensors, self.stored.block)
        except ValueError as error:
            problems.append(f"{self.name}: {error}.")
            return []


def is_equal(first: Read, second: Read) -> bool:
    """Return True if both hold the same values, whatever their dtypes. Two chunks of 32 MiB are in memory.

    A tensor of a reader that converts is read whole.
    """
    if first.shape != second.shape:
        return False
    whole = Region((0,) * len(first.shape), first.shape)
    is_streamed = isinstance(first.reader, SafetensorsReader) and isinstance(second.reader, SafetensorsReader)
    return all(
        torch.equal(_read(first, region), _read(second, region))
        for region in (whole.slabs(_CHUNK_ELEMENTS) if is_streamed else [whole])
    )


def _read(read: Read, region: Region) -> torch.Tensor:
    values = torch.empty(region.lengths, dtype=torch.float64)  # which holds the values of all others
    getattr(read.reader, "read_quietly", read.reader.read)([ReadRequest(read.name, region, values)])
    return values


def explain_untied(where: str, target: str, flag: str, otherwise: str = "") -> str:
    """Return why no source fits a tensor that is tied to `target`, and stored with other values in `where`."""
    remedy = f"Set {flag} = false in its config.json{otherwise}" if flag else "Correct the file"
    return (
        f"{where} has it with other values than {target}, to which config.json ties it; transformers takes the values, "
        f"and one of them would be lost here. {remedy}."
    )
