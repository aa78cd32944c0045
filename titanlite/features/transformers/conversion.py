"""Conversion between the tensors of a checkpoint and the tensors that a class of transformers has
in memory.

transformers describes the difference as renamings and operations on whole tensors (stack the
experts, concatenate gate and up, cut a fused projection). Here transformers' own operations run on
`Traced` placeholders, which record for each element the stored tensor and the position that it
comes from. So the position of a shard in the files is known too. Operations that a placeholder
cannot follow (transpositions, permutations) run on whole tensors, and the reader dequantizes MXFP4.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from titanlite.checkpoint.folder import Stored
from titanlite.checkpoint.quantized import FP8
from titanlite.checkpoint.reader import SafetensorsReader
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import ReadRequest


class NotTraceable(Exception):  # noqa: N818 - no error: the caller has another way
    """An operation that does more than place regions of tensors. The text is the name of the
    operation.
    """


@dataclass(frozen=True)
class TracedPart:
    """A block of a tensor, and the block of the source with the same elements.

    Attributes:
        key: name of the source.
        starts: first index of the block in the traced tensor.
        source_starts, source_lengths: the block in the source.
        dims: for each dim of the traced tensor, the corresponding dim of the source, or None for an
            inserted dim.
    """

    key: str
    starts: tuple[int, ...]
    source_starts: tuple[int, ...]
    source_lengths: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the block in the traced tensor."""
        return tuple(1 if dim is None else self.source_lengths[dim] for dim in self.dims)


@dataclass(frozen=True)
class Traced:
    """A placeholder for a tensor that records the origin of its elements; works with torch.stack,
    cat, chunk, split.

    Attributes:
        shape: shape of the tensor.
        parts: disjoint blocks that cover it.
    """

    shape: tuple[int, ...]
    parts: tuple[TracedPart, ...]

    @classmethod
    def source(cls, key: str, shape: tuple[int, ...]) -> "Traced":
        """Return a placeholder for the whole source `key`."""
        return cls(
            shape,
            (
                TracedPart(
                    key, (0,) * len(shape), (0,) * len(shape), shape, tuple(range(len(shape)))
                ),
            ),
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (implementation := _FUNCTIONS.get(function)) is None:
            raise NotTraceable(getattr(function, "__name__", str(function)))
        return implementation(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotTraceable(name)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> "Traced":
        return self

    def squeeze(self, dim: int | None = None) -> "Traced":
        if dim is None:
            ones = [i for i, length in enumerate(self.shape) if length == 1]
            return self if not ones else self.squeeze(ones[-1]).squeeze()
        dim %= len(self.shape)
        if self.shape[dim] != 1:
            return self
        parts = (
            replace(p, starts=_without(p.starts, dim), dims=_without(p.dims, dim))
            for p in self.parts
        )
        return Traced(_without(self.shape, dim), tuple(parts))

    def narrow(self, dim: int, start: int, length: int) -> "Traced":
        """Return the indices from `start` to `start + length` along `dim`."""
        dim %= len(self.shape)
        parts = []
        for part in self.parts:
            first = max(part.starts[dim], start)
            end = min(part.starts[dim] + part.lengths[dim], start + length)
            if end <= first:
                continue
            source_starts = list(part.source_starts)
            source_lengths = list(part.source_lengths)
            walked = part.dims[dim]
            if walked is not None:
                source_starts[walked] += first - part.starts[dim]
                source_lengths[walked] = end - first
            starts = _with(part.starts, dim, first - start)
            parts.append(
                TracedPart(part.key, starts, tuple(source_starts), tuple(source_lengths), part.dims)
            )
        return Traced(_with(self.shape, dim, length), tuple(parts))


def _without(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return values[:dim] + values[dim + 1 :]


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    first = tensors[0]
    dim %= len(first.shape)
    parts = []
    end = 0
    for tensor in tensors:
        if _without(tensor.shape, dim) != _without(first.shape, dim) or len(tensor.shape) != len(
            first.shape
        ):
            raise ValueError(
                f"shapes {first.shape} and {tensor.shape} cannot be joined along dim {dim}"
            )
        for part in tensor.parts:
            parts.append(replace(part, starts=_with(part.starts, dim, part.starts[dim] + end)))
        end += tensor.shape[dim]
    return Traced(_with(first.shape, dim, end), tuple(parts))


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    dim %= len(tensor.shape) + 1
    parts = (
        replace(
            p,
            starts=(*p.starts[:dim], 0, *p.starts[dim:]),
            dims=(*p.dims[:dim], None, *p.dims[dim:]),
        )
        for p in tensor.parts
    )
    return Traced((*tensor.shape[:dim], 1, *tensor.shape[dim:]), tuple(parts))


def _split(tensor: Traced, sizes: int | Sequence[int], dim: int = 0) -> tuple[Traced, ...]:
    total = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    if sum(sizes) != total:
        raise ValueError(f"sizes {list(sizes)} do not add up to {total}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))


def _chunk(tensor: Traced, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_FUNCTIONS: dict[Any, Any] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: _chunk,
}


# --- transformers' mapping


@dataclass
class Group:
    """Sources that are converted to targets together, through one entry of transformers' mapping.

    Attributes:
        first: transformers' name for the group: the name of its first target, in which `*` may
            stand for a list index, such as an expert's number.
        entry: the WeightRenaming or WeightConverter.
        sources: names of sources by the pattern that they match, in order.
    """

    first: str
    entry: Any
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The names of all sources."""
        return [key for keys in self.sources.values() for key in keys]

    def convert(self, value_of: Callable[[str], Any], model: TransformersModel) -> dict[str, Any]:
        """Convert sources to targets: tensors to tensors, or `Traced` placeholders to `Traced`
        ones.

        Raises:
            NotTraceable: with `Traced` sources; the operation does more than place regions, or uses
                a property that placeholders do not have.
            ValueError: the sources do not fit together.
        """
        entry = deepcopy(self.entry)
        values = {key: value_of(key) for key in self.keys}
        for pattern, keys in self.sources.items():
            for key in keys:
                entry.add_tensor(self.first, key, pattern, values[key])
        try:
            found = entry.convert(
                self.first, model=_Shapes(model), config=model.transformers_model.config
            )
        except (RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
            # Operators are looked up on the type of a placeholder, which has none.
            if isinstance(error, TypeError | AttributeError) and any(
                isinstance(v, Traced) for v in values.values()
            ):
                raise NotTraceable(str(error)) from None
            raise ValueError(f"transformers' conversion fails: {error}") from None
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }


class _Shapes:
    """The shapes of a model's tensors, all that operations may use: the model itself is sharded by
    now.
    """

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self.config = model.transformers_model.config

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self._model.state_shapes[name], device="meta")


def loading_groups(keys: Iterable[str], model: TransformersModel) -> tuple[list[Group], list[str]]:
    """Return how the stored `keys` become the tensors of `model`, and the keys that are no part of
    it.

    The used entries of the mapping, which saving reverts, are recorded in `model.conversions`.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    mapping = deepcopy(model.all_conversions)
    shapes = model.state_shapes
    renamings, converters = _by_kind(mapping)
    prefix = model.transformers_model.base_model_prefix
    unexpected = list[str]()
    targets = dict[str, Any]()
    # In transformers' order, because some renamings depend on earlier keys.
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, shapes)
        if name not in shapes and key in shapes:
            # already the tensor's name in memory
            name = key
            pattern = None
        if name in shapes:
            targets[key] = name, pattern
        else:
            unexpected.append(key)
    groups = _group(targets, converters)
    model.conversions = [entry for entry in mapping if entry.was_used()]
    return groups, unexpected


def saving_groups(
    names: Iterable[str], model: TransformersModel
) -> tuple[list[Group], Callable[[str], str]]:
    """Return how the tensors `names` of `model` become stored ones, and a function that renames the
    results of conversions.

    Saving reverts the conversions of loading. For a model that was not loaded, it reverts the
    mapping of its class, so that the names are those of checkpoints on the hub.
    """
    from transformers.core_model_loading import PrefixChange, dot_natural_key, rename_source_key

    used = model.conversions
    if used is None:
        # Without a loaded checkpoint there is no prefix to restore, and old names are not written
        # again.
        used = [entry for entry in model.own_conversions if not isinstance(entry, PrefixChange)]
    renamings, converters = _by_kind(
        [deepcopy(entry).reverse_transform() for entry in reversed(used)]
    )
    ordered = sorted(names, key=dot_natural_key)
    groups = _group(
        {name: rename_source_key(name, [], converters, reverse=True) for name in ordered},
        converters,
    )
    return groups, lambda name: rename_source_key(name, renamings, [], reverse=True)[0]


def _by_kind(mapping: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split a mapping of transformers into renamings and conversions."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    return [x for x in mapping if isinstance(x, WeightRenaming)], [
        x for x in mapping if isinstance(x, WeightConverter)
    ]


def _group(targets: Mapping[str, tuple[str, str | None]], converters: Sequence[Any]) -> list[Group]:
    """Group sources by target. `targets` maps each source to its first target, and to the pattern
    of a conversion or None.
    """
    from transformers.core_model_loading import WeightRenaming

    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    groups: dict[str, Group] = {}
    for source, (target, pattern) in targets.items():
        if target not in groups:
            entry = by_pattern[pattern] if pattern is not None else WeightRenaming(source, target)
            groups[target] = Group(target, entry)
        groups[target].sources.setdefault(source if pattern is None else pattern, []).append(source)
    return list(groups.values())


@dataclass
class ConvertingReader:
    """A `TensorReader` that reads the sources of a tensor whole, converts them as transformers
    does, and cuts the result.

    It needs host memory for the sources and the result of one group at a time; each rank reads all
    bytes of its tensors.
    """

    name: str  # folder
    stored: Stored
    model: TransformersModel
    groups: Mapping[str, Group]  # by the name of each target
    proves_coverage: bool = False

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Write every requested region into its destination, cast. Raises as
        `SafetensorsReader`.
        """
        by_group: dict[str, list[ReadRequest]] = {}
        for request in requests:
            by_group.setdefault(self.groups[request.name].first, []).append(request)
        for of_group in by_group.values():
            group = self.groups[of_group[0].name]
            values = self._read_whole(group.keys, of_group[0].destination.dtype)
            found = group.convert(values.__getitem__, self.model)
            for request in of_group:
                request.destination.copy_(found[request.name][request.region.slices])

    def _read_whole(self, keys: Sequence[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Read `keys` in the dtypes of the files; FP8 is dequantized to `dtype`."""
        reader = SafetensorsReader.of_keys(self.name, self.stored, keys)
        dtypes = {key: self.stored.tensors[key].dtype for key in keys}
        return reader.read_whole({k: dtype if d in FP8 else d for k, d in dtypes.items()})
