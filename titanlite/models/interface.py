"""The interface that the trainer, the parallelizer and the checkpoints use of a model, whoever
implements it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from titanlite.config.schema import MoESection
from titanlite.ops.attention import AttentionBackend, AttentionMask


class LayerCache(Protocol):
    """What one layer keeps from forward to forward: keys and values, or a part's own state.

    Attributes:
        lengths: (B,) int64, tokens of each row before this forward; in the first one, of its
            prompt.
        state: a part's own; None before the first forward.
    """

    @property
    def lengths(self) -> torch.Tensor: ...

    state: tuple[torch.Tensor, ...] | None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to these new keys and values and those before; arguments and result as in
        `ops.attention`.
        """
        ...


class Cache(Protocol):
    """Keys and values of all layers for one batch of rows; `layers` has one `LayerCache` per
    decoder layer.
    """

    layers: Sequence[LayerCache]

    def positions(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the positions of the tokens of this forward; None: 0, 1, 2, ... in every row."""

    def newest(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state of each row's last token, (B, D), from those of all tokens of
        this forward.
        """
        ...

    def advance(self) -> None:
        """Count the tokens of the forward that has just filled all layers."""


class Context(NamedTuple):
    """What all layers of a forward share; of whole sequences, whatever positions a rank has."""

    # rotary table and mask of the attention with a window; of that without at 0
    by_window: Mapping[int, tuple[tuple[torch.Tensor, torch.Tensor], AttentionMask]]
    documents_BS: torch.Tensor | None  # as in `Decoder.forward`
    valid_BS: torch.Tensor | None  # False for padding


class Core(nn.Module):
    """The place in a part where the tokens of a sequence interact, with arguments (B, S, heads,
    width) before all others and a result (B, S, heads, width). The heads are independent.

    A module, so that context parallelism can put its exchange of heads for positions around it.

    Attributes:
        share: which of how many equal shares of the heads this rank has in it.
    """

    share: tuple[int, int] = (0, 1)


class SequencePart(NamedTuple):
    """This rank's positions of sequences that other ranks have the rest of."""

    own: Callable[[torch.Tensor], torch.Tensor]  # those of a tensor (B, S, ...)
    sum: Callable[[torch.Tensor], torch.Tensor]  # adds up the ranks' tensors


class Part(nn.Module):
    """A part of a decoder layer: `forward(x_BSD, context, cache)` returns what is added to the
    hidden states, or that and the part's balance losses.

    It has no collective. A part with `splits` is called with all positions and returns a sum of
    what the ranks of tensor parallelism compute; another one with a rank's own positions, which
    `sequence_parts` describes, in the order in which sequences are split.

    Attributes:
        splits: names of linear layers that tensor parallelism splits, and along which dim of their
            weights: 0 the output, 1 the input. What is not listed is replicated.
        float32: names of parameters that are kept, and computed with, in float32.
    """

    splits: ClassVar[Mapping[str, int]] = {}
    float32: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.sequence_parts: list[SequencePart] = []


class Model(nn.Module):
    """A causal language model that can be described on meta, sharded, and materialized.

    `forward(tokens_BS, labels_BS, positions_BS, document_ids_BS, reduction, cache)` returns logits,
    or with labels the summed losses; see `models.decoder.Decoder.forward`.

    Attributes:
        config: sizes and facts about the architecture.
        checkpoint_format: reads and writes the model's files where they are not those of a native
            family: an object with `sources(folder, stored)`, `files(plan, dtype, exact)` and
                `check(plan)`. None: the native format.
        splits_inside_experts: FSDP may split an expert's weights along other dims than the first.
        reads_local_tensors: every parameter is read by `ops.local_tensor` alone.
    """

    config: Any
    checkpoint_format: Any = None
    splits_inside_experts = True
    reads_local_tensors = True

    def configure(
        self,
        attention_backend: AttentionBackend,
        moe: MoESection,
        loss_chunk_tokens: int,
        device: torch.device,
    ) -> None:
        """Set attention backend, MoE settings and loss chunk on the modules, in place, for devices
        like `device`.
        """
        raise NotImplementedError

    def set_loss_coeffs(self, *, aux: float, z: float) -> None:
        """Set the coefficients of the balance losses (a load-balance loss and a z-loss) in place; a
        model that has neither ignores them.
        """

    def all_layers(self) -> list[nn.Module]:
        """Return the repeated layers of all pipeline stages, in order."""
        raise NotImplementedError

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the repeated layers that run on this rank, in order."""
        raise NotImplementedError

    def outer_units(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules before and after the layers, for FSDP units of their own; empty where
        they share a parameter.
        """
        raise NotImplementedError

    def embedding_and_head(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the token embedding and the output head."""
        raise NotImplementedError

    def float32_parameters(self) -> set[nn.Parameter]:
        """Return the parameters that are computed with in float32, whatever the dtype of others."""
        return set()

    def experts_in(self, layer: nn.Module) -> list[nn.Module]:
        """Return the modules of `layer` that hold routed experts."""
        raise NotImplementedError

    def moe_layers(self) -> dict[int, Any]:
        """Return the MoE modules on this rank whose routers titanlite balances, by the layer's
        number, in order.
        """
        return {}

    def moe_layer_numbers(self) -> list[int]:
        """Return the numbers of the layers with counted experts, in all pipeline stages."""
        raise NotImplementedError

    def core_flops(self, seq_len: int) -> list[int]:
        """Return each layer's forward FLOPs per token where the tokens of a sequence interact."""
        raise NotImplementedError

    def expert_counters(self) -> dict[int, Any]:
        """Return the counters of routed rows of the MoE layers on this rank, by the layer's
        number.
        """
        raise NotImplementedError

    def split_experts(self) -> list[nn.Module]:
        """Return the modules whose parameters have one slice per expert, for expert parallelism to
        split along dim 0.

        Raises ConfigError: the experts cannot be split. The same on all ranks.
        """
        raise NotImplementedError

    def set_dispatch(self, dispatch: Callable[..., Any]) -> None:
        """Route tokens through `dispatch`, a `TokenDispatcher`, to experts that are split over
        ranks.
        """
        raise NotImplementedError

    def draws_random(self) -> bool:
        """Return True if a forward in training mode may draw random numbers: recomputed layers must
        draw them again.
        """
        raise NotImplementedError

    def build_cache(self, lengths: Sequence[int], max_len: int, device: torch.device) -> Any:
        """Build an empty cache of the model's own kind for prompts of these lengths, up to
        `max_len` tokens.

        None: the model has none, and takes any `Cache`.
        """
        return None

    def can_cache(self, device: torch.device) -> bool:
        """Return True if generating with a cache gives what the model computes without. Collective
        on first call.
        """
        return True


def is_adapter(name: str) -> bool:
    """Return True for the names of low-rank adapters' parameters."""
    return name.endswith(("lora_A", "lora_B"))
