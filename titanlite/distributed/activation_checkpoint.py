"""Activation checkpointing (arXiv:1604.06174): whole layers, or selected operations inside them."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.config.schema import ActivationCheckpointSection
from titanlite.models.build import AnyModel
from titanlite.models.decoder import Attention
from titanlite.models.layers import FeedForward
from titanlite.models.lora import adapted_modules
from titanlite.models.moe import Experts
from titanlite.models.transformers_model import TransformersModel

# Results that selective checkpointing keeps, for they are dear to compute; the rest is recomputed.
_KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.titanlite.host_attention.default,
    torch.ops.titanlite.grouped_mm.default,
    torch.ops.titanlite.moe_experts_forward.default,
}


def apply_activation_checkpoint(model: AnyModel, section: ActivationCheckpointSection) -> None:
    """Wrap the forwards that `section` selects; module names and parameters stay as they are.

    Whole layers in mode `full` and for every Nth layer. By operation, the regions are attention, feed-forward and
    experts: selective checkpointing replays a region operation by operation, and the hooks of an FSDP unit inside it
    would do other operations the second time. The collectives of tensor and expert parallelism lie between these
    regions, so their results are kept.
    """
    if section.mode == "none":
        return
    # titanlite's layers draw random numbers only in the dropout on adapters, and must draw the same ones again; else
    # saving the generator's state, which costs a copy from the device, is spared.
    keep_rng = isinstance(model, TransformersModel) or any(m.dropout > 0 for m in adapted_modules(model).values())
    if section.mode == "selective" and section.selective_ac_option == "op":
        for module in model.modules():
            if isinstance(module, Attention | FeedForward | Experts):
                _checkpoint_forward(module, keep_rng, context_fn=partial(create_selective_checkpoint_contexts, _policy))
        return
    every = 1 if section.mode == "full" else int(section.selective_ac_option)
    for layer in model.decoder_layers()[::every]:
        _checkpoint_forward(layer, keep_rng)


def _checkpoint_forward(module: nn.Module, keep_rng: bool, **options: Any) -> None:
    module.forward = partial(  # type: ignore[method-assign]
        checkpoint, module.forward, use_reentrant=False, preserve_rng_state=keep_rng, **options
    )


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
