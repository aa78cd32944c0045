"""Tensor parallelism with sequence parallelism (arXiv:1909.08053, arXiv:2205.05198), applied to a
decoder on meta.

Between layers every tp rank holds S / tp positions of each sequence. Attention and dense
feed-forward gather the sequence, compute with the rank's heads or part of the inner width, and
reduce-scatter the result. Embedding and output head split the vocabulary. Norms and routers work on
the rank's own positions with a replicated weight. Experts are not changed: expert parallelism uses
the tp ranks, so that the MoE layer needs no gather.

Parameters become DTensors. Modules still compute on local tensors (`ops.local_tensor`), and this
file adds the collectives as plain hooks. Shapes: B batch, S sequence, s = S / tp, D hidden, V
vocabulary.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from titanlite.distributed.collectives import all_gather, all_reduce, reduce_scatter, register_group
from titanlite.distributed.context_parallel import Peers, sequence_part
from titanlite.distributed.shard import ParameterPlacements, shard_parameters
from titanlite.materialize.layout import region_of
from titanlite.models.decoder import Decoder
from titanlite.models.interface import Core, Part
from titanlite.models.layers import Embedding, Linear, OutputHead, SplitRMSNorm
from titanlite.models.moe import Experts
from titanlite.ops import VocabShard, linear_cross_entropy

_SEQUENCE_DIM = 1


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard the dense parameters of `model` over the one-axis `mesh` and insert the collectives, in
    place.

    Parameters keep their ties and attributes. This function runs no collective; the model may be on
    meta.
    """
    shard_parameters(model, mesh, _placements(model))
    group = register_group(mesh.get_group())
    peers = Peers(group, mesh.size(), mesh.get_local_rank())
    for module in model.modules():
        if isinstance(module, Core):
            part, parts = module.share
            module.share = peers.rank * parts + part, peers.size * parts
        elif isinstance(module, Part) and module.splits:
            for layer, dim in _split_layers(module).items():
                if isinstance(layer, SplitRMSNorm):
                    layer.sum = partial(all_reduce, group=group)
                elif dim == 1:  # each rank adds a fraction of the bias, so the sum has it once
                    layer.bias_scale = 1.0 / mesh.size()
            module.register_forward_pre_hook(partial(_gather_sequence, group=group))
            module.register_forward_hook(partial(_scatter_sequence, group=group))
        elif isinstance(module, Part):
            module.sequence_parts.append(sequence_part(peers))
        elif isinstance(module, Embedding):
            start = region_of(module.weight).starts[0]
            module.look_up = partial(_look_up_own_rows, start=start, group=group)
        elif isinstance(module, OutputHead):
            module.register_forward_pre_hook(partial(_gather_sequence, group=group))
            module.register_forward_hook(partial(_gather_logits, group=group))
            module.cross_entropy = partial(
                linear_cross_entropy, shard=vocab_shard(module.weight, mesh)
            )


def _placements(model: Decoder) -> ParameterPlacements:
    """Return the placement of every parameter except experts; a tied parameter appears once."""
    experts = {
        p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()
    }
    found: ParameterPlacements = {
        param: Replicate() for param in model.parameters() if param not in experts
    }
    for module in model.modules():
        if isinstance(module, OutputHead | Embedding):
            found[module.weight] = Shard(0)
        elif isinstance(module, Part):
            for layer, dim in _split_layers(module).items():
                found |= dict.fromkeys(layer.split_parameters(dim), Shard(dim))
    return found


def _split_layers(part: Part) -> dict[Linear | SplitRMSNorm, int]:
    """Return the layers in `part.splits` that this `part` has, with the dim of their split."""
    layers = {getattr(part, name): dim for name, dim in part.splits.items()}
    return {layer: dim for layer, dim in layers.items() if isinstance(layer, Linear | SplitRMSNorm)}


def _gather_sequence(module: nn.Module, args, *, group: str):
    x_BsD, *rest = args
    return all_gather(x_BsD, _SEQUENCE_DIM, group), *rest


def _scatter_sequence(
    module: nn.Module, args, out_BSD: torch.Tensor, *, group: str
) -> torch.Tensor:
    return reduce_scatter(out_BSD, _SEQUENCE_DIM, group)


def _gather_logits(module: nn.Module, args, out: torch.Tensor, *, group: str) -> torch.Tensor:
    is_loss = len(args) > 1 and args[1] is not None  # the same on all ranks already
    return out if is_loss else all_gather(out, out.dim() - 1, group)


def _all_reduce_max(x: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def _look_up_own_rows(
    tokens_BS: torch.Tensor, weight_VD: torch.Tensor, padding: int | None, *, start: int, group: str
) -> torch.Tensor:
    """Look up tokens in this rank's rows (from `start` on), with zeros for other tokens; then
    reduce-scatter along the sequence.
    """
    local_BS = tokens_BS - start
    mine_BS = (local_BS >= 0) & (local_BS < weight_VD.shape[0])
    if padding is not None:
        padding = padding - start if 0 <= padding - start < weight_VD.shape[0] else None
    x_BSD = F.embedding(local_BS.where(mine_BS, 0), weight_VD, padding) * mine_BS.unsqueeze(-1)
    return reduce_scatter(x_BSD, _SEQUENCE_DIM, group)


def vocab_shard(weight_VD: torch.Tensor, mesh: DeviceMesh) -> VocabShard:
    """Return this rank's rows of the output head's weight, for `linear_cross_entropy`."""
    group = mesh.get_group()
    return VocabShard(
        region_of(weight_VD).starts[0],
        weight_VD.shape[0],
        partial(_all_reduce_max, group=group),
        partial(all_reduce, group=register_group(group)),
    )
