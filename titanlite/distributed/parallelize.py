"""The one order in which parallelism is applied: tp -> ep -> activation checkpointing -> compile -> fsdp."""

import torch

from titanlite.config.schema import JobConfig
from titanlite.distributed.activation_checkpoint import apply_activation_checkpoint
from titanlite.distributed.expert_parallel import apply_expert_parallel
from titanlite.distributed.fsdp import apply_fsdp
from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.distributed.tensor_parallel import apply_tensor_parallel
from titanlite.distributed.transformers_tensor_parallel import apply_transformers_tensor_parallel
from titanlite.models.build import AnyModel
from titanlite.models.decoder import Decoder


def parallelize(model: AnyModel, job: JobConfig, dims: ParallelDims, device_type: str) -> None:
    """Shard `model` in place as the configuration says. The model is, and stays, on meta; no data is moved.

    Tensor and expert parallelism come first, for FSDP2 splits the shards that they leave. Activation checkpointing
    wraps the layer's forward, compile wraps that, and FSDP's hooks stay outside of both.
    """
    if dims.degrees.tp > 1:
        if isinstance(model, Decoder):
            apply_tensor_parallel(model, dims.tp_mesh)
        else:
            apply_transformers_tensor_parallel(model, dims.tp_mesh)
    if dims.degrees.ep > 1:
        apply_expert_parallel(model, dims.ep_mesh)
    apply_activation_checkpoint(model, job.activation_checkpoint)
    if job.compile.enable:
        for layer in model.decoder_layers():
            # The forward, not the module: no wrapper in parameter names, and FSDP's hooks are not traced.
            layer.forward = torch.compile(layer.forward)
    apply_fsdp(model, job, dims, device_type)
