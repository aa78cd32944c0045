"""Parallelism, applied to single-device models from outside, on the meta device."""

from titanlite.distributed.clip_grad import clip_grad_norm
from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.distributed.process_group import init_distributed, init_fake
from titanlite.distributed.replicated_grads import reduce_replicated_grads

__all__ = ["ParallelDims", "clip_grad_norm", "init_distributed", "init_fake", "parallelize", "reduce_replicated_grads"]
