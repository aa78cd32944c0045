"""From a sharded parameter to the plain tensor that a kernel computes on."""

import torch
from torch.distributed.tensor import DTensor


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or `param` itself when it is a plain tensor; differentiable.

    All arithmetic of titanlite's models runs on local tensors: DTensor dispatch costs 50 to 200 us per operation, and
    between FSDP2's all-gather and the kernel a DTensor's spec may claim another dtype than its data (up to torch 2.12).

    The gradient has the layout of the parameter. For a parameter that is *replicated* on the tensor-parallel axis it is
    this rank's part of a sum, because activations between layers are sequence-sharded: each rank meets other tokens
    (or heads). `distributed.reduce_replicated_grads` adds the parts once per step.
    """
    return param.to_local() if isinstance(param, DTensor) else param
