"""Parallelism, applied to single-device models from outside, on the meta device."""

from titanlite.distributed.parallel_dims import ParallelDims
