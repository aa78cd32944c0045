"""Context parallelism by an all-to-all between heads and positions (DeepSpeed-Ulysses,
arXiv:2309.14509), for a decoder on meta.

The ranks of a group get the same sequences. From the embedding to the loss, each rank holds S / n
positions of every sequence. Only attention needs all positions: one all-to-all turns a piece of the
sequence with all heads into the whole sequence with some heads, and a second one reverses this. So
each attention backend, packed documents and the cache work as on one rank.

FSDP shards parameters over these ranks too, and so sums the gradients of all positions. Tensor
parallelism is applied later, and splits a rank's piece of the sequence and its heads once more.

Shapes: B batch, S sequence, n ranks, s = S / n positions of a rank, H query heads, G key/value
heads, h and g query and key/value heads of one rank inside attention, K width of a query or key
head, V width of a value head, D hidden.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanlite.distributed.collectives import (
    all_reduce,
    all_to_all,
    gather_parts,
    own_part,
    register_group,
)
from titanlite.models.interface import Core, Part, SequencePart
from titanlite.models.layers import Embedding, OutputHead, RotaryEmbedding

_SEQUENCE_DIM = 1
_HEADS_DIM = 2


class Peers(NamedTuple):
    """The ranks that hold the pieces of a sequence: the name of their group, its size, and this
    rank's number in it.
    """

    group: str
    size: int
    rank: int


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Split every sequence that `model` is called with over the ranks of `group`, in rank order.

    The model is called as before with whole sequences (tokens, labels, positions and documents),
    which are the same on all these ranks. Losses and logits cover whole sequences, and are equal on
    all ranks. Balance losses are sums over a rank's own positions. This function runs no
    collective; the model may be on meta.

    Collectives of a forward: two all-to-alls per layer, a sum of counts per MoE layer with a
    balance loss, and a gather of the losses or logits; backward has the same number of all-to-alls.
    """
    peers = Peers(register_group(group), group.size(), group.rank())
    for module in model.modules():
        if isinstance(module, Core):
            module.share = peers.rank, peers.size
            module.register_forward_pre_hook(partial(_gather_positions, peers=peers))
            module.register_forward_hook(partial(_gather_heads, peers=peers))
        elif isinstance(module, Embedding | RotaryEmbedding):
            module.register_forward_pre_hook(partial(_keep_own_tokens, peers=peers))
        elif isinstance(module, Part):
            module.sequence_parts.append(sequence_part(peers))
        elif isinstance(module, OutputHead):
            module.register_forward_pre_hook(
                partial(_keep_own_labels, peers=peers), with_kwargs=True
            )
            module.register_forward_hook(partial(_gather_results, peers=peers), with_kwargs=True)


def _gather_positions(module: nn.Module, args: Any, *, peers: Peers) -> Any:
    """Exchange s positions of all heads for all positions of this rank's heads.

    One all-to-all moves all leading tensor arguments together.
    """
    is_other = (number for number, x in enumerate(args) if not isinstance(x, torch.Tensor))
    count = next(is_other, len(args))
    # if several ranks need the same head, each gets a copy
    repeats = [max(peers.size // x.shape[_HEADS_DIM], 1) for x in args[:count]]
    heads = [
        x.repeat_interleave(n, dim=_HEADS_DIM) if n > 1 else x
        for x, n in zip(args, repeats, strict=False)
    ]
    by_rank = [x.unflatten(_HEADS_DIM, (peers.size, -1)).movedim(_HEADS_DIM, 0) for x in heads]
    # J = h * K + g * K + g * V
    x_nBsJ = _exchange(torch.cat([x.flatten(-2) for x in by_rank], dim=-1), peers)
    x_BSJ = x_nBsJ.movedim(0, _SEQUENCE_DIM).flatten(_SEQUENCE_DIM, _SEQUENCE_DIM + 1)
    pieces = x_BSJ.split([x.shape[-2] * x.shape[-1] for x in by_rank], dim=-1)
    return *(
        piece.unflatten(-1, x.shape[-2:]) for piece, x in zip(pieces, by_rank, strict=True)
    ), *args[count:]


def _gather_heads(
    module: nn.Module, args: Any, out_BShV: torch.Tensor, *, peers: Peers
) -> torch.Tensor:
    """Exchange all positions of h heads for s positions of all heads, (B, s, H, V)."""
    out_nBshV = out_BShV.unflatten(_SEQUENCE_DIM, (peers.size, -1)).movedim(_SEQUENCE_DIM, 0)
    return _exchange(out_nBshV, peers).movedim(0, _HEADS_DIM).flatten(_HEADS_DIM, _HEADS_DIM + 1)


def _exchange(x_n: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Send slice r of the first dim to rank r; return the received slices in rank order."""
    ones = [1] * peers.size
    return all_to_all(x_n, ones, ones, peers.group)


def _own(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    return own_part(x, _SEQUENCE_DIM, peers.size, peers.rank)


def _keep_own_tokens(module: nn.Module, args: Any, *, peers: Peers) -> Any:
    """Pass only this rank's tokens to the embedding, or their positions to the rotary table."""
    whole_BS, *rest = args
    return _own(whole_BS, peers), *rest


def sequence_part(peers: Peers) -> SequencePart:
    """Return this rank's positions among those of `peers`."""
    return SequencePart(partial(_own, peers=peers), partial(all_reduce, group=peers.group))


def _keep_own_labels(module: nn.Module, args: Any, kwargs: Any, *, peers: Peers) -> Any:
    """Pass only this rank's labels to the output head; `select` still sees all positions."""
    hidden_BsD, *rest = args
    if rest and rest[0] is not None:
        rest[0] = _own(rest[0], peers)
    if (select := kwargs.get("select")) is not None:
        kwargs = kwargs | {
            "select": lambda own_BsD: select(gather_parts(own_BsD, _SEQUENCE_DIM, peers.group))
        }
    return (hidden_BsD, *rest), kwargs


def _gather_results(
    module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor, *, peers: Peers
) -> torch.Tensor:
    """Return the results of all positions, or the sum of the ranks' losses, with the same bits on
    all ranks.
    """
    if kwargs.get("select") is not None:
        return out
    if out.dim() == 0:
        return gather_parts(out.view(1), 0, peers.group).sum()
    # FSDP2 does not accept a view as a module's result
    return gather_parts(out, _SEQUENCE_DIM, peers.group).clone()
