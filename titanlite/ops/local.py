"""From a sharded parameter to the plain tensor that a kernel computes on."""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or `param` itself when it is a plain tensor; differentiable.

    All arithmetic of titanlite's models runs on local tensors: DTensor dispatch costs 50 to 200 us per operation, and
    between FSDP2's all-gather and the kernel a DTensor's spec may claim another dtype than its data (up to torch 2.12).

    The gradient of a sharded parameter is sharded the same way. A parameter that is *replicated* on a mesh axis meets
    different tokens (or heads) on every rank of that axis, because activations between layers are sequence-sharded;
    so its local gradient is a partial sum. FSDP2 reduces it over that axis when it stores the gradient.
    """
    if not isinstance(param, DTensor):
        return param
    grad_placements = [Partial() if isinstance(p, Replicate) else p for p in param.placements]
    return param.to_local(grad_placements=grad_placements)
