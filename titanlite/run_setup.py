"""What the trainer does before and around building: checks that need the device or the data, settings for modules."""

import torch

from titanlite.base.log import logger
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.config.schema import BLOCK_SIZES
from titanlite.distributed import ParallelDims
from titanlite.distributed.device import warn_of_large_mask
from titanlite.distributed.fsdp import base_dtype
from titanlite.distributed.parallelize import parallelize
from titanlite.features.dpo.objective import turn_off_dropout
from titanlite.features.lora.adapter import warn_of_changed_base
from titanlite.features.lora.layers import apply_lora
from titanlite.features.lowbit.weights import encode_weights
from titanlite.features.transformers.model import TransformersModel
from titanlite.models.build import build_model
from titanlite.models.decoder import Decoder
from titanlite.models.interface import Model
from titanlite.models.moe import is_routed
from titanlite.ops.grouped_gemm import resolve_backend, triton_problem
from titanlite.optim.expert_bias import warn_of_ignored_balancing
from titanlite.optim.parameters import freeze_parameters


def build_on_meta(job: JobConfig, model_config: AnyModelConfig, dims: ParallelDims, device: torch.device) -> Model:
    """The model as it will be trained on devices like `device`, sharded, still without memory; no communication.

    Raises:
        ConfigError: patterns that name nothing, or transformers cannot build the model. The same on all ranks.
    """
    model = build_model(model_config, base_dtype(job, device.type))  # on meta: shapes only
    if isinstance(model_config, ModelConfig) and model_config.pad_token_id is not None:
        logger.info(
            "model: looking up token %d has no gradient, as in transformers: it is pad_token_id in config.json. "
            "Remove it there to train that row.",
            model_config.pad_token_id,
        )
    apply_lora(model, job.lora, getattr(torch, job.training.dtype))
    if job.lora.base_dtype in BLOCK_SIZES:
        encode_weights(model, job.lora.base_dtype)
    freeze_parameters(model, job.optimizer)
    if job.training.objective == "dpo":
        turn_off_dropout(model)
    configure(model, job, device)
    parallelize(model, job, dims, device.type)  # still on meta: now shards
    return model


def warn_of_settings(job: JobConfig, model_config: AnyModelConfig, device: torch.device) -> None:
    """Warn of settings that do nothing, cost much, or change what a checkpoint goes on with."""
    warn_of_ignored_balancing(job, model_config)
    warn_of_large_mask(job, model_config, device)
    warn_of_changed_base(job, model_config)


def configure(model: Model, job: JobConfig, device: torch.device) -> None:
    """Hand the settings that are no sizes to the modules that use them."""
    if isinstance(model, TransformersModel):
        model.loss_chunk_tokens = job.training.loss_chunk_tokens
        if model.config.num_experts or any(is_routed(name) for name, _ in model.named_parameters()):
            told = "its expert load is logged" if model.counters else model.why_not_counted()
            logger.info(
                "moe: transformers' %s routes by itself: no balancing is added; %s", model.config.architecture, told
            )
        return
    if model.moe_layers():
        backend = resolve_backend(job.moe.grouped_gemm, device, torch.float32)
        logger.info("moe: grouped GEMM backend: %s", backend)
        chosen = device.type == "cuda" and job.moe.grouped_gemm == "auto" and backend == "torch"
        if chosen and (problem := triton_problem()) is not None:
            logger.warning("moe: %s titanlite's kernels are left out, which is slower. Install a newer torch.", problem)
    assert isinstance(model, Decoder)
    model.model.attention_backend = job.model.attention_backend
    model.lm_head.chunk_tokens = job.training.loss_chunk_tokens
    for moe in model.moe_layers().values():
        moe.gate.aux_loss_coeff, moe.gate.z_loss_coeff = job.moe.aux_loss_coeff, job.moe.z_loss_coeff
        moe.experts.grouped_gemm_backend = job.moe.grouped_gemm
