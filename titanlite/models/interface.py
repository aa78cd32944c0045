"""The interface of a model for the trainer, the parallelizer and the checkpoints, the same for
native models and for transformers' classes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from titanlite.config.schema import MoESection
from titanlite.ops.attention import AttentionBackend, AttentionMask


class LayerCache(Protocol):
    """The cache of one layer between forwards: keys and values, or a part's recurrent state.

    Attributes:
        lengths: (B,) int64, number of tokens of each row before this forward; in the first forward,
            the length of its prompt.
        state: the recurrent state of a part; None before the first forward.
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
        """Attend to the cached and these new keys and values; arguments and result are as in
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
        """Return the hidden state of each row's last token, (B, D), from the hidden states of all
        tokens of this forward.
        """
        ...

    def advance(self) -> None:
        """Update the lengths after a forward, by the tokens that it added to all layers."""


class Context(NamedTuple):
    """Inputs that all layers of a forward share. They cover whole sequences, even if a rank holds
    only some positions.
    """

    # rotary table and mask by size of the attention window; 0: attention without a window
    by_window: Mapping[int, tuple[tuple[torch.Tensor, torch.Tensor], AttentionMask]]
    documents_BS: torch.Tensor | None  # as in `Decoder.forward`
    valid_BS: torch.Tensor | None  # False for padding


class Core(nn.Module):
    """The computation of a part in which the tokens of a sequence interact. Its first arguments and
    its result have the shape (B, S, heads, width). The heads are independent.

    It is a module, so that context parallelism can add its all-to-alls as hooks.

    Attributes:
        share: (i, n): this rank computes part i of n equal parts of the heads.
    """

    share: tuple[int, int] = (0, 1)


class SequencePart(NamedTuple):
    """This rank's positions of sequences that several ranks share."""

    own: Callable[[torch.Tensor], torch.Tensor]  # selects them in a tensor (B, S, ...)
    sum: Callable[[torch.Tensor], torch.Tensor]  # sums a tensor over these ranks


class Part(nn.Module):
    """A part of a decoder layer. `forward(x_BSD, context, cache)` returns the update that is added
    to the hidden states, or a tuple of the update and the part's balance losses.

    A part calls no collectives. With tensor parallelism, a part with `splits` is called with all
    positions, and its results are summed over the ranks. A part without `splits` is called with a
    rank's own positions. Context parallelism splits sequences first, then tensor parallelism:
    `sequence_parts` has one entry for each of these splits, in this order.

    Attributes:
        splits: names of linear layers that tensor parallelism splits, with the dim of their weights
            (0: output, 1: input). Layers that are not listed are replicated.
        float32: names of parameters that are stored, and used in computations, in float32.
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
        checkpoint_format: reads and writes the model's files if it is not a native family: an
            object with `sources(folder, stored)`, `files(plan, dtype)` and `check(plan)`.
            None: the native format.
        splits_inside_experts: FSDP may split an expert's weights along dims other than the first.
        reads_local_tensors: parameters are read only by `ops.local_tensor`.
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
        """Set attention backend, MoE settings and loss chunk on the modules, in place, for this
        type of device.
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
        """Return the modules before and after the layers, each a separate FSDP unit; empty lists if
        they share a parameter.
        """
        raise NotImplementedError

    def embedding_and_head(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the token embedding and the output head."""
        raise NotImplementedError

    def float32_parameters(self) -> set[nn.Parameter]:
        """Return the parameters that stay float32 in a model of any dtype, in computations, too."""
        return set()

    def experts_in(self, layer: nn.Module) -> list[nn.Module]:
        """Return the modules of `layer` that hold routed experts."""
        raise NotImplementedError

    def moe_layers(self) -> dict[int, Any]:
        """Return the MoE modules on this rank whose routers titanlite balances, by layer number, in
        order.
        """
        return {}

    def moe_layer_numbers(self) -> list[int]:
        """Return the numbers of all layers with expert counters, in all pipeline stages."""
        raise NotImplementedError

    def core_flops(self, seq_len: int) -> list[int]:
        """Return each layer's forward FLOPs per token in its `Core`, where tokens interact."""
        raise NotImplementedError

    def expert_counters(self) -> dict[int, Any]:
        """Return the counters of routed rows of the MoE layers on this rank, by layer number."""
        raise NotImplementedError

    def split_experts(self) -> list[nn.Module]:
        """Return the modules whose parameters have one slice per expert; expert parallelism splits
        them along dim 0.

        Raises ConfigError, on all ranks: the experts cannot be split.
        """
        raise NotImplementedError

    def set_dispatch(self, dispatch: Callable[..., Any]) -> None:
        """Set the `TokenDispatcher` that sends tokens to experts on several ranks."""
        raise NotImplementedError

    def draws_random(self) -> bool:
        """Return True if a forward in training mode may draw random numbers, which a recomputed
        layer must draw again.
        """
        raise NotImplementedError

    def build_cache(self, lengths: Sequence[int], max_len: int, device: torch.device) -> Any:
        """Build an empty cache of the model's own class for prompts of these lengths, up to
        `max_len` tokens.

        None: the model has no such class, and accepts any `Cache`.
        """
        return None

    def can_cache(self, device: torch.device) -> bool:
        """Return True if generating with and without a cache gives the same result. Collective on
        first call.
        """
        return True


def is_adapter(name: str) -> bool:
    """Return True for the names of low-rank adapters' parameters."""
    return name.endswith(("lora_A", "lora_B"))
