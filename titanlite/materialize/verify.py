"""Verify: after filling, look at every tensor, and let all ranks fail together with the names."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.base.agree import gather_objects, list_ranks, merge_problems
from titanlite.base.errors import VerifyError, raise_problems
from titanlite.materialize.execute import poison_of
from titanlite.materialize.layout import Region, local_of, num_replicas
from titanlite.materialize.plan import Plan, TensorEntry, named_tensors
from titanlite.materialize.replicas import group_size
from titanlite.materialize.sources import Keep

# Elements; what looking at a tensor may cost in memory is a few copies of a chunk as int64. On the host they stay in
# the cache; on a device there are eight launches for each.
_HOST_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 22

_Digests = dict[tuple[str, Region], tuple[int, ...]]  # of what other ranks hold too


@torch.no_grad()
def verify(plan: Plan) -> None:
    """Check that materialization kept its promises.

    No tensor is on meta, poisoned or NaN, and no parameter infinite; ties are still one object; every DTensor's spec
    dtype is its local dtype; declared dtypes hold; elements held by several ranks are equal bit for bit (a digest).

    Raises VerifyError: on all ranks if any rank found a problem; names the tensors and the ranks.

    Collectives: one all-gather of small objects over all ranks; every rank must call.
    """
    problems: list[str] = []
    current = {fqn: tensor for fqn, tensor, _ in named_tensors(plan.model)}
    for entry in plan.entries:
        problems += _entry_problems(entry, current)
    if dist.is_initialized() and dist.get_world_size() > 1:
        sharing = group_size(plan.group)
        digests: _Digests = {
            (entry.fqn, entry.region): tuple(bit_digest(local_of(entry.tensor)).tolist())
            for entry in plan.entries
            if not entry.tensor.is_meta and num_replicas(entry.tensor, sharing) > 1
        }
        gathered = gather_objects((problems, digests))
        problems = merge_problems([found for found, _ in gathered]) + _differing([found for _, found in gathered])
    raise_problems(VerifyError, "materialize", problems)


def _entry_problems(entry: TensorEntry, current: dict[str, torch.Tensor]) -> list[str]:
    fqn, tensor = entry.fqn, entry.tensor
    untied = [name for name in entry.names if current.get(name) is not tensor]
    if untied:
        return [f"{name}: is no longer the tensor that was planned as {fqn} (replaced or untied)." for name in untied]
    if entry.is_elsewhere:
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
            problems.append(f"{fqn}: not filled, NaN or infinite, in {count} of its blocks ({entry.form}).")
    elif local.dtype.is_floating_point or local.dtype.is_complex:
        # One pass without temporaries, so that looking at every weight costs little next to loading it. Not finite: an
        # element is NaN or infinite, or, rarely, the sum overflows. float8 has no sum.
        if local.dtype.itemsize == 1 or not bool(local.sum().isfinite()):
            chunks = local.reshape(-1).split(_chunk_of(local)) if local.is_contiguous() else [local]
            num_nan = sum(int(chunk.isnan().sum()) for chunk in chunks)
            if num_nan:
                how = "was NaN before materialization" if isinstance(entry.source, Keep) else "not filled, or NaN"
                problems.append(f"{fqn}: {how}, in {num_nan} of {local.numel()} elements.")
            # Infinity is legal in buffers, such as masks.
            elif (
                entry.info.kind == "parameter"
                and local.numel()
                and not all(bool(chunk.abs().amax().isfinite()) for chunk in chunks)
            ):
                problems.append(f"{fqn}: has infinite elements.")
    elif not isinstance(entry.source, Keep) and local.numel():
        # Every integer is a legal value; a whole tensor of the one that no one wants is a forgotten one.
        poison = poison_of(local.dtype)
        if poison is not None and bool((local == poison).all()):
            problems.append(f"{fqn}: not filled (all its elements are {poison}).")
    return problems


def _chunk_of(local: torch.Tensor) -> int:
    return _HOST_CHUNK if local.device.type == "cpu" else _DEVICE_CHUNK


def bit_digest(local: torch.Tensor) -> torch.Tensor:
    """Sum the bits of `local` plainly and weighted by position, modulo 2**64: int64 (2,), on its device.

    Comparable on the same type of device.
    """
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.dtype.itemsize]
    bits = local.detach().contiguous().flatten().view(integer)
    sums = torch.zeros(2, dtype=torch.int64, device=local.device)
    length = _chunk_of(local)
    for start in range(0, bits.numel(), length):  # int64 copies of a chunk, not of the tensor
        chunk = bits[start : start + length].to(torch.int64)
        position = torch.arange(1, chunk.numel() + 1, device=chunk.device)
        sums += torch.stack([chunk.sum(), (chunk * position).sum() * (2 * start + 1)])
    return sums


def _differing(gathered: list[_Digests]) -> list[str]:
    holders: dict[tuple[str, Region], dict[tuple[int, ...], list[int]]] = {}
    for rank, digests in enumerate(gathered):
        for place, digest in digests.items():
            holders.setdefault(place, {}).setdefault(digest, []).append(rank)
    return [
        f"{fqn}: replicas differ, between ranks {' and '.join(list_ranks(ranks) for ranks in by_digest.values())}."
        for (fqn, _), by_digest in holders.items()
        if len(by_digest) > 1
    ]
