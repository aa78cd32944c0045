"""Parallelism, applied to single-device models from outside, on the meta device."""

from titanlite.distributed.clip_grad import clip_grad_norm, clip_grad_norms
from titanlite.distributed.collectives import all_reduce_sum, all_to_all_single
from titanlite.distributed.fsdp import base_dtype, mixed_precision_dtypes, prepare_backward
from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.distributed.process_group import end_distributed, fake_ranks, init_distributed
from titanlite.distributed.replicated_grads import reduce_replicated_grads
from titanlite.features.pipeline.schedule import only_chunk, order_forwards, order_turns

__all__ = [
    "ParallelDims",
    "all_reduce_sum",
    "all_to_all_single",
    "base_dtype",
    "clip_grad_norm",
    "clip_grad_norms",
    "end_distributed",
    "fake_ranks",
    "init_distributed",
    "mixed_precision_dtypes",
    "only_chunk",
    "order_forwards",
    "order_turns",
    "parallelize",
    "prepare_backward",
    "reduce_replicated_grads",
]
