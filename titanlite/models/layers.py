"""Building blocks of the decoder: linear, embedding, norm, rotary table, dense feed-forward, output
head.

They hold parameters under Hugging Face's names, declare the sources of the values, and compute on
local tensors, so that the same code runs on one device and on shards.

Shapes: B batch, S sequence, D hidden size, V vocabulary, K head width.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.config.model import ModelConfig
from titanlite.materialize.sources import Compute, Constant, Init, Normal, Source, Zeros
from titanlite.models.interface import Part
from titanlite.ops import (
    add_rms_norm,
    inverse_frequencies,
    linear_cross_entropy,
    local_tensor,
    rms_norm,
    rope_cos_sin,
    swiglu_apart,
)
from titanlite.ops.kernels import wide_dtype
from titanlite.ops.matmul import linear_each


class Linear(nn.Linear):
    """`x @ weight.T + bias`, weight (out, in), initialized N(0, std).

    Attributes:
        bias_scale: factor on the bias; row-parallel layers, whose outputs are summed over n ranks,
            set it to 1 / n.
        multiply: function from (x, weight, bias) to the result: `F.linear`, or a matmul with a
            weight in a different encoding.
        stacked_matrices: as in `Experts`, if the weight is a stack of several matrices.
    """

    weight: nn.Parameter  # pyright: ignore[reportIncompatibleVariableOverride]
    stacked_matrices: dict[str, tuple[int, ...]]
    bias_scale: float = 1.0
    multiply: Callable[..., torch.Tensor] = staticmethod(F.linear)

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, std: float = 0.02
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.std = std

    def reset_parameters(self) -> None:
        """Do nothing: values come from `declare_sources`."""

    def split_parameters(self, dim: int) -> list[nn.Parameter]:
        """Return the parameters that are split if the weight is split along `dim` (0: output, 1:
        input).
        """
        return [self.weight] if dim == 1 or self.bias is None else [self.weight, self.bias]

    def declare_sources(self) -> dict[str, Source]:
        sources: dict[str, Source] = {"weight": Init(Normal(std=self.std))}
        return sources if self.bias is None else sources | {"bias": Init(Zeros())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else local_tensor(self.bias) * self.bias_scale
        return self.multiply(x, local_tensor(self.weight), bias)


def project_each(x: torch.Tensor, *linears: Linear) -> tuple[torch.Tensor, ...]:
    """Return the projections of x; one operator computes all layers that consist of a weight
    alone.
    """
    is_plain = not torch.compiler.is_compiling() and all(
        type(linear) is Linear
        and linear.bias is None
        and linear.multiply is F.linear
        and not linear._forward_hooks
        for linear in linears
    )
    if is_plain:
        return linear_each(x, *(local_tensor(linear.weight) for linear in linears))
    return tuple(linear(x) for linear in linears)


class Embedding(nn.Embedding):
    """Token embedding, weight (V, D), initialized N(0, std).

    The row of `padding_idx`, if it is given, gets no gradient, and is initialized with 0, as in
    transformers.

    Attributes:
        look_up: function of (tokens, weight, padding_idx) that returns rows: `F.embedding`, or a
            lookup in this rank's part of the weight.
    """

    weight: nn.Parameter  # pyright: ignore[reportIncompatibleVariableOverride]
    look_up: Callable[..., torch.Tensor] = staticmethod(F.embedding)

    def __init__(
        self, vocab_size: int, hidden_size: int, *, std: float, padding_idx: int | None = None
    ) -> None:
        super().__init__(vocab_size, hidden_size, padding_idx)
        self.std = std

    def reset_parameters(self) -> None:
        """Do nothing: values come from `declare_sources`."""

    def declare_sources(self) -> dict[str, Source]:
        return {"weight": Init(Normal(std=self.std, zero_row=self.padding_idx))}

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return self.look_up(tokens_BS, local_tensor(self.weight), self.padding_idx)


class RMSNorm(nn.Module):
    """RMSNorm with the weight `offset + weight`, which is initialized with 1."""

    def __init__(self, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.offset = eps, offset

    def declare_sources(self) -> dict[str, Source]:
        return {"weight": Init(Constant(value=1.0 - self.offset))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, local_tensor(self.weight), self.eps, self.offset)


class ResidualNorm(RMSNorm):
    """RMSNorm of the sum of the hidden states and the update of the previous block."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: torch.Tensor, update: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum (x if `update` is None) and its norm."""
        return add_rms_norm(x, update, local_tensor(self.weight), self.eps, self.offset)


class SplitRMSNorm(RMSNorm):
    """RMSNorm over `dim` values. With tensor parallelism a rank holds a part of values and weights.

    Attributes:
        sum: sums the squares over the ranks; None: this rank has all values.
    """

    sum: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.dim = dim

    def split_parameters(self, dim: int) -> list[nn.Parameter]:
        return [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sum is None:
            return super().forward(x)
        x_wide = x.to(wide_dtype(x))
        mean = self.sum(x_wide.square().sum(-1, keepdim=True)) / self.dim
        return (x_wide * (mean + self.eps).rsqrt() * local_tensor(self.weight)).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary frequencies `inv_freq` (rotary_dim / 2,), computed from the configuration, float32
    with every dtype of the model.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer(
            "inv_freq", torch.empty(config.rotary_dim // 2, dtype=torch.float32), persistent=False
        )

    def declare_sources(self) -> dict[str, Source]:
        def rotary_frequencies() -> torch.Tensor:
            return inverse_frequencies(
                self.config.rotary_dim, self.config.rope_theta, self.config.rope_scaling
            )

        return {"inv_freq": Compute(rotary_frequencies, dtype=torch.float32)}

    def forward(
        self, positions_BS: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaling = self.config.rope_scaling
        return rope_cos_sin(
            self.inv_freq,
            positions_BS,
            dtype,
            1.0 if scaling is None else scaling.attention_scaling,
        )


class Recomputable(nn.Module):
    """A module with a region that may run again in backward.

    Attributes:
        recompute: calls its first argument, the function of the region, on the remaining ones, now
            and again in backward. None: the region runs once.
    """

    recompute: Callable[..., torch.Tensor] | None = None

    @property
    def saves_memory(self) -> bool:
        """True if recomputing the cheap operators of the region saves memory."""
        return True

    def run(self, region: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        return region(*args) if self.recompute is None else self.recompute(region, *args)


class FeedForward(Recomputable, Part):
    """Dense SwiGLU: `down(silu(gate(x)) * up(x))`."""

    splits: ClassVar = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}

    def __init__(self, config: ModelConfig, intermediate_size: int | None = None) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        std = config.initializer_range
        intermediate_size = intermediate_size or config.intermediate_size
        self.gate_proj = Linear(hidden_size, intermediate_size, std=std)
        self.up_proj = Linear(hidden_size, intermediate_size, std=std)
        self.down_proj = Linear(intermediate_size, hidden_size, std=std)

    @property
    def saves_memory(self) -> bool:
        """True if this rank's inner width exceeds the width of the result."""
        inside, outside = (
            local_tensor(linear.weight).shape[0] for linear in (self.up_proj, self.down_proj)
        )
        return inside > outside

    def forward(self, x: torch.Tensor, context: Any = None, cache: Any = None) -> torch.Tensor:
        return self.run(self.compute, x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu_apart(*project_each(x, self.gate_proj, self.up_proj)))


class OutputHead(Linear):
    """Projection to the vocabulary, weight (V, D). With labels it computes the loss, and never
    holds all logits.

    Attributes:
        cross_entropy: `linear_cross_entropy`, or its variant that reduces over ranks if the
            vocabulary is split.
        chunk_tokens: number of tokens that are projected at a time.
        tied: the weight belongs to the embedding, which declares its source.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, std: float, tied: bool) -> None:
        super().__init__(hidden_size, vocab_size, std=std)
        self.cross_entropy: Callable[..., torch.Tensor] = linear_cross_entropy
        self.chunk_tokens = 1024
        self.tied = tied

    def declare_sources(self) -> dict[str, Source]:
        return {} if self.tied else super().declare_sources()

    def forward(
        self,
        hidden_BSD: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        reduction: str | Callable[..., torch.Tensor] = "sum",
        select: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits (B, S, V); with labels, the sum of the token losses, a float32 scalar, or
        every token loss (B, S, ...), as `reduction` says.

        `select` selects the hidden states that are projected, such as the last one of a prompt.
        """
        weight_VD = local_tensor(self.weight)
        if select is not None:
            hidden_BSD = select(hidden_BSD)
        if labels_BS is None:
            return F.linear(hidden_BSD, weight_VD)
        losses = self.cross_entropy(
            hidden_BSD.flatten(0, 1),
            weight_VD,
            labels_BS.flatten(),
            self.chunk_tokens,
            reduction=reduction,
        )
        # Cloned: FSDP2 does not accept a view as a module's result.
        return losses if reduction == "sum" else losses.unflatten(0, labels_BS.shape).clone()
