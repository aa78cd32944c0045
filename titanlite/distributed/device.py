"""What the device of the ranks cannot do, or does at a high price."""

import torch

from titanlite.base.errors import ConfigError
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.distributed.fsdp import mixed_precision_dtypes
from titanlite.ops.attention import AttentionBackend
from titanlite.ops.grouped_gemm import resolve_backend


def check_device(job: JobConfig, device: torch.device) -> None:
    """Refuse settings that this device would ignore or fail on.

    Raises:
        ConfigError: CPU offload, Triton kernels, flex or varlen attention without a GPU, or the latter in float32. The
            same on all ranks.
    """
    if job.model.attention_backend == "flex" and device.type != "cuda":
        raise ConfigError("model.attention_backend: 'flex' has no backward pass on the CPU. Set it to 'sdpa'.")
    if job.model.attention_backend == "varlen":
        dtype, _ = mixed_precision_dtypes(job, device.type)
        if device.type != "cuda" or dtype == torch.float32:
            other = ", or training.mixed_precision_param to 'bfloat16'" if device.type == "cuda" else ""
            raise ConfigError(
                "model.attention_backend: 'varlen' is for bfloat16 on CUDA, and activations are "
                f"{str(dtype).removeprefix('torch.')} on {device.type}. Set it to 'sdpa'{other}."
            )
    if job.training.enable_cpu_offload and device.type != "cuda":
        raise ConfigError("training.enable_cpu_offload: there is no CUDA device to offload from. Set it to false.")
    if job.moe.grouped_gemm == "triton" and not job.training.triton_kernels:
        raise ConfigError("moe.grouped_gemm = 'triton', but training.triton_kernels is false. Set one of them.")
    try:
        resolve_backend(job.moe.grouped_gemm, device, torch.float32)
    except ValueError as error:
        raise ConfigError(f"moe.grouped_gemm: {error}") from None


def choose_attention(job: JobConfig, model_config: AnyModelConfig, device_type: str) -> AttentionBackend:
    """Choose what `model.attention_backend` = "auto" stands for on devices of this type; also for a plan without one.

    FlashAttention wants CUDA from Ampere on, bfloat16, and heads of a multiple of 8 up to 256 values.
    """
    if job.model.attention_backend != "auto":
        return job.model.attention_backend
    dtype, _ = mixed_precision_dtypes(job, device_type)
    if device_type != "cuda" or dtype != torch.bfloat16 or not isinstance(model_config, ModelConfig):
        return "sdpa"
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return "varlen" if model_config.qk_head_dim in range(8, 257, 8) and not is_old else "sdpa"
