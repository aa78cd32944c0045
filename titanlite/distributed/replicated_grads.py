"""Gradients of parameters that tensor parallelism replicates: parts of sums, added up in one collective per step."""

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, Replicate

from titanlite.base import timers
from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.materialize.layout import local_of


@torch.no_grad()
def reduce_replicated_grads(params: Iterable[torch.nn.Parameter], dims: ParallelDims) -> None:
    """Sum the gradients of tp-replicated parameters (norms, routers, some biases) over the tp ranks, in place.

    Each tp rank holds other tokens or other heads, so its gradient of such a parameter is a part of the sum. FSDP2
    would reduce them one by one, five small all-reduces per layer and micro-batch; here it is one flat all-reduce per
    step, over shards that FSDP has already reduced. Call it after the last backward, before gradients are read.

    Collectives: one all-reduce over tp per gradient dtype; every rank must call.
    """
    if dims.degrees.tp == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in params:
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
            names = param.device_mesh.mesh_dim_names or ()
            if "tp" in names and isinstance(param.placements[names.index("tp")], Replicate):
                by_dtype.setdefault(param.grad.dtype, []).append(local_of(param.grad))
    for grads in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        with timers.collective():
            all_reduce_sum(flat, group=dims.tp_mesh.get_group())
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
