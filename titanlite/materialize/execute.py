"""Allocate, fill, verify: meta tensors become real in place, are filled with NaN (poison) first,
and then are written once from their source.
"""

import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.base.agree import gather_objects, merge_problems, together
from titanlite.base.errors import PlanError, VerifyError, raise_problems
from titanlite.base.log import logger
from titanlite.base.process import count_threads
from titanlite.base.text import format_size, list_names
from titanlite.materialize.digest import bytes_in, digest
from titanlite.materialize.layout import (
    Region,
    encoding_of,
    local_of,
    num_replicas,
    region_of,
    write_rows,
)
from titanlite.materialize.plan import Plan, TensorEntry, named_tensors
from titanlite.materialize.replicas import assign_owners, broadcast, group_size
from titanlite.materialize.sources import (
    Compute,
    Init,
    Keep,
    Read,
    ReadRequest,
    Recipe,
    Source,
    TensorReader,
)

_DRAWN_AT_ONCE = 1 << 22  # values that are drawn before they are encoded
_CHECKED_AT_ONCE = 1 << 22  # elements of a tensor whose sum is not finite; the check copies them

_Digests = dict[tuple[str, Region], int]  # digests of shards that several ranks hold


@torch.no_grad()
def allocate(plan: Plan, device: torch.device, buffer_device: torch.device | None = None) -> None:
    """Turn the meta tensors of `plan` into real, contiguous tensors on `device`, filled with poison
    (`poison_of`).

    Buffers go to `buffer_device` if it is given. Tensors that were never on meta are moved with
    their values; `nn.Module.to_empty` would drop these values. The objects stay the same, with
    their attributes, so that optimizers, ties and maps keyed by them stay valid. Poison costs one
    memset, and lets `verify` find every tensor that was not filled.
    """
    device_of = {"parameter": device, "buffer": buffer_device or device}
    recurrent: list[Any] = [
        module for module in plan.model.modules() if isinstance(module, nn.RNNBase)
    ]
    for module in recurrent:
        module._flat_weight_refs = []  # tensors with weak references cannot be swapped
    for entry in plan.entries:
        tensor = entry.tensor
        if entry.is_remote:
            continue
        target = device_of[entry.info.kind]
        if tensor.is_meta:
            local = torch.empty(entry.local_shape, dtype=entry.dtype, device=target)
            # A pass over all memory costs as much as reading the file. If the reader itself proves
            # that its reads cover every element, poison at both ends is enough to find a tensor
            # that is never read.
            _poison(
                local,
                ends_only=isinstance(entry.source, Read) and entry.source.reader.proves_coverage,
            )
            new = sharded_like(tensor, local)
        elif not isinstance(tensor, DTensor) and tensor.device != target:
            new = tensor.detach().to(target)
        else:
            continue
        exchange(tensor, new)
    for module in recurrent:
        module._init_flat_weights()


def sharded_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as the local part of a tensor with the layout of `tensor`; `empty_like` would
    cost 160 us per tensor.
    """
    if not isinstance(tensor, DTensor):
        return local
    # CPU offload: `from_local` would move `local` to the mesh's device
    if local.device.type != tensor.device_mesh.device_type:
        new = torch.empty_like(tensor, dtype=local.dtype, device=local.device)
        new._local_tensor = local  # pyright: ignore[reportAttributeAccessIssue]
        return new
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def exchange(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Swap the contents of `new` into `tensor`, which stays the same object of the same class, with
    its attributes and hooks.
    """
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    if type(new) is not type(tensor):
        new.__class__ = type(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    vars(new).update(vars(tensor))
    # swap_tensors swaps the hooks too. With the same dictionaries on both sides, existing hook
    # handles stay valid.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks, None) is not None:
            setattr(new, hooks, getattr(tensor, hooks))
    torch.utils.swap_tensors(tensor, new)


def poison_of(dtype: torch.dtype) -> float | int | None:
    """Return the value that marks fresh memory of `dtype`: NaN, or the integer farthest from 0;
    None for bool, which has no unused value.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return None
    info = torch.iinfo(dtype)
    return info.min or info.max


def _poison(local: torch.Tensor, *, ends_only: bool) -> None:
    poison = poison_of(local.dtype)
    if poison is None or not local.numel():
        return
    if ends_only:
        local.view(-1)[:: max(local.numel() - 1, 1)].fill_(poison)
    else:
        local.fill_(poison)


@torch.no_grad()
def fill(plan: Plan, seed: int) -> None:
    """Write every tensor of `plan` from its source, exactly once.

    Raises PlanError: a computed tensor has a different shape than the model's. Raises
    CheckpointError, on all ranks: a rank could not read.

    Collectives: see `read_tensors`; every rank must call.
    """
    # Drawing is host work that releases the interpreter lock.
    with ThreadPoolExecutor(count_threads()) as pool:
        held = [entry for entry in plan.entries if not entry.is_remote]
        jobs = [
            pool.submit(_fill_one, entry, seed)
            for entry in held
            if isinstance(entry.source, Init | Compute)
        ]
        reads = [
            (entry.tensor, entry.source) for entry in plan.entries if isinstance(entry.source, Read)
        ]
        read_tensors(reads, plan)
        for job in jobs:
            job.result()


@torch.no_grad()
def read_tensors(reads: Sequence[tuple[torch.Tensor, Read]], plan: Plan) -> None:
    """Read each tensor, DTensor or plain, from its source. If several ranks hold the same elements,
    one of them reads and broadcasts.

    Raises CheckpointError, on all ranks: a rank could not read.

    Collectives: if `reads` is not empty, one gather of small objects over all ranks, and broadcasts
    of replicas. Every rank must call with the same tensors in the same order, including tensors of
    other pipeline stages.
    """
    replicas = list(assign_owners((tensor for tensor, _ in reads), plan.group))
    requests: dict[int, tuple[TensorReader, list[ReadRequest]]] = {}
    for replica, (tensor, source) in zip(replicas, reads, strict=True):
        if replica.is_owner:
            _, of_reader = requests.setdefault(id(source.reader), (source.reader, []))
            of_reader.append(
                ReadRequest(source.name, region_of(tensor), local_of(tensor), encoding_of(tensor))
            )
    if reads:
        names = dict.fromkeys(source.reader.name for _, source in reads)
        nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor, _ in reads)
        with together(plan.waiting), timed(f"reading {', '.join(names)}", nbytes):
            for reader, of_reader in requests.values():
                reader.read(of_reader)
        broadcast(replicas)


@contextmanager
def timed(text: str, nbytes: int) -> Generator[None]:
    """Log how fast the body reads or writes `nbytes`."""
    start = time.perf_counter()
    yield
    seconds = max(time.perf_counter() - start, 1e-9)
    rate = nbytes / 1e9 / seconds
    logger.info("checkpoint: %s: %s in %.1f s, %.2f GB/s", text, format_size(nbytes), seconds, rate)


@torch.no_grad()
def _fill_one(entry: TensorEntry, seed: int) -> None:
    source = entry.source
    local = local_of(entry.tensor)
    if isinstance(source, Init) and entry.encoding is not None:
        _draw_encoded(entry, source.recipe, seed)
    elif isinstance(source, Init):
        source.recipe.fill(local, entry.region, entry.info.shape, seed, entry.fqn)
    elif isinstance(source, Compute):
        value = source.function()
        if tuple(value.shape) != entry.info.shape:
            raise PlanError(
                f"{entry.fqn}: {source} gave shape {tuple(value.shape)}, the model expects "
                f"{entry.info.shape}."
            )
        local.copy_(value[entry.region.slices])


def _draw_encoded(entry: TensorEntry, recipe: Recipe, seed: int) -> None:
    region = entry.region
    local = local_of(entry.tensor)
    assert entry.encoding is not None
    for part in region.slabs(max(_DRAWN_AT_ONCE, region.lengths[-1])):  # whole rows
        values = torch.empty(part.lengths, dtype=torch.float32, device=local.device)
        recipe.fill(values, part, entry.info.shape, seed, entry.fqn)
        rows = entry.encoding.encode(values.view(-1, part.lengths[-1]))
        write_rows(rows, local, part, region)


@torch.no_grad()
def verify(plan: Plan) -> None:
    """Check the result of materialization.

    No tensor is on meta, poisoned or NaN, and no parameter is infinite. Ties are still one object.
    Every DTensor's spec dtype equals its local dtype, and declared dtypes hold. Elements that
    several ranks hold are equal bit for bit (compared by digests).

    Raises VerifyError, on all ranks: any rank found a problem; names the tensors and the ranks.

    Collectives: one all-gather of small objects over all ranks; every rank must call.
    """
    problems: list[str] = []
    current = {fqn: tensor for fqn, tensor, _ in named_tensors(plan.model)}
    for entry in plan.entries:
        problems += _entry_problems(entry, current)
    if dist.is_initialized() and dist.get_world_size() > 1:
        sharing = group_size(plan.group)
        digests: _Digests = {
            (entry.fqn, entry.region): bit_digest(local_of(entry.tensor))
            for entry in plan.entries
            if not entry.tensor.is_meta and num_replicas(entry.tensor, sharing) > 1
        }
        gathered = gather_objects((problems, digests))
        problems = merge_problems([found for found, _ in gathered]) + _differing(
            [found for _, found in gathered]
        )
    raise_problems(VerifyError, "materialize", problems)


def _entry_problems(entry: TensorEntry, current: dict[str, torch.Tensor]) -> list[str]:
    fqn = entry.fqn
    tensor = entry.tensor
    untied = [name for name in entry.names if current.get(name) is not tensor]
    if untied:
        return [
            f"{name}: is no longer the tensor that was planned as {fqn} (replaced or untied)."
            for name in untied
        ]
    if entry.is_remote:
        return [] if tensor.is_meta else [f"{fqn}: has a value here, but other ranks hold it."]
    if tensor.is_meta:
        return [f"{fqn}: still on the meta device."]
    local = local_of(tensor)
    problems = []
    if isinstance(tensor, DTensor) and tensor.dtype != local.dtype:
        problems.append(f"{fqn}: its DTensor spec says {tensor.dtype}, its data is {local.dtype}.")
    if local.dtype != entry.dtype:
        problems.append(f"{fqn}: is {local.dtype}, expected {entry.dtype}.")
    if entry.encoding is not None:
        if count := entry.encoding.count_not_finite(local):
            problems.append(
                f"{fqn}: not filled, NaN or infinite, in {count} of its blocks ({entry.form})."
                f"{_explain(entry.source)}"
            )
    elif local.dtype.is_floating_point or local.dtype.is_complex:
        problems += _value_problems(entry, local)
    elif not isinstance(entry.source, Keep) and local.numel():
        # Every integer is a legal value, but a tensor that is all poison was not filled.
        poison = poison_of(local.dtype)
        if poison is not None and bool((local == poison).all()):
            problems.append(f"{fqn}: not filled (all its elements are {poison}).")
    return problems


def _value_problems(entry: TensorEntry, local: torch.Tensor) -> list[str]:
    # The sum is one pass without temporaries, so that checking every weight costs little compared
    # to loading it. The sum is not finite if an element is NaN or infinite, or, rarely, if it
    # overflows. float8 and complex32 have no sum.
    if local.dtype.itemsize > 1 and local.dtype != torch.complex32 and bool(local.sum().isfinite()):
        return []
    chunks = local.reshape(-1).split(_CHECKED_AT_ONCE)
    num_nan = sum(int(_comparable(chunk).isnan().sum()) for chunk in chunks)
    if num_nan:
        is_kept = isinstance(entry.source, Keep)
        how = "was NaN before materialization" if is_kept else "not filled, or NaN"
        problem = f"{how}, in {num_nan} of {local.numel()} elements"
    # Infinity is legal in buffers, such as masks.
    elif entry.info.kind == "parameter" and any(
        bool(_comparable(chunk).isinf().any()) for chunk in chunks
    ):
        problem = "has infinite elements"
    else:
        return []
    return [f"{entry.fqn}: {problem}.{_explain(entry.source)}"]


def _comparable(chunk: torch.Tensor) -> torch.Tensor:
    return chunk.float() if chunk.dtype.itemsize == 1 else chunk  # float8


def _explain(source: Source) -> str:
    """Return a remedy for values that are not finite."""
    if not isinstance(source, Read):
        return ""
    return (
        f" It was read from {source}. If the file holds that, copy it again, or take another "
        "checkpoint."
    )


def bit_digest(local: torch.Tensor) -> int:
    """Return the digest of the bits of a shard."""
    return digest(bytes_in(local.detach().contiguous()))


def _differing(gathered: list[_Digests]) -> list[str]:
    holders: dict[tuple[str, Region], dict[int, list[int]]] = {}
    for rank, digests in enumerate(gathered):
        for place, value in digests.items():
            holders.setdefault(place, {}).setdefault(value, []).append(rank)
    return [
        f"{fqn}: replicas differ, between ranks "
        f"{' and '.join(map(list_names, by_digest.values()))}."
        for (fqn, _), by_digest in holders.items()
        if len(by_digest) > 1
    ]
