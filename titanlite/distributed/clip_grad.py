"""Global gradient norm and clipping over parameters of several meshes, with one all-reduce."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from titanlite.base import timers
from titanlite.distributed.collectives import all_reduce_sum
from titanlite.materialize.layout import local_of, num_replicas


def _norm_dtype(grads: list[torch.Tensor]) -> torch.dtype:
    """float32 for bfloat16 gradients, whose norm would be rounded to 8 bits too."""
    return torch.promote_types(grads[0].dtype, torch.float32)


@torch.no_grad()
def clip_grad_norms(
    groups: Mapping[str, Iterable[torch.nn.Parameter]],
    max_norm: float,
    sharing: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    scale: Callable[[list[torch.Tensor], torch.Tensor], object] = torch._foreach_mul_,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip the gradients of all groups together; return their total 2-norm before, and that of each group (groups,).

    `torch.nn.utils.clip_grad_norm_` raises when dense and expert parameters live on different meshes. Here every rank
    sums the squares of its local shards, each divided by the number of ranks that hold the same shard, and one
    all-reduce over the world gives the totals. `max_norm` = 0 only computes the norms, which are float32. `sharing` are
    the ranks that have the same parameters as this one, or shards of them: its pipeline stage; None: all. A stage may
    have no gradients, and takes part on `device`, where those of the others are. `scale` multiplies gradients, now or
    when the optimizer reads them.

    A norm that is not finite leaves the gradients as they are; the caller must not step.

    Collectives: one all-reduce over the default process group; every rank must call, with the same groups.
    """
    num_sharing = dist.get_world_size(sharing)
    # By replicas and group: kernels over many gradients at once, however many groups there are.
    found: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for index, params in enumerate(groups.values()):
        for param in params:
            if param.grad is not None:
                found[num_replicas(param.grad, num_sharing)].append((index, local_of(param.grad)))
    grads = [grad for entries in found.values() for _, grad in entries]
    if not grads and sharing is None:
        return torch.zeros(()), torch.zeros(len(groups))
    # Squares are summed in float64 on every device: the sum of a large model's squares outgrows float32's 24 bits.
    squares = torch.zeros(len(groups), dtype=torch.float64, device=grads[0].device if grads else device)
    for replicas, entries in found.items():
        local = [grad for _, grad in entries]
        norms = torch.stack(torch._foreach_norm(local, 2, dtype=_norm_dtype(local))).to(torch.float64)
        squares += _sum_by_group(norms.square(), [index for index, _ in entries], len(groups)) / replicas
    with timers.collective():
        all_reduce_sum(squares)
    norm = squares.sum().sqrt().to(torch.float32)
    if max_norm > 0 and grads:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale(grads, torch.where(norm.isfinite(), factor, 1.0))
    return norm, squares.sqrt().to(torch.float32)


def _sum_by_group(values: torch.Tensor, indices: list[int], num_groups: int) -> torch.Tensor:
    """Sum the values of each group. Those of a group lie together, so no order depends on atomics."""
    sizes = [indices.count(group) for group in range(num_groups)]
    return torch.stack([part.sum() for part in values.split(sizes)])
