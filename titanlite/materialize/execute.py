"""Allocate and fill: meta tensors become real in place, poisoned first, then written once from their source."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.errors import PlanError
from titanlite.materialize.plan import Plan, TensorEntry
from titanlite.materialize.sources import Compute, Init, Read, ReadRequest, TensorReader


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's data; shares memory with `tensor`."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def allocate(plan: Plan, device: torch.device, buffer_device: torch.device | None = None) -> None:
    """Turn the meta tensors of `plan` into real ones on `device`, filled with poison: NaN, or the smallest integer.

    Buffers go to `buffer_device` if one is given. Tensors that were never on meta are moved, with their values.

    The objects stay the same, with their attributes, so that optimizers, ties and maps keyed by them stay valid:
    `torch.utils.swap_tensors` exchanges the contents. `nn.Module.to_empty` would also drop the values of tensors that
    are not on meta (Megatron-LM #4155: `expert_bias` was NaN for a whole run). Poison costs one memset and makes every
    omission visible to `verify`.
    """
    for entry in plan.entries:
        tensor = entry.tensor
        target = buffer_device if entry.info.kind == "buffer" and buffer_device is not None else device
        if tensor.is_meta:
            new = torch.empty_like(tensor, device=target, dtype=entry.dtype, requires_grad=False)
            _poison(local_of(new))
        elif not isinstance(tensor, DTensor) and tensor.device != target:
            new = tensor.detach().to(target)
        else:
            continue
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        vars(new).update(vars(tensor))
        torch.utils.swap_tensors(tensor, new)


def _poison(local: torch.Tensor) -> None:
    if local.dtype.is_floating_point or local.dtype.is_complex:
        local.fill_(float("nan"))
    elif local.dtype != torch.bool:  # bool has no spare value; verify cannot see a forgotten bool
        local.fill_(torch.iinfo(local.dtype).min)


@torch.no_grad()
def fill(plan: Plan, seed: int) -> None:
    """Write every tensor of `plan` from its source, each exactly once.

    Raises:
        PlanError: a computed tensor has another shape than the model's.
    """
    # Drawing is host work that releases the interpreter lock; share the cores of a node among its ranks.
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ThreadPoolExecutor(min(threads, 16)) as pool:
        jobs = [pool.submit(_fill_one, entry, seed) for entry in plan.entries]
        reads: dict[int, tuple[TensorReader, list[ReadRequest]]] = {}
        for entry in plan.entries:
            if isinstance(entry.source, Read):
                _, requests = reads.setdefault(id(entry.source.reader), (entry.source.reader, []))
                requests.append(ReadRequest(entry.source.name, entry.region, local_of(entry.tensor)))
        for reader, requests in reads.values():
            reader.read(requests)
        for job in jobs:
            job.result()


@torch.no_grad()
def _fill_one(entry: TensorEntry, seed: int) -> None:
    source, local = entry.source, local_of(entry.tensor)
    if isinstance(source, Init):
        source.recipe.fill(local, entry.region, entry.info.shape, seed, entry.fqn)
    elif isinstance(source, Compute):
        value = source.function()
        if tuple(value.shape) != entry.info.shape:
            raise PlanError(
                f"{entry.fqn}: {source} gave shape {tuple(value.shape)}, the model expects {entry.info.shape}."
            )
        local.copy_(value[entry.region.slices])
