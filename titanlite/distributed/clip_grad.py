"""Global gradient norm and clipping over parameters of several meshes, with one all-reduce."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from titanlite.materialize.layout import local_of, num_replicas


def _norm_dtype(grads: list[torch.Tensor]) -> torch.dtype:
    """float32 for bfloat16 gradients, whose norm would be rounded to 8 bits too."""
    return torch.promote_types(grads[0].dtype, torch.float32)


@torch.no_grad()
def clip_grad_norm(params: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients in place so that their total 2-norm is at most `max_norm`; return the norm before, float32.

    `torch.nn.utils.clip_grad_norm_` raises when dense and expert parameters live on different meshes. Here every rank
    sums the squares of its local shards, each divided by the number of ranks that hold the same shard, and one
    all-reduce over the world gives the total. `max_norm` = 0 only computes the norm.

    A norm that is not finite leaves the gradients as they are; the caller must not step.

    Collectives: one all-reduce over the default process group; every rank must call.
    """
    world_size = dist.get_world_size()
    by_replicas: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for param in params:
        if param.grad is not None:
            by_replicas[num_replicas(param.grad, world_size)].append(local_of(param.grad))
    grads = [grad for group in by_replicas.values() for grad in group]
    if not grads:
        return torch.zeros(())
    # Squares are summed in float64 on every device: the sum of a large model's squares outgrows float32's 24 bits.
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for replicas, group in by_replicas.items():
        norms = torch.stack(torch._foreach_norm(group, 2, dtype=_norm_dtype(group))).to(torch.float64)
        total += norms.square().sum() / replicas
    dist.all_reduce(total)
    norm = total.sqrt().to(torch.float32)
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, torch.where(norm.isfinite(), scale, 1.0))
    return norm
