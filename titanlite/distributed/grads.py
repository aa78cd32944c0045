"""Gradients after the last backward: parameters without a gradient, sums for parameters that tensor
parallelism replicates, global norm and clipping.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.materialize.layout import local_of, num_replicas
from titanlite.materialize.plan import clean_name
from titanlite.ops.kernels import wide_dtype


def find_unreached(model: nn.Module, device: torch.device) -> list[str]:
    """Return the names of the trained parameters that have no gradient on any rank, after the last
    backward of a step.

    Such a parameter does not contribute to the loss: autograd leaves its `grad` None, and so does
    FSDP2. Zeros count as a gradient: LoRA's A has only zeros in its first step, and a fused expert
    has them in every step in which no token chose it, but both are trained. If each expert is a
    separate module, its `grad` is None until a token chooses it, so the experts of a layer are
    counted together.

    Collectives: one all-reduce over the default process group, on `device`; every rank must call.
    """
    trained = [
        (clean_name(name), param) for name, param in model.named_parameters() if param.requires_grad
    ]
    holders = torch.tensor(
        [param.grad is not None for _, param in trained], dtype=torch.int64, device=device
    )
    dist.all_reduce(holders)  # parameters of other pipeline stages have none here
    reached = Counter[str]()
    for (name, _), count in zip(trained, holders.tolist(), strict=True):
        reached[_without_expert(name)] += count
    return [name for name, param in trained if param.numel() and not reached[_without_expert(name)]]


def _without_expert(name: str) -> str:
    """Return `name` without the number of the routed expert in it, if there is one."""
    layer, experts, rest = name.partition(".experts.")
    return layer + experts + re.sub(r"\d+", "*", rest)


@torch.no_grad()
def reduce_replicated_grads(params: Iterable[torch.nn.Parameter], dims: ParallelDims) -> None:
    """Sum the gradients of tp-replicated parameters (norms, routers, some biases) over the tp
    ranks, in place.

    Each tp rank holds different tokens or heads, so its gradient is a partial sum. One flat
    all-reduce per step, over shards that FSDP has reduced, replaces five small all-reduces per
    layer and micro-batch. Call this after the last backward and before gradients are read.

    Collectives: one all-reduce over tp per gradient dtype; every rank must call.
    """
    if dims.degrees.tp == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in _replicated_grads(params):
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=dims.tp_mesh.get_group())
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def _replicated_grads(params: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """Yield this rank's shards of the gradients of tp-replicated parameters."""
    for param in params:
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
            names = param.device_mesh.mesh_dim_names or ()
            if "tp" in names and isinstance(param.placements[names.index("tp")], Replicate):
                yield local_of(param.grad)


@torch.no_grad()
def measure_grads(
    groups: Mapping[str, Sequence[torch.nn.Parameter]], dims: ParallelDims, device: torch.device
) -> torch.Tensor:
    """Return this rank's part of the squared 2-norm of the gradients, a float64 scalar; the parts
    of all ranks add up to it. Call it after any backward of a step. The gradients are not changed.

    FSDP must have reduced the gradients in that backward: `prepare_backward` with `is_last`.
    `device` is the device of the gradients.

    Collectives: see `reduce_replicated_grads`; every rank must call.
    """
    params = [param for group in groups.values() for param in group]
    summands = [(grad, grad.clone()) for grad in _replicated_grads(params)]
    reduce_replicated_grads(params, dims)
    squares = sum_squares(groups, dims.stage_group, device).sum()
    for grad, summand in summands:
        grad.copy_(summand)  # later backwards add to it
    return squares


@torch.no_grad()
def clip_grad_norms(
    groups: Mapping[str, Sequence[torch.nn.Parameter]],
    max_norm: float,
    sharing: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip the gradients of all groups together; return the total 2-norm before clipping and the
    norm of each group (groups,), both float32.

    Parameters may be on several meshes, for which `torch.nn.utils.clip_grad_norm_` raises. If the
    norm is not finite, the gradients are not changed, and the caller must not step. A `max_norm` of
    0 only computes the norms. `sharing` and `device` are as in `sum_squares`.

    Collectives: one all-reduce over the default process group; every rank must call, with the same
    groups.
    """
    grads = [
        local_of(param.grad)
        for params in groups.values()
        for param in params
        if param.grad is not None
    ]
    squares = sum_squares(groups, sharing, device)
    dist.all_reduce(squares)
    norm = squares.sum().sqrt().to(torch.float32)
    if max_norm > 0 and grads:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, torch.where(norm.isfinite(), factor, 1.0))
    return norm, squares.sqrt().to(torch.float32)


def sum_squares(
    groups: Mapping[str, Sequence[torch.nn.Parameter]],
    sharing: dist.ProcessGroup | None,
    device: torch.device | None,
) -> torch.Tensor:
    """Sum the squares of this rank's shards of the gradients of each group, (groups,) float64. Each
    shard's sum is divided by the number of ranks that hold it, so that the sum over all ranks is
    correct.

    `sharing` has the ranks that share this rank's parameters: its pipeline stage, or all ranks
    (None). `device` is the device of the gradients.
    """
    num_sharing = dist.get_world_size(sharing)
    # Sorted by replicas, not by group, so that one kernel handles many gradients even if there are
    # many groups.
    found: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    # cached by layout: looking up a mesh is slow, and there are many parameters
    replicas_of: dict[object, int] = {}
    for index, params in enumerate(groups.values()):
        for grad in (param.grad for param in params if param.grad is not None):
            layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            if layout not in replicas_of:
                replicas_of[layout] = num_replicas(grad, num_sharing)
            found[replicas_of[layout]].append((index, local_of(grad)))
    # Squares are summed in float64 on every device: float32's 24 bits are too few for the sum of a
    # large model.
    squares = torch.zeros(len(groups), dtype=torch.float64, device=device)
    for replicas, entries in found.items():
        local = [grad for _, grad in entries]
        # bfloat16 would round the norms to 8 bits
        dtype = wide_dtype(local[0])
        norms = torch.stack(torch._foreach_norm(local, 2, dtype=dtype)).to(torch.float64)
        # A group's squares are contiguous, so the order of the sum does not depend on atomics.
        sizes = [[index for index, _ in entries].count(group) for group in range(len(groups))]
        squares += torch.stack([part.sum() for part in norms.square().split(sizes)]) / replicas
    return squares
