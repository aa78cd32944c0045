"""Merging of adapters into the weights of their model: `W + alpha / rank * B A`, for any part of a
weight.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.checkpoint.folder import Stored
from titanlite.checkpoint.reader import SafetensorsReader, read_quietly, read_region
from titanlite.features.lora.layers import adaptable_experts
from titanlite.features.lora.peft_format import (
    PREFIX,
    AdapterConfig,
    find_rows,
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
_KEY = re.compile(re.escape(PREFIX) + r"(.+)\.lora_[AB]\.weight")
_EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class MergedSource:
    """A `SourceProvider` of the weights of `source` for `model`, merged with the adapters in
    `folder`.

    Adapters from `peft` are supported if they belong to linear layers or fused experts.

    Raises:
        CheckpointError: the adapters are missing or damaged, or, in a call, do not fit the model.
    """

    def __init__(self, source: SourceProvider, folder: Path, model: Model) -> None:
        self.name, self.complete = source.name, source.complete
        self._source, self._folder, self._model = source, folder, model
        self._stored, self._config = read_adapter(folder)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        # further names of tied weights: nothing is added to these
        self._tied = names - {name for name, _ in model.named_parameters()}

    def __call__(
        self, tensors: Mapping[str, TensorInfo]
    ) -> Iterable[tuple[str, Source | InvalidClaim]]:
        own = {name: info for name, info in tensors.items() if name not in self._tied}
        shapes = {name: info.shape for name, info in own.items() if info.kind == "parameter"}
        corrections = _Corrections(self._folder, self._stored, self._config, shapes, self._model)
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
    """The corrections `B A` of the weights of `model`, by name; `shapes` has the weights' global
    shapes.

    One pair of matrices is read at a time.
    """

    def __init__(
        self,
        folder: Path,
        stored: Stored,
        config: AdapterConfig,
        shapes: Mapping[str, tuple[int, ...]],
        model: Model,
    ) -> None:
        self._scaling, self._stored, self._shapes = config.scaling, stored, shapes
        self._transposed = _transposed_experts(model)  # experts (E, in, out)
        self._config = model.config
        self._pairs: dict[str, list[str]] = {}
        weights, modules, problems = (
            _weights_by_module(shapes, config.target_parameters),
            dict[str, str](),
            list[str](),
        )
        # `peft` may have loaded the whole image-and-text model, or only its text model
        key_of = layout_of(model).key
        weights |= {key_of(module): name for module, name in weights.items()}
        for key in stored.tensors:
            if (match := _KEY.fullmatch(key)) is None:
                problems.append(f"{key}: is no LoRA adapter.")
            elif match[1] not in weights:
                problems.append(f"{key}: the model has no weight for this adapter.")
            else:
                modules[match[1]] = weights[match[1]]
        for module, name in modules.items():
            keys = [f"{PREFIX}{module}.lora_{leaf}.weight" for leaf in "AB"]
            missing = [f"{key}: missing." for key in keys if key not in stored.tensors]
            problems += missing or self._misfits(name, keys, config.rank)
            self._pairs[name] = keys
        raise_problems(CheckpointError, f"checkpoint {folder}", problems)
        self._reader = SafetensorsReader.of_keys(str(folder), stored, stored.tensors)
        # the pieces of one weight are requested one after another
        self._pair = lru_cache(maxsize=2)(self._read_pair)

    def _misfits(self, name: str, keys: Sequence[str], rank: int) -> list[str]:
        shape = self._shapes[name]
        shape = (shape[0], shape[2], shape[1]) if name in self._transposed else shape
        a, b = (self._stored.tensors[key].shape for key in keys)
        experts = shape[0] if len(shape) == 3 else 1
        if (a, b) == ((rank * experts, shape[-1]), (shape[-2], rank * experts)):
            return []
        return [
            f"{keys[0]}: shapes {a} and {b} (lora_B) do not fit rank {rank} and the model's weight "
            f"{shape}."
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._pairs

    def add(self, name: str, region: Region, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` (float64), which are the `region` of the weight `name`, and of
        its correction `B A`.
        """
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
        a, b = self._reader.read_whole(dict.fromkeys(self._pairs[name], torch.float64)).values()
        if rows := list(find_rows(name, self._config)):
            in_memory = torch.cat([torch.arange(start, start + count) for start, count in rows])
            b = torch.empty_like(b).index_copy_(0, in_memory, b)
        if len(self._shapes[name]) == 2:
            return a, b
        num_experts = self._shapes[name][0]
        return a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(
            2, 0, 1
        ).contiguous()


def _weights_by_module(shapes: Iterable[str], targets: Sequence[str]) -> dict[str, str]:
    """Return the weights that can have adapters, by the name of the module that peft wraps;
    `targets` are names of parameters.
    """
    experts: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        if leaf in _EXPERT_WEIGHTS and any(f".{name}".endswith(f".{target}") for target in targets):
            experts[module].append(name)
    found = {name.removesuffix(".weight"): name for name in shapes if name.endswith(".weight")}
    for module, names in experts.items():
        names.sort(key=lambda name: _EXPERT_WEIGHTS.index(name.rpartition(".")[2]))
        found[module] = names[-1]
        if len(names) > 1:  # the first one is wrapped first, so it is the inner one
            found[f"{module}.base_layer"] = names[0]
    return found


class _MergingReader:
    """A `TensorReader` that adds corrections in float64, a few MiB at a time, and rounds once."""

    proves_coverage = False

    def __init__(self, inner: TensorReader, corrections: _Corrections) -> None:
        self.name, self._inner, self._corrections = inner.name, inner, corrections

    def read(self, requests: Sequence[ReadRequest]) -> None:
        read_quietly(
            self._inner, [request for request in requests if request.name not in self._corrections]
        )
        for request in requests:
            (first, *starts), (length, *lengths) = request.region.starts, request.region.lengths
            rows = max(1, _CHUNK_ELEMENTS * length // max(request.region.numel, 1))
            for row in range(0, length, rows) if request.name in self._corrections else ():
                count = min(rows, length - row)
                region = Region((first + row, *starts), (count, *lengths))
                values = read_region(self._inner, request.name, region, torch.float64)
                request.destination[row : row + count] = self._corrections.add(
                    request.name, region, values
                )


def _transposed_experts(model: Model) -> list[str]:
    """Return the names of the experts' weights that are stored (E, in, out)."""
    if not isinstance(model, TransformersModel):
        return []
    modules = dict(model.transformers_model.named_modules())
    experts = adaptable_experts(model).items()
    return [
        f"{name}.{weight}"
        for name, weights in experts
        if modules[name].is_transposed
        for weight in weights
    ]
