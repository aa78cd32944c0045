"""The plan: every tensor of the model with its one source, made before a byte is allocated or read.

The plan depends only on names, shapes and declarations, so all ranks make the same plan. If it has
problems, all ranks raise the same error, which lists all problems.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.base.agree import gather_objects
from titanlite.base.errors import PlanError, raise_problems
from titanlite.base.text import format_table
from titanlite.materialize.layout import (
    Encoding,
    Region,
    encoding_of,
    is_remote,
    local_shape_of,
    region_of,
    shape_of,
)
from titanlite.materialize.sources import (
    Alias,
    Compute,
    Init,
    InvalidClaim,
    Keep,
    Read,
    Source,
    SourceProvider,
    TensorInfo,
)
from titanlite.materialize.unregistered import find_unregistered

# Names that wrappers insert into the path of a tensor; the plan, the random streams and checkpoints
# omit them.
_WRAPPER_SEGMENTS = {"_checkpoint_wrapped_module", "_orig_mod", "_transformers_model"}
# Name of the tensor, its source, and the claimant.
_Claim = tuple[str, Source | InvalidClaim, str]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor object of the model."""

    info: TensorInfo  # under its first name
    names: tuple[str, ...]  # all names in the model; more than one if the tensor is tied
    source: Source
    tensor: torch.Tensor  # materialized in place: the object stays the same
    region: Region  # of the values, on this rank
    # after materialization; the declared dtype if a buffer must not follow a cast of the model
    dtype: torch.dtype

    @property
    def fqn(self) -> str:
        """First name of the tensor; keys its random stream."""
        return self.names[0]

    @property
    def is_remote(self) -> bool:
        return is_remote(self.tensor)

    @property
    def encoding(self) -> Encoding | None:
        return encoding_of(self.tensor)

    @property
    def form(self) -> str:
        """Name of the encoding, or of the dtype."""
        return (
            str(self.dtype).removeprefix("torch.") if self.encoding is None else self.encoding.name
        )

    def saved_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of this tensor in a file if parameters are saved in `dtype`; buffers are
        saved in their own dtype.
        """
        if self.info.kind == "buffer":
            return self.dtype
        keeps_float32 = isinstance(self.source, Read) and self.source.keeps_float32
        return torch.float32 if keeps_float32 else dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.region.lengths if self.encoding is None else local_shape_of(self.tensor)


@dataclass(frozen=True)
class Plan:
    """All tensors of a model, in the model's order, and the model that holds them."""

    model: nn.Module
    entries: tuple[TensorEntry, ...]
    # ranks that share the tensors that are not remote: all of them hold each plain tensor, and only
    # they hold shards of the DTensors; None: all ranks
    group: dist.ProcessGroup | None = None
    # group of all ranks with a timeout for slow reads; None: the default group
    waiting: dist.ProcessGroup | None = None

    def names_on_any_stage(self, names: set[str]) -> set[str]:
        """Return the union of the `names` of all ranks, which differ only between pipeline stages.
        Collective with pipeline stages.
        """
        return names if self.group is None else set().union(*gather_objects(names))

    def __str__(self) -> str:
        rows = [("tensor", "global shape", "dtype", "on this rank", "source")]
        for entry in self.entries:
            local = ", ".join(
                f"{s}:{s + n}"
                for s, n in zip(entry.region.starts, entry.region.lengths, strict=True)
            )
            local = "remote" if entry.is_remote else f"[{local}]"
            rows.append((entry.fqn, str(entry.info.shape), entry.form, local, str(entry.source)))
            rows += [(name, "", "", "", str(Alias(entry.fqn))) for name in entry.names[1:]]
        return format_table(rows, indent="")


def clean_name(fqn: str) -> str:
    """Return `fqn` without the segments that wrappers (torch.compile, checkpoint_wrapper) added."""
    return ".".join(segment for segment in fqn.split(".") if segment not in _WRAPPER_SEGMENTS)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, TensorInfo]]:
    """Yield every tensor of the model, first parameters, then buffers; a tied tensor is yielded
    under each of its names.
    """
    saved = {clean_name(key) for key in model.state_dict(keep_vars=True)}
    for kind, tensors in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for raw, tensor in tensors:
            fqn = clean_name(raw)
            info = TensorInfo(fqn, kind, fqn in saved, shape_of(tensor), tensor.dtype)  # type: ignore[arg-type]
            yield fqn, tensor, info


class _Found(NamedTuple):
    """A tensor object with the facts under its first name, and all its names."""

    tensor: torch.Tensor
    info: TensorInfo
    names: list[str]


def build_plan(
    model: nn.Module, sources: Sequence[SourceProvider | Mapping[str, Source]] = ()
) -> Plan:
    """Find the one source of every tensor of `model`, without collectives.

    Raises PlanError: lists every tensor with no source or with two, unknown and missing names, and
    shapes or dtypes that do not fit. All ranks raise the same error.
    """
    problems: list[str] = []
    objects: dict[int, _Found] = {}
    infos: dict[str, TensorInfo] = {}
    for fqn, tensor, info in named_tensors(model):
        infos[fqn] = info
        objects.setdefault(id(tensor), _Found(tensor, info, [])).names.append(fqn)

    declared, _ = _accept(_declarations(model), infos, problems)
    claimed, invalid = _accept(_claims(sources, infos), infos, problems)
    complete = [
        given.name for given in sources if not isinstance(given, Mapping) and given.complete
    ]
    problems += _check_aliases(declared, objects, infos)
    problems += _check_unregistered(model, objects)
    problems += _check_memory(objects.values())

    entries = []
    for found in objects.values():
        if invalid.intersection(found.names):
            continue  # already reported; do not report it as missing, too
        source = _pick(found, declared, claimed, complete, problems)
        if source is not None:
            dtype = _final_dtype(found, source, declared, problems)
            region = region_of(found.tensor)
            entries.append(
                TensorEntry(found.info, tuple(found.names), source, found.tensor, region, dtype)
            )
    raise_problems(PlanError, "materialize", problems)
    return Plan(model, tuple(entries))


def _declarations(model: nn.Module) -> Iterator[_Claim]:
    for raw_prefix, module in model.named_modules():
        # Look on the type: a wrapper (torch.compile) forwards attributes of the inner module, whose
        # declaration would be used twice.
        declare = getattr(type(module), "declare_sources", None)
        if declare is None:
            continue
        prefix = clean_name(raw_prefix)
        # `fully_shard` derives a class FSDPName from Name
        name_of_class = type(module).__name__.removeprefix("FSDP")
        where = f"{name_of_class} '{prefix}'" if prefix else name_of_class
        for name, source in declare(module).items():
            if isinstance(source, Alias) and prefix:
                source = Alias(f"{prefix}.{source.target}")
            yield f"{prefix}.{name}" if prefix else name, source, where


def _claims(
    sources: Iterable[SourceProvider | Mapping[str, Source]], infos: Mapping[str, TensorInfo]
) -> Iterator[_Claim]:
    """Yield the claims of providers, and of mappings from exact names or shell patterns, such as
    `{"*.bias": Init(Zeros())}`. A pattern that matches nothing is yielded as a name.
    """
    for given in sources:
        if isinstance(given, Mapping):
            for pattern, source in given.items():
                names = [fqn for fqn in infos if fqn == pattern or fnmatchcase(fqn, pattern)]
                yield from ((name, source, "sources") for name in names or [pattern])
        else:
            yield from ((name, source, given.name) for name, source in given(infos))


def _accept(
    claims: Iterable[_Claim], infos: Mapping[str, TensorInfo], problems: list[str]
) -> tuple[dict[str, Source], set[str]]:
    """Return the sources by name, and the names with an `InvalidClaim`. Unknown names, second
    claims and invalid ones are problems.
    """
    accepted: dict[str, Source] = {}
    claimants: dict[str, str] = {}
    invalid: set[str] = set()
    for fqn, source, who in claims:
        if isinstance(source, InvalidClaim):
            problems.append(f"{fqn}: {source.reason}")
            invalid.add(fqn)
        elif fqn not in infos:
            problems.append(f"{fqn}: unexpected, {who} has it and the model does not.")
        elif fqn in accepted:
            problems.append(
                f"{fqn}: two sources, '{accepted[fqn]}' from {claimants[fqn]} and '{source}' from "
                f"{who}. Remove one."
            )
        else:
            accepted[fqn] = source
            claimants[fqn] = who
    return accepted, invalid


def _check_aliases(
    declared: Mapping[str, Source],
    objects: Mapping[int, _Found],
    infos: Mapping[str, TensorInfo],
) -> Iterator[str]:
    """Yield the problems of declared ties whose names are not one object. Comparing values would be
    meaningless on meta and expensive on other devices.
    """
    owner_of = {name: key for key, found in objects.items() for name in found.names}
    for fqn, source in declared.items():
        if not isinstance(source, Alias):
            continue
        if source.target not in infos:
            yield f"{fqn}: declared tied to '{source.target}', but there is no such tensor."
        elif owner_of[fqn] != owner_of[source.target]:
            yield (
                f"{fqn}: declared tied to '{source.target}', but they are two tensors now "
                "(sharding split them). Assign one to the other again before materializing."
            )


def _check_unregistered(model: nn.Module, objects: Mapping[int, _Found]) -> Iterator[str]:
    """Yield the problems of meta tensors that are neither parameters nor buffers: they would stay
    on meta.
    """
    modules = {module: clean_name(raw_prefix) for raw_prefix, module in model.named_modules()}
    fqn_of = {_memory_of(found.tensor): found.info.fqn for found in objects.values()}
    fqn_of.pop(None, None)
    for path, tensor in find_unregistered(model, modules):
        if (fqn := fqn_of.get(_memory_of(tensor))) is not None:
            remedy = f"It shares the memory of {fqn}: take the view in forward."
        elif isinstance(tensor, nn.Parameter):
            remedy = (
                "Register it, or its module, for example in an nn.ParameterList or nn.ModuleList. "
                "Sharding replaces parameters: refer to them after it."
            )
        else:
            remedy = "Register it as a buffer."
        yield (
            f"{path}: holds a tensor {tuple(tensor.shape)} of {tensor.dtype} on the meta device "
            "that is neither a parameter nor a buffer of the model, so it has no source. "
            f"{remedy}"
        )


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Return an identity of the memory of a plain meta tensor, the same for its views; None for
    other tensors.
    """
    if isinstance(tensor, DTensor) or not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    storage: Any = tensor.untyped_storage()
    return storage._cdata


def _check_memory(objects: Iterable[_Found]) -> Iterator[str]:
    """Yield the problems of meta tensors that cannot be filled, or that share elements with another
    tensor.

    Each tensor gets its own memory, so a view would be written twice and would stop being a view.
    """
    held: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for tensor, info, _ in objects:
        if not tensor.is_meta:
            continue
        if tensor.layout is not torch.strided:
            yield (
                f"{info.fqn}: a {info.kind} with layout {tensor.layout} on the meta device cannot "
                "be filled. Keep its values in another form and convert them in forward, or build "
                "it on the device where it stays."
            )
            continue
        memory = _memory_of(tensor)
        if tensor.numel() and memory is not None:
            begin = int(tensor.storage_offset())
            last = begin + sum(
                (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            size = tensor.dtype.itemsize
            held[memory].append((begin * size, (last + 1) * size, info.fqn))
    for parts in held.values():
        parts.sort(key=lambda part: part[0])
        for (_, reached, holder), (begin, _, fqn) in pairwise(parts):
            if begin < reached:
                yield (
                    f"{fqn}: shares memory with {holder}, so both would be written twice. Make "
                    "them one object, or register one of them and take the view in forward."
                )


def _pick(
    found: _Found,
    declared: Mapping[str, Source],
    claimed: Mapping[str, Source],
    complete: Sequence[str],
    problems: list[str],
) -> Source | None:
    """Return the one source of a tensor object, or None after adding to `problems`."""
    tensor, info, names = found
    claims = {name: claimed[name] for name in names if name in claimed}
    own = {n: declared[n] for n in names if n in declared and not isinstance(declared[n], Alias)}
    if not tensor.is_meta:
        if claims:
            name, source = next(iter(claims.items()))
            problems.append(
                f"{name}: two sources, it already has a value on {tensor.device} and '{source}' "
                "claims it. Build it on the meta device, or leave it out of the sources."
            )
        return Keep()
    if claims:
        return _pick_claim(info, claims, problems)
    if len(own) > 1:
        listed = " and ".join(f"'{s}' for {n}" for n, s in own.items())
        problems.append(
            f"{info.fqn}: two sources for one tied tensor, {listed}. Declare Alias for all names "
            "but one."
        )
        return None
    source = next(iter(own.values()), None)
    if source is None:
        problems.append(
            f"{info.fqn}: {info.kind} {info.shape} has no source. Declare one in declare_sources "
            "of its module, or pass one in sources."
        )
    elif complete and info.persistent and not (isinstance(source, Init) and source.may_be_absent):
        problems.append(f"{info.fqn}: missing, {' and '.join(complete)} does not have it.")
    return source


def _pick_claim(
    info: TensorInfo, claims: Mapping[str, Source], problems: list[str]
) -> Source | None:
    """Return the first source among the claims on the names of a meta tensor. Add to `problems` if
    the claims differ, or if one of them cannot fill the tensor.
    """
    for name, source in claims.items():
        if isinstance(source, Read) and source.shape != info.shape:
            problems.append(
                f"{name}: {source.reader.name} has {source.shape}, the model expects {info.shape}."
            )
        if isinstance(source, Keep | Alias):
            problems.append(
                f"{name}: '{source}' cannot give a value to a tensor on meta. Name a source that "
                "can."
            )
    # A checkpoint may hold a tied tensor under each of its names, and one pattern may match all of
    # them. The names are one tensor, so only the first claim is used.
    first = next(iter(claims.values()))
    same = [
        s.reader is first.reader if isinstance(s, Read) and isinstance(first, Read) else s == first
        for s in claims.values()
    ]
    if not all(same):
        listed = " and ".join(f"'{source}' for {name}" for name, source in claims.items())
        problems.append(f"{info.fqn}: two sources for one tied tensor, {listed}. Remove one.")
    return first


def _final_dtype(
    found: _Found, source: Source, declared: Mapping[str, Source], problems: list[str]
) -> torch.dtype:
    """Return the declared dtype if there is one: a cast on meta loses no values, so a buffer can
    still get its declared dtype.
    """
    _, info, names = found
    wanted = next(
        (
            s.dtype
            for s in (source, *(declared.get(n) for n in names))
            if isinstance(s, Init | Compute) and s.dtype
        ),
        None,
    )
    if wanted is None or wanted == info.dtype:
        return info.dtype
    if info.kind == "buffer" and not isinstance(source, Keep):
        return wanted
    problems.append(
        f"{info.fqn}: is {info.dtype}, but its module declares {wanted}. Keep it out of casts of "
        "the model."
    )
    return info.dtype
