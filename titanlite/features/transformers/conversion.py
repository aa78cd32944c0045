"""Conversion between the tensors of a checkpoint and the tensors that a class of transformers has
in memory.

transformers describes the difference as renamings and operations on whole tensors (stack the
experts, concatenate gate and up, cut a fused projection). Here transformers' own operations run on
`Traced` placeholders, which record for each element the stored tensor and the position that it
comes from. So the position of a shard in the files is known too. After other operations
(transpositions, permutations) only the shape is known, and they run again on whole tensors. The
reader dequantizes MXFP4.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from titanlite.checkpoint.folder import Stored
from titanlite.checkpoint.reader import read_whole
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import ReadRequest


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


class Traced(torch.Tensor):
    """A placeholder for a tensor, on meta, that records the origin of its elements through
    torch.stack, cat, chunk, split, and squeeze.

    Attributes:
        parts: disjoint blocks that cover the tensor; empty after any other operation.
    """

    parts: tuple[TracedPart, ...] = ()

    @staticmethod
    def source(key: str, shape: tuple[int, ...]) -> "Traced":
        """Return a placeholder for the whole source `key`."""
        traced = torch.empty(shape, device="meta").as_subclass(Traced)
        starts = (0,) * len(shape)
        traced.parts = (TracedPart(key, starts, starts, shape, tuple(range(len(shape)))),)
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = super().__torch_function__(func, types, args, kwargs)
        if func in _TRACERS:
            _TRACERS[func](found, *args, **kwargs)
        elif isinstance(found, Traced):
            found.parts = ()  # an operation in place returns its argument
        return found


def parts_of(tensor: Any) -> tuple[TracedPart, ...]:
    """Return the blocks that cover a result of a conversion; empty if they are not known."""
    return getattr(tensor, "parts", ())


def _trace_cat(found: Traced, tensors: Sequence[Any], dim: int = 0) -> None:
    dim %= found.dim()
    parts = []
    end = 0
    for tensor in tensors:
        if not (own := parts_of(tensor)):
            return
        parts += [replace(p, starts=_with(p.starts, dim, p.starts[dim] + end)) for p in own]
        end += tensor.shape[dim]
    found.parts = tuple(parts)


def _trace_stack(found: Traced, tensors: Sequence[Any], dim: int = 0) -> None:
    dim %= found.dim()
    if all(map(parts_of, tensors)):
        found.parts = tuple(
            replace(
                part,
                starts=(*part.starts[:dim], place, *part.starts[dim:]),
                dims=(*part.dims[:dim], None, *part.dims[dim:]),
            )
            for place, tensor in enumerate(tensors)
            for part in tensor.parts
        )


def _trace_cut(found: Sequence[Traced], tensor: Traced, sizes: Any, dim: int = 0) -> None:
    dim %= tensor.dim()
    start = 0
    for cut in found:
        end = start + cut.shape[dim]
        cut.parts = tuple(_narrow(tensor.parts, dim, start, end))
        start = end


def _narrow(parts: Iterable[TracedPart], dim: int, start: int, end: int) -> Iterator[TracedPart]:
    """Yield the blocks of a cut from `start` to `end` along `dim`."""
    for part in parts:
        first = max(part.starts[dim], start)
        length = min(part.starts[dim] + part.lengths[dim], end) - first
        if length <= 0:
            continue
        part_in_cut = replace(part, starts=_with(part.starts, dim, first - start))
        source_dim = part.dims[dim]
        if source_dim is not None:
            source_start = part.source_starts[source_dim] + first - part.starts[dim]
            part_in_cut = replace(
                part_in_cut,
                source_starts=_with(part.source_starts, source_dim, source_start),
                source_lengths=_with(part.source_lengths, source_dim, length),
            )
        yield part_in_cut


def _trace_squeeze(found: Traced, tensor: Traced, dim: int | None = None) -> None:
    squeezed = range(tensor.dim()) if dim is None else [dim % tensor.dim()]
    kept = [i for i, length in enumerate(tensor.shape) if length != 1 or i not in squeezed]
    found.parts = tuple(
        replace(
            part,
            starts=tuple(part.starts[i] for i in kept),
            dims=tuple(part.dims[i] for i in kept),
        )
        for part in tensor.parts
    )


def _trace_nothing(found: Traced, tensor: Traced) -> None:
    found.parts = tensor.parts


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


_TRACERS: dict[Any, Callable[..., None]] = {
    torch.stack: _trace_stack,
    torch.cat: _trace_cat,
    torch.split: _trace_cut,
    torch.chunk: _trace_cut,
    torch.Tensor.squeeze: _trace_squeeze,
    torch.Tensor.contiguous: _trace_nothing,
}


# --- transformers' mapping


@dataclass(eq=False)
class Group:
    """Sources that are converted to targets together, through one entry of transformers' mapping.

    Attributes:
        first: transformers' name for the group: the name of its first target, in which `*` may
            stand for a list index, such as an expert's number.
        entry: the WeightRenaming or WeightConverter.
        model: shapes and configuration of the model.
        renamings: applied to the names of the targets when a checkpoint is saved.
        sources: names of sources by the pattern that they match, in order.
    """

    first: str
    entry: Any
    model: "_Shapes"
    renamings: list[Any]
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The names of all sources."""
        return [key for keys in self.sources.values() for key in keys]

    def convert(self, value_of: Callable[[str], Any]) -> dict[str, Any]:
        """Convert sources to targets; `Traced` placeholders become placeholders.

        Raises ValueError: the sources do not fit together.
        """
        from transformers.core_model_loading import rename_source_key

        entry = deepcopy(self.entry)
        for pattern, keys in self.sources.items():
            for key in keys:
                entry.add_tensor(self.first, key, pattern, value_of(key))
        try:
            found = entry.convert(self.first, model=self.model, config=self.model.config)
        except (RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"transformers' conversion fails: {error}") from None
        return {
            rename_source_key(name, self.renamings, [])[0]: (
                value[0] if isinstance(value, list) else value
            )
            for name, value in found.items()
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
    groups = _group(targets, converters, _Shapes(model), [])
    model.conversions = [entry for entry in mapping if entry.was_used()]
    return groups, unexpected


def saving_groups(names: Iterable[str], model: TransformersModel) -> list[Group]:
    """Return how the tensors `names` of `model` become stored ones.

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
    targets = {name: rename_source_key(name, [], converters, reverse=True) for name in ordered}
    return _group(targets, converters, _Shapes(model), renamings)


def _by_kind(mapping: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split a mapping of transformers into renamings and conversions."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    return [x for x in mapping if isinstance(x, WeightRenaming)], [
        x for x in mapping if isinstance(x, WeightConverter)
    ]


def _group(
    targets: Mapping[str, tuple[str, str | None]],
    converters: Sequence[Any],
    model: _Shapes,
    renamings: list[Any],
) -> list[Group]:
    """Group sources by target. `targets` maps each source to its first target, and to the pattern
    of a conversion or None.
    """
    from transformers.core_model_loading import WeightRenaming

    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    groups: dict[str, Group] = {}
    for source, (target, pattern) in targets.items():
        if target not in groups:
            entry = by_pattern[pattern] if pattern is not None else WeightRenaming(source, target)
            groups[target] = Group(target, entry, model, renamings)
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
    groups: Mapping[str, Group]  # by the name of each target
    proves_coverage: bool = False

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Write every requested region into its destination, cast. Raises as
        `SafetensorsReader`.
        """
        by_group: defaultdict[Group, list[ReadRequest]] = defaultdict(list)
        for request in requests:
            by_group[self.groups[request.name]].append(request)
        for group, of_group in by_group.items():
            stored = [self.stored[key] for key in group.keys]
            values = read_whole(self.name, stored, of_group[0].destination.dtype)
            found = group.convert(values.__getitem__)
            for request in of_group:
                request.destination.copy_(found[request.name][request.region.slices])
