"""Adapters merged into the weights of their model: `W + alpha / rank * B A`, any part of a weight at a time."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.checkpoint.folder import Stored
from titanlite.checkpoint.reader import Placed, SafetensorsReader
from titanlite.features.lora.layers import adaptable_experts
from titanlite.features.lora.peft_format import PREFIX, read_adapter
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import Read, ReadRequest, Region, Source, SourceProvider, TensorInfo, TensorReader, Unfit
from titanlite.models.interface import Model

_CHUNK_ELEMENTS = 4 << 20
_EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class MergedAdapters:
    """The corrections of the adapters in a folder, for a model with weights of the given global shapes.

    Reads one pair of matrices at a time. Adapters that `peft` trained are served too, if they are of linear layers or
    of fused experts. `base` is the model that adapter_config.json names: a folder, or `owner/model[@revision]` of the
    hub.

    Raises:
        CheckpointError: there are no adapters, they are damaged, or they do not fit the model. All problems at once.
    """

    def __init__(self, folder: Path) -> None:
        stored, config = read_adapter(folder)
        self.base = config.base
        self.folder, self._scaling, self._stored = folder, config.scaling, stored
        self._parameters, self._rank = config.target_parameters, config.rank
        self._pairs: dict[str, tuple[str, str]] = {}
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._transposed: frozenset[str] = frozenset()
        placed = {
            key: (tensor.shape, [Placed(tensor, Region((0,) * len(tensor.shape), tensor.shape))])
            for key, tensor in stored.tensors.items()
        }
        self._reader = SafetensorsReader(str(folder), placed, stored.file_bytes)
        self._pair = lru_cache(maxsize=2)(self._read_pair)  # the pieces of one weight are asked for in a row

    def fit(self, shapes: Mapping[str, tuple[int, ...]], transposed: Collection[str] = ()) -> None:
        """Find the weight of every adapter among those of these global shapes; experts named in `transposed` are (E,
        in, out).
        """
        problems = []
        self._shapes, self._transposed = shapes, frozenset(transposed)
        for key in self._stored.tensors:
            module, _, leaf = key.removeprefix(PREFIX).rpartition(".lora_A.weight")
            if not key.startswith(PREFIX) or leaf or not module:
                if not key.endswith(".lora_B.weight"):
                    problems.append(f"{key}: is no LoRA adapter.")
                continue
            name = self._weight_of(module, shapes)
            other = f"{PREFIX}{module}.lora_B.weight"
            if name is None:
                problems.append(f"{key}: the model has no weight that it is for.")
            elif other not in self._stored.tensors:
                problems.append(f"{other}: missing.")
            else:
                shape = shapes[name]
                turned = (shape[0], shape[2], shape[1]) if name in self._transposed else shape
                problem = _misfit(self._stored, key, other, turned, self._rank)
                problems += [problem] if problem else []
                self._pairs[name] = (key, other)
        paired = {key for pair in self._pairs.values() for key in pair}
        if not problems:
            problems = [f"{key}: has no lora_A." for key in self._stored.tensors if key not in paired]
        raise_problems(CheckpointError, f"checkpoint {self.folder}", problems)

    def _weight_of(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        if f"{module}.weight" in shapes:
            return f"{module}.weight"
        inner = module.removesuffix(".base_layer")
        # Of two adapted parameters the first is wrapped first, so it is the inner one.
        wrapped = [
            f"{inner}.{leaf}"
            for leaf in _EXPERT_WEIGHTS
            if f"{inner}.{leaf}" in shapes
            and any(f".{inner}.{leaf}".endswith(f".{target}") for target in self._parameters)
        ]
        if inner != module and len(wrapped) < 2:
            return None
        name = wrapped[0 if inner != module else -1] if wrapped else None
        return name if name in shapes else None

    def __contains__(self, name: str) -> bool:
        return name in self._pairs

    def add(self, name: str, region: Region, values: torch.Tensor) -> torch.Tensor:
        """Return `values` (float64), the `region` of the weight `name`, with its correction added."""
        a, b = self._pair(name)
        rows, columns = region.slices[-2:]
        if name in self._transposed:
            rows, columns = columns, rows
        if len(region.starts) == 3:
            experts = region.slices[0]
            delta = b[experts, rows] @ a[experts, :, columns]
            delta = delta.mT if name in self._transposed else delta
        else:
            delta = b[rows] @ a[:, columns]
        return values + self._scaling * delta

    def _read_pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of the weight `name` in float64; of experts (E, r, in) and (E, out, r)."""
        a, b = (self._read(key) for key in self._pairs[name])
        if len(self._shapes[name]) == 2:
            return a, b
        num_experts = self._shapes[name][0]
        return a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1).contiguous()

    def _read(self, key: str) -> torch.Tensor:
        shape = self._stored.tensors[key].shape
        values = torch.empty(shape, dtype=torch.float64)
        self._reader.read_quietly([ReadRequest(key, Region((0,) * len(shape), shape), values)])
        return values


def _misfit(stored: Stored, key_a: str, key_b: str, shape: tuple[int, ...], rank: int) -> str | None:
    """Why the pair of `rank` does not fit a weight of `shape`, (out, in) or (E, out, in); None if it does."""
    a, b = stored.tensors[key_a].shape, stored.tensors[key_b].shape
    experts = shape[0] if len(shape) == 3 else 1
    if (a, b) == ((rank * experts, shape[-1]), (shape[-2], rank * experts)):
        return None
    return f"{key_a}: shapes {a} and {b} (lora_B) do not fit rank {rank} and the model's weight {shape}."


class MergedSource:
    """A `SourceProvider` of the weights of `source`, for `model`, with the corrections of `adapters`; raises as `fit`,
    when it is called.
    """

    def __init__(self, source: SourceProvider, adapters: MergedAdapters, model: Model) -> None:
        self.name, self.complete = source.name, source.complete
        self._source, self._adapters, self._transposed = source, adapters, transposed_experts(model)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._tied = names - {name for name, _ in model.named_parameters()}  # no weights of their own to add to

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source | Unfit]]:
        own = {name: info for name, info in tensors.items() if name not in self._tied}
        shapes = {name: info.shape for name, info in own.items() if info.kind == "parameter"}
        self._adapters.fit(shapes, self._transposed)
        readers: dict[int, _MergingReader] = {}  # all reads of one reader are handed over together
        for name, source in self._source(tensors):
            if isinstance(source, Read):
                reader = readers.setdefault(id(source.reader), _MergingReader(source.reader, self._adapters))
                source = replace(source, reader=reader)
            yield name, source


class _MergingReader:
    """A `TensorReader` that adds the corrections of adapters in float64, a few MiB at a time, and rounds once."""

    proves_coverage = False

    def __init__(self, inner: TensorReader, adapters: MergedAdapters) -> None:
        self.name, self._inner, self._adapters = inner.name, inner, adapters

    def read(self, requests: Sequence[ReadRequest]) -> None:
        self._inner.read([request for request in requests if request.name not in self._adapters])
        self._merge(requests)

    def read_quietly(self, requests: Sequence[ReadRequest]) -> None:
        read_quietly(self._inner, [request for request in requests if request.name not in self._adapters])
        self._merge(requests)

    def _merge(self, requests: Sequence[ReadRequest]) -> None:
        for request in requests:
            (first, *starts), (length, *lengths) = request.region.starts, request.region.lengths
            rows = max(1, _CHUNK_ELEMENTS * length // max(request.region.numel, 1))
            for row in range(0, length, rows) if request.name in self._adapters else ():
                count = min(rows, length - row)
                region = Region((first + row, *starts), (count, *lengths))
                values = torch.empty(region.lengths, dtype=torch.float64)
                read_quietly(self._inner, [ReadRequest(request.name, region, values)])
                request.destination[row : row + count] = self._adapters.add(request.name, region, values)


def read_quietly(reader: TensorReader, requests: Sequence[ReadRequest]) -> None:
    """Read without a word on the terminal, where the reader has any."""
    getattr(reader, "read_quietly", reader.read)(requests)


def transposed_experts(model: Model) -> list[str]:
    """Return the names of the experts' weights that are stored (E, in, out)."""
    if not isinstance(model, TransformersModel):
        return []
    modules = dict(model.transformers_model.named_modules())
    experts = adaptable_experts(model).items()
    return [f"{name}.{weight}" for name, weights in experts if modules[name].is_transposed for weight in weights]
