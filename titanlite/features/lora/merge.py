"""Merging of adapters into the weights of their model: `W + alpha / rank * B A`, for any part of a
weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.checkpoint.folder import Stored
from titanlite.checkpoint.pieces import whole
from titanlite.checkpoint.reader import read_region
from titanlite.features.lora.peft_format import (
    PREFIX,
    AdapterCheckpoint,
    AdapterConfig,
    adapter_place,
    layout_of,
    read_adapter,
)
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import (
    InvalidClaim,
    Read,
    ReadRequest,
    Region,
    Source,
    SourceProvider,
    TensorInfo,
    TensorReader,
)
from titanlite.models.interface import Model

_CHUNK_ELEMENTS = 4 << 20


class MergedSource:
    """A `SourceProvider` of the weights of `source` for `model`, merged with the adapters in
    `folder`.

    Adapters from `peft` are supported if they belong to linear layers or fused experts.

    Raises:
        CheckpointError: the adapters are missing or damaged, or, in a call, do not fit the model.
    """

    def __init__(self, source: SourceProvider, folder: Path, model: Model) -> None:
        self.name = source.name
        self.complete = source.complete
        self._source, self._folder, self._model = source, folder, model
        self._stored, self._config = read_adapter(folder)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        # further names of tied weights: nothing is added to these
        self._tied = names - {name for name, _ in model.named_parameters()}

    def __call__(
        self, tensors: Mapping[str, TensorInfo]
    ) -> Iterable[tuple[str, Source | InvalidClaim]]:
        matrices = {
            name: info
            for name, info in tensors.items()
            if name not in self._tied and info.kind == "parameter" and len(info.shape) > 1
        }
        corrections = _Corrections(self._folder, self._stored, self._config, matrices, self._model)
        # by reader, because a reader gets all its reads in one call
        readers: dict[int, _MergingReader] = {}
        for name, source in self._source(tensors):
            if isinstance(source, Read):
                reader = readers.setdefault(
                    id(source.reader), _MergingReader(source.reader, corrections)
                )
                source = replace(source, reader=reader)
            yield name, source


class _Corrections:
    """The corrections `B A` of the `matrices` of `model`, by name. One pair of adapters is read at
    a time.
    """

    def __init__(
        self,
        folder: Path,
        stored: Stored,
        config: AdapterConfig,
        matrices: Mapping[str, TensorInfo],
        model: Model,
    ) -> None:
        self._scaling = config.scaling
        self._transposed = _transposed_experts(model)
        pairs: dict[str, tuple[str, str]] = {}
        adapters: dict[str, TensorInfo] = {}
        for name, info in matrices.items():
            is_target = any(f".{name}".endswith(f".{end}") for end in config.target_parameters)
            if not is_target and not name.endswith(".weight"):
                continue
            *experts, rows, columns = info.shape
            if name in self._transposed:
                rows, columns = columns, rows
            prefix = name.removesuffix("weight").removesuffix("proj")
            a, b = f"{prefix}lora_A", f"{prefix}lora_B"
            pairs[name] = a, b
            adapters[a] = replace(info, shape=(*experts, config.rank, columns))
            adapters[b] = replace(info, shape=(*experts, rows, config.rank))
        stored = _with_prefix(stored, model)
        is_stored = {
            name: adapter_place(name, info.shape, adapters, model).key in stored
            for name, info in adapters.items()
        }
        self._pairs = {
            name: (a, b) for name, (a, b) in pairs.items() if is_stored[a] or is_stored[b]
        }
        wanted = {name: adapters[name] for pair in self._pairs.values() for name in pair}
        self._reads: dict[str, Read] = {}
        problems = list[str]()
        for name, claim in AdapterCheckpoint(str(folder), stored, model)(wanted):
            if isinstance(claim, Read):
                self._reads[name] = claim
            elif isinstance(claim, InvalidClaim):
                problems.append(f"{name}: {claim.reason}")
        raise_problems(CheckpointError, f"checkpoint {folder}", problems)
        # the pieces of one weight are requested one after another
        self._pair = lru_cache(maxsize=2)(self._read_pair)

    def __contains__(self, name: str) -> bool:
        return name in self._pairs

    def add(self, name: str, region: Region, values: torch.Tensor) -> torch.Tensor:
        """Return `values` (float64), the values of the weight `name` in `region`, plus the
        correction by its adapters there.
        """
        a, b = self._pair(name)
        *experts, rows, columns = region.slices
        if name in self._transposed:
            delta = b[(*experts, columns)] @ a[(*experts, slice(None), rows)]
            return values + self._scaling * delta.mT
        return values + self._scaling * (b[(*experts, rows)] @ a[(*experts, slice(None), columns)])

    def _read_pair(self, name: str) -> list[torch.Tensor]:
        """Return A (r, in) and B (out, r) of the weight `name` in float64; for experts, both with a
        leading dim of experts.
        """
        reads = [self._reads[adapter] for adapter in self._pairs[name]]
        return [
            read_region(read.reader, read.name, whole(read.name, read.shape).region, torch.float64)
            for read in reads
        ]


def _with_prefix(stored: Stored, model: Model) -> Stored:
    """Return `stored` under the keys of the whole image-and-text model; `peft` may have loaded only
    its text model.
    """
    layout = layout_of(model)
    tensors = {}
    for key, tensor in stored.items():
        inner = key.removeprefix(PREFIX)
        is_whole = inner.startswith(layout.prefix)
        tensors[key if is_whole else PREFIX + layout.key(inner)] = tensor
    return tensors


class _MergingReader:
    """A `TensorReader` that adds corrections in float64, a few MiB at a time, and rounds once."""

    proves_coverage = False

    def __init__(self, inner: TensorReader, corrections: _Corrections) -> None:
        self.name = inner.name
        self._inner = inner
        self._corrections = corrections

    def read(self, requests: Sequence[ReadRequest]) -> None:
        self._inner.read([request for request in requests if request.name not in self._corrections])
        for request in requests:
            if request.name not in self._corrections:
                continue
            for box in request.region.slabs(_CHUNK_ELEMENTS):
                values = read_region(self._inner, request.name, box, torch.float64)
                merged = self._corrections.add(request.name, box, values)
                request.destination[box.within(request.region).slices] = merged


def _transposed_experts(model: Model) -> set[str]:
    """Return the names of the experts' weights that are stored (E, in, out)."""
    if not isinstance(model, TransformersModel):
        return set()
    return {
        f"{name}.{leaf}"
        for name, module in model.expert_modules.items()
        if module.is_transposed
        for leaf, _ in module.named_parameters(recurse=False)
    }
