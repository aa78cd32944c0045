"""Sharding of a pipeline stage, in a fixed order: cp, tp, ep, activation checkpointing and compile,
fsdp.

Activation checkpointing (arXiv:1604.06174) recomputes whole layers, or selected operations inside
them.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import titanlite.ops.gated_delta  # noqa: F401 - registers its operators
from titanlite.base.log import logger
from titanlite.base.process import secure_cache
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.config.schema import ActivationCheckpointSection
from titanlite.distributed.context_parallel import apply_context_parallel
from titanlite.distributed.expert_parallel import apply_expert_parallel
from titanlite.distributed.fsdp import apply_fsdp, mixed_precision_dtypes
from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.distributed.tensor_parallel import apply_tensor_parallel
from titanlite.models.attention import CoreAttention
from titanlite.models.decoder import Decoder
from titanlite.models.interface import Model
from titanlite.models.layers import Recomputable
from titanlite.ops.attention import ATTENTION_OPERATORS, AttentionBackend
from titanlite.ops.gated_delta import import_fla
from titanlite.ops.matmul import resolve_backend
from titanlite.ops.recompute import forward_values

_MOST_GRAPHS = 64
"""Most graphs of all layers together. Dense and MoE layers, training and evaluation, masks and
shapes need separate graphs. Above torch's own limit of 8, compiling is an error, or the layer runs
uncompiled.
"""
# Operators whose results selective checkpointing saves, because they are costly; it recomputes the
# other ones.
_SAVED_OPS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    *ATTENTION_OPERATORS,
    torch.ops.titanlite.grouped_mm.default,
    torch.ops.titanlite.gated_delta.default,
)


def parallelize(model: Model, job: JobConfig, dims: ParallelDims, device_type: str) -> None:
    """Shard `model` in place according to the configuration. The model is on meta before and after;
    no data is moved.

    Context parallelism comes first, because tensor parallelism splits a rank's part of the sequence
    further. FSDP2 comes last, because it splits the shards of tp and ep, and its hooks must stay
    outside of the wrappers of `wrap_layers`. With pipeline stages, `apply_pipeline_parallel` must
    have run before.
    """
    if dims.cp_group is not None:
        apply_context_parallel(model, dims.cp_group)
    if dims.degrees.tp > 1:
        apply_tensor_parallel(cast(Decoder, model), dims.tp_mesh)
    if dims.degrees.ep > 1:
        apply_expert_parallel(model, dims.ep_mesh)
    wrap_layers(model, job, experts_on_own_mesh=dims.degrees.experts_on_own_mesh)
    apply_fsdp(
        model,
        job.training,
        job.parallelism,
        dims,
        device_type,
        is_compiled=job.compile.enable,
    )


def wrap_layers(model: Model, job: JobConfig, *, experts_on_own_mesh: bool) -> None:
    """Wrap the layers' forwards in activation checkpointing and compilation. Only native layers can
    be compiled.

    Parameters keep their names, and FSDP's hooks are not traced. Checkpointed operations are
    compiled with the layer. A checkpoint of a whole layer is outside of its compiled code: a graph
    break inside of a checkpoint would leave the whole layer uncompiled. With `experts_on_own_mesh`,
    FSDP's hooks on experts and the all-to-alls of tokens are not compiled, so a layer with experts
    becomes several graphs; so does a layer whose attention is kept. Every other layer is one graph,
    or training ends with an error.

    This is the only place that replaces a module's `forward`. The alternatives do not work: a hook
    cannot run the forward again; a wrapper module changes the names of parameters, and is not an
    instance of the class that transformers looks for; torch's own wrappers and
    `nn.Module.compile` would include FSDP's hooks.
    """
    checkpoint_operations(model, job.activation_checkpoint)
    if job.compile.enable:
        logger.info(
            "compile: each kind of layer is compiled when it first runs, which may take a minute"
        )
        secure_cache()
        options = _let_many_graphs()
        for layer in model.decoder_layers():
            in_parts = job.activation_checkpoint.mode == "keep_attention" or (
                experts_on_own_mesh and bool(model.experts_in(layer))
            )
            layer.forward = torch.compile(layer.forward, fullgraph=not in_parts, **options)
    checkpoint_layers(model, job.activation_checkpoint)


def checkpoint_operations(model: Model, section: ActivationCheckpointSection) -> None:
    """Save only the results of costly operators in regions of each layer, if `section` selects
    this.

    A region is smaller than a layer: selective checkpointing replays a region operation by
    operation, and the hooks of an FSDP unit inside it would run different operations in the replay.
    The results of all matmuls in a region are saved, also the region's own result if a matmul gives
    it. So attention is a region only up to its output projection. A feed-forward part is a region
    only if it is wider inside than outside, so that recomputing frees more memory than the result
    takes. Experts with biases, adapters or quantized weights are regions. Other experts are fused,
    and save the tensors that their backward needs.

    The collectives of tensor and expert parallelism are between the regions, so their results are
    saved. The collectives of context parallelism are inside attention and run again: their inputs
    are saved anyway, and their results are as large. Compiled layers are traced with their regions.
    """
    if not _is_by_operation(section):
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.draws_random()}

    # All layers use the same function, so that they share one compiled graph. torch 2.11 cannot
    # trace a partial.
    def recompute(compute: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(compute, *args, context_fn=_contexts, **options)

    for module in model.modules():
        if isinstance(module, Recomputable) and module.saves_memory:
            module.recompute = recompute


def checkpoint_layers(model: Model, section: ActivationCheckpointSection) -> None:
    """Save only the inputs of whole layers: of every Nth layer, or of all layers in mode `full`, or
    in mode `keep_attention`, which also saves the results of attention.

    Module names and parameters do not change. A layer may be compiled: it is called again in
    backward.
    """
    # "auto" that was not resolved recomputes nothing
    if section.mode in ("none", "auto") or _is_by_operation(section):
        return
    every = int(section.selective_ac_option) if section.mode == "selective" else 1
    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.is_saved = section.mode == "keep_attention"
    keeps_rng = model.draws_random()
    here = set(model.decoder_layers())
    for layer in here.intersection(model.all_layers()[::every]):
        layer.forward = partial(_checkpoint, layer.forward, preserve_rng_state=keeps_rng)


def _checkpoint(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(partial(_run, forward, []), *args, use_reentrant=False, **options)


def _run(forward: Callable[..., Any], values: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Run `forward`; its calls of `once_per_forward` store values the first time and read them in a
    replay.
    """
    token = forward_values.set(iter(values) if values else values)
    try:
        return forward(*args, **kwargs)
    finally:
        forward_values.reset(token)


def _is_by_operation(section: ActivationCheckpointSection) -> bool:
    return section.mode == "selective" and section.selective_ac_option == "op"


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(list(_SAVED_OPS))


def _let_many_graphs() -> dict[str, Any]:
    """Raise torch's limit of graphs; return arguments for `torch.compile`."""
    # torch 2.13 stores changes of its configuration per thread, and on CUDA a different thread
    # recomputes layers in backward; in this version the limit is an argument. Older versions have
    # no such argument, and share one configuration among all threads.
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": _MOST_GRAPHS}
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    return {}


def check_device(job: JobConfig, device: torch.device) -> list[str]:
    """Return problems of settings that would be ignored or fail on this device: CPU offload, Triton
    kernels, and varlen attention without a GPU or in float32.
    """
    problems: list[str] = []
    if job.model.attention_backend == "varlen":
        dtype, _ = mixed_precision_dtypes(job.training, device.type)
        if device.type != "cuda" or dtype == torch.float32:
            other = (
                ", or training.mixed_precision_param to 'bfloat16'" if device.type == "cuda" else ""
            )
            problems.append(
                "model.attention_backend: 'varlen' is for bfloat16 on CUDA, and activations are "
                f"{str(dtype).removeprefix('torch.')} on {device.type}. Set it to 'sdpa'{other}."
            )
    if job.training.enable_cpu_offload and device.type != "cuda":
        problems.append(
            "training.enable_cpu_offload: there is no CUDA device to offload from. Set it to false."
        )
    if job.moe.grouped_gemm == "triton" and not job.training.triton_kernels:
        problems.append(
            "moe.grouped_gemm = 'triton', but training.triton_kernels is false. Set one of them."
        )
    if job.model.delta_backend == "fla":
        try:
            import_fla()
        except ValueError as error:
            problems.append(f"model.delta_backend: {error}")
    try:
        resolve_backend(job.moe.grouped_gemm, device, torch.float32)
    except ValueError as error:
        problems.append(f"moe.grouped_gemm: {error}")
    return problems


def choose_attention(
    job: JobConfig, model_config: AnyModelConfig, device_type: str
) -> AttentionBackend:
    """Return `model.attention_backend`, with "auto" resolved for this type of device, which need
    not exist on this machine.

    FlashAttention ("varlen") needs CUDA on Ampere or newer, bfloat16, and head widths that are
    multiples of 8 up to 256.
    """
    if job.model.attention_backend != "auto":
        return job.model.attention_backend
    dtype, _ = mixed_precision_dtypes(job.training, device_type)
    if (
        device_type != "cuda"
        or dtype != torch.bfloat16
        or not isinstance(model_config, ModelConfig)
    ):
        return "sdpa"
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return "varlen" if model_config.qk_head_dim in range(8, 257, 8) and not is_old else "sdpa"
