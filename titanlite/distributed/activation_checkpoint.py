"""Activation checkpointing (arXiv:1604.06174): whole layers, or selected operations inside them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from titanlite.config.schema import ActivationCheckpointSection
from titanlite.models.attention import SelfAttention
from titanlite.models.interface import Model
from titanlite.models.layers import FeedForward, kept
from titanlite.models.moe import Experts
from titanlite.ops import local_tensor
from titanlite.ops.kernels import get_costly

# Results that selective checkpointing keeps, for they are costly, as are those of kernels; the rest is recomputed.
_KEPT_OPS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.titanlite.grouped_mm.default,
)


def checkpoint_operations(model: Model, section: ActivationCheckpointSection) -> None:
    """Make regions of a layer keep the results of costly operators alone, if `section` says so.

    Regions, not whole layers: selective checkpointing replays a region operation by operation, and the hooks of an FSDP
    unit inside it would do other operations the second time. A region also keeps its own result if a product makes it,
    so regions are attention up to its output projection, feed-forward that is wider inside than outside, and experts
    with adapters or in few bits; other experts are fused, and keep what their backward needs.

    The collectives of tensor and expert parallelism lie between the regions, so their results are kept. Those of
    context parallelism lie inside of attention and are done again: what they send is kept already, and what they bring
    is as large. Compiled layers are traced with their regions.
    """
    if not _is_by_operation(section):
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.draws_random()}

    # One function for all: a compiled graph is then one for all layers. No partial, which torch 2.11 does not trace.
    def recompute(compute: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(compute, *args, context_fn=_contexts, **options)

    for module in model.modules():
        if (
            isinstance(module, SelfAttention)
            or (isinstance(module, Experts) and not module.is_fused)
            or (isinstance(module, FeedForward) and _is_wide(module))
        ):
            module.recompute = recompute


def _is_wide(module: FeedForward) -> bool:
    """Return True if this rank's part of it is wider inside than its result is."""
    inside, outside = (local_tensor(linear.weight).shape[0] for linear in (module.up_proj, module.down_proj))
    return inside > outside


def checkpoint_layers(model: Model, section: ActivationCheckpointSection) -> None:
    """Keep nothing but the input of whole layers: of all in mode `full`, or of every Nth.

    Module names and parameters stay as they are. A layer may be compiled: it is called again in backward.
    """
    if section.mode == "none" or _is_by_operation(section):
        return
    every = 1 if section.mode == "full" else int(section.selective_ac_option)
    keeps_rng, here = model.draws_random(), set(model.decoder_layers())
    for layer in here.intersection(model.all_layers()[::every]):
        wrap_forward(layer, lambda forward: partial(_checkpoint, forward, preserve_rng_state=keeps_rng))


def wrap_forward(layer: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap` of a layer's forward in its place: the one exception from hooks and documented attributes.

    A hook cannot run the forward again. A module around the layer has other names of parameters, and is not of the
    class that transformers looks for; torch's own wrappers and `nn.Module.compile` take FSDP's hooks in.
    """
    layer.forward = wrap(layer.forward)


def _checkpoint(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(partial(_run, forward, []), *args, use_reentrant=False, **options)


def _run(forward: Callable[..., Any], values: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Run `forward`, in which `keep` fills `values`, and takes them in each further run."""
    token = kept.set(iter(values) if values else values)
    try:
        return forward(*args, **kwargs)
    finally:
        kept.reset(token)


def _is_by_operation(section: ActivationCheckpointSection) -> bool:
    return section.mode == "selective" and section.selective_ac_option == "op"


def _contexts() -> Any:
    return create_selective_checkpoint_contexts([*_KEPT_OPS, *get_costly()])
