"""Mixture of experts: router, experts, and the dispatcher, which expert parallelism replaces.

Path of a token: `Router` scores it and selects top_k experts. The dispatcher groups the (token,
expert) rows by expert, on this rank or across ranks. `Experts` runs one pair of grouped GEMMs over
all groups. The dispatcher returns the rows and sums them per token in a fixed order. SwiGLU's
result is multiplied by the router's weight of the row, so that the return is a plain sum.

Shapes: B batch, S sequence, T = B * S tokens, D hidden, E experts, k experts per token, R = T * k
rows, I expert width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from titanlite.config.model import ModelConfig
from titanlite.materialize.sources import Init, Normal, Source, Zeros
from titanlite.models.interface import Context, Part, SequencePart
from titanlite.models.layers import FeedForward, Linear, Recomputable
from titanlite.ops import (
    add_expert_bias,
    clamped_swiglu,
    grouped_gemm,
    local_tensor,
    permute_tokens,
    swiglu,
    unpermute_sum,
)
from titanlite.ops.matmul import GroupedGemmBackend, wide_linear
from titanlite.ops.moe_experts import Exchange, moe_experts
from titanlite.ops.recompute import once_per_forward
from titanlite.ops.routing import WeighExperts, choose_experts, group_by_expert


class Routing(NamedTuple):
    """The router's decision for each token."""

    topk_scores_Tk: Tensor  # weight of each chosen expert, float32
    topk_expert_ids_Tk: Tensor  # chosen experts, int64
    # balance losses, summed over the tokens; None when their coefficients are 0
    aux_loss: Tensor | None


class ExpertCounter(Protocol):
    """Counter of the rows that a layer's experts got in this rank's latest training forward."""

    tokens_per_expert: Tensor  # (E,) int64, routed rows of this rank's valid tokens


class Router(nn.Module):
    """Scores in float32, group-limited top-k, selection biased by `expert_bias`, weights from the
    unbiased scores.

    Scores are softmax as in Qwen3-MoE, or sigmoid as in DeepSeek-V3 (arXiv:2412.19437, eq. 12 to
    16). The router is an `ExpertCounter`.
    """

    # (E,) float32, saved; updated by `optim.expert_bias.ExpertBiasBalancer`, not by gradients
    expert_bias: Tensor
    # (E,) int64, not saved; routed rows of the latest forward in training mode. It is overwritten,
    # never added to, so that a second run under activation checkpointing changes nothing.
    tokens_per_expert: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        has_bias = config.biased_experts
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if has_bias else None
        self.register_buffer("expert_bias", torch.empty(config.num_experts, dtype=torch.float32))
        self.register_buffer(
            "tokens_per_expert",
            torch.empty(config.num_experts, dtype=torch.int64),
            persistent=False,
        )
        self.aux_loss_coeff = 0.0
        self.z_loss_coeff = 0.0
        # The MoE layer shares its list, which describes how sequences are split over ranks (cp,
        # tp).
        self.sequence_parts: list[SequencePart] = []

    def declare_sources(self) -> dict[str, Source]:
        normal = Init(Normal(std=self.config.initializer_range))
        return {
            "weight": normal,
            **({} if self.bias is None else {"bias": normal}),
            "expert_bias": Init(Zeros(), may_be_absent=True, dtype=torch.float32),
            "tokens_per_expert": Init(Zeros()),
        }

    def forward(self, x_BSD: Tensor, valid_BS: Tensor | None = None) -> Routing:
        """Route every token. Tokens with `valid_BS` False are routed, too, but neither counted nor
        balanced.
        """
        config = self.config
        valid_BS = None if valid_BS is None else valid_BS.contiguous()
        logits_BSE = wide_linear(x_BSD, local_tensor(self.weight))
        if self.bias is not None:
            logits_BSE = logits_BSE + local_tensor(self.bias)
        chosen = once_per_forward(lambda: self._choose(logits_BSE.detach(), valid_BS))
        topk_scores_Tk, aux_loss = WeighExperts.apply(config, logits_BSE, valid_BS, *chosen)
        if config.routed_scaling_factor != 1.0:
            topk_scores_Tk = topk_scores_Tk * config.routed_scaling_factor
        if self.training and self.z_loss_coeff:  # arXiv:2202.08906, eq. 5
            squares_BS = logits_BSE.logsumexp(dim=-1).square()
            z_loss = (
                self.z_loss_coeff
                * (squares_BS if valid_BS is None else squares_BS * valid_BS).sum()
            )
            aux_loss = z_loss if aux_loss is None else aux_loss + z_loss
        return Routing(topk_scores_Tk, chosen[1], aux_loss)

    def _choose(self, logits_BSE: Tensor, valid_BS: Tensor | None) -> tuple[Any, ...]:
        """Return weights and ids of the chosen experts, (T, k), and for the balance loss the scaled
        load of each expert and the sum of its normalized scores, (B, E) or None.
        """
        config = self.config
        is_balanced = self.training and bool(self.aux_loss_coeff)
        weights_Tk, ids_Tk, counts_BNE, sums_BNE = choose_experts(
            logits_BSE,
            self.expert_bias,
            valid_BS,
            config,
            counts=self.training,
            sums=is_balanced,
        )
        if self.training:
            torch.sum(counts_BNE, (0, 1), out=self.tokens_per_expert)
        if not is_balanced:
            return weights_Tk, ids_Tk, None, None
        counts_BE = counts_BNE.sum(1)
        for part in self.sequence_parts:
            counts_BE = part.sum(counts_BE)
        factor = self.aux_loss_coeff * config.num_experts
        load_BE = counts_BE * factor / counts_BE.sum(-1, keepdim=True).clamp(min=1)
        return weights_Tk, ids_Tk, load_BE, sums_BNE.sum(1)


class Experts(Recomputable):
    """All experts of a layer, with the layout of Hugging Face's models.

    gate_up_proj is (E, 2 I, D) with the rows of gate before the rows of up, and down_proj is (E, D,
    I). Experts with biases (E, 2 I) and (E, D) have alternating rows of gate and up.

    Attributes:
        is_biased: experts have biases, and a clamped SwiGLU.
        stacked_matrices: for each parameter whose rows belong to several matrices, the number of
            consecutive rows of each matrix in turn; this pattern repeats. Optimizers that treat
            each matrix separately read it (Muon).
        multiply: for quantized weights: function from (rows, weight, offsets, backend) to the rows
            times the transposed weights. None: weights are not quantized.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_experts = config.num_experts
        hidden = config.hidden_size
        inner = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))
        self.is_biased = config.biased_experts
        self.stacked_matrices = {"gate_up_proj": (1, 1) if self.is_biased else (inner, inner)}
        if self.is_biased:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * inner))
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden))
        self.std = config.initializer_range
        self.grouped_gemm_backend: GroupedGemmBackend = "auto"
        self.multiply: Callable[..., Tensor] | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks together."""
        return self.gate_up_proj.shape[0]

    def declare_sources(self) -> dict[str, Source]:
        names = "gate_up_proj", "down_proj"
        sources: dict[str, Source] = {name: Init(Normal(std=self.std)) for name in names}
        if self.is_biased:
            sources |= {f"{name}_bias": Init(Zeros()) for name in names}
        return sources

    def forward(
        self,
        x_TD: Tensor,
        weight_R: Tensor,
        token_R: Tensor,
        rows_Tk: Tensor,
        offsets_E: Tensor,
        exchange: Exchange | None = None,
    ) -> Tensor:
        """Return the weighted sum of the experts' results per token, (T, D); arguments as in
        `moe_experts`.
        """
        if self.is_fused:
            return moe_experts(
                x_TD,
                local_tensor(self.gate_up_proj),
                local_tensor(self.down_proj),
                weight_R,
                token_R,
                rows_Tk,
                offsets_E,
                self.grouped_gemm_backend,
                exchange,
            )
        return self.run(self.compute, x_TD, weight_R, token_R, rows_Tk, offsets_E)

    def compute(
        self, x_TD: Tensor, weight_R: Tensor, token_R: Tensor, rows_Tk: Tensor, offsets_E: Tensor
    ) -> Tensor:
        gate_up_R2I = self.project(
            "gate_up_proj", permute_tokens(x_TD, token_R, rows_Tk), offsets_E
        )
        if self.is_biased:
            bias_E2I = local_tensor(self.gate_up_proj_bias)
            bias_ED = local_tensor(self.down_proj_bias)
            gate_up_R2I = add_expert_bias(gate_up_R2I, bias_E2I, offsets_E)
            y_RD = self.project("down_proj", clamped_swiglu(gate_up_R2I, weight_R), offsets_E)
            y_RD = add_expert_bias(y_RD, bias_ED, offsets_E, weight_R)
        else:
            y_RD = self.project("down_proj", swiglu(gate_up_R2I, weight_R), offsets_E)
        return unpermute_sum(y_RD, token_R, rows_Tk)

    @property
    def saves_memory(self) -> bool:
        return not self.is_fused

    @property
    def is_fused(self) -> bool:
        """True if one operator computes both projections; False if `project` computes each."""
        return self.multiply is None and not self.is_biased

    def project(self, name: str, x: Tensor, offsets_E: Tensor) -> Tensor:
        """Return the grouped rows `x` times the weight `name`, transposed."""
        weight = local_tensor(getattr(self, name))
        if self.multiply is None:
            return grouped_gemm(x, weight.to(x.dtype).mT, offsets_E, self.grouped_gemm_backend)
        return self.multiply(x, weight, offsets_E, self.grouped_gemm_backend)


# A function (experts, x (T, D), topk_scores (T, k), topk_expert_ids (T, k)) that sends every token
# to its experts and returns the sums of the results (T, D).
TokenDispatcher = Callable[[Experts, Tensor, Tensor, Tensor], Tensor]


def is_routed(name: str) -> bool:
    """Return True for the names of routed experts' parameters in any model, False for shared
    experts.
    """
    return ".experts." in name


def dispatch_locally(
    experts: Experts, x_TD: Tensor, topk_scores_Tk: Tensor, topk_expert_ids_Tk: Tensor
) -> Tensor:
    """Implement `TokenDispatcher` for experts that are all on this rank (or all-gathered by
    FSDP).
    """
    order_R, token_R, rows_Tk, ends_E = once_per_forward(
        lambda: group_by_expert(topk_expert_ids_Tk, experts.num_experts)
    )
    weight_R1 = permute_tokens(topk_scores_Tk.reshape(-1, 1), order_R, rows_Tk.view(-1, 1))
    return experts(x_TD, weight_R1.flatten(), token_R, rows_Tk, ends_E)


class MoE(Part):
    """Mixture-of-experts layer: routed experts plus optional shared experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.gate.sequence_parts = self.sequence_parts
        self.experts = Experts(config)
        self.shared_experts: FeedForward | None = None
        if config.num_shared_experts:
            width = config.num_shared_experts * config.moe_intermediate_size
            self.shared_experts = FeedForward(config, width)
        self.shared_expert: FeedForward | None = None
        if width := config.shared_expert_intermediate_size:
            self.shared_expert = FeedForward(config, width)
            self.shared_expert_gate = Linear(config.hidden_size, 1, std=config.initializer_range)
        self.dispatch: TokenDispatcher = dispatch_locally  # expert parallelism replaces it

    def forward(
        self, x_BSD: Tensor, context: Context | None = None, cache: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (B, S, D) and the balance losses of this layer, summed over tokens, or None."""
        valid_BS = None if context is None else context.valid_BS
        if valid_BS is not None:
            for part in self.sequence_parts:
                valid_BS = part.own(valid_BS)
        scores_Tk, expert_ids_Tk, aux_loss = self.gate(x_BSD, valid_BS)
        # Shared experts come first, so that a recomputation can stop after the routed experts,
        # without the all-to-all back.
        shared_BSD = None if self.shared_experts is None else self.shared_experts(x_BSD)
        if self.shared_expert is not None:
            shared_BSD = self.shared_expert(x_BSD) * self.shared_expert_gate(x_BSD).sigmoid()
        out_TD = self.dispatch(self.experts, x_BSD.flatten(0, 1), scores_Tk, expert_ids_Tk)
        out_BSD = out_TD.view_as(x_BSD)
        return out_BSD if shared_BSD is None else out_BSD + shared_BSD, aux_loss
