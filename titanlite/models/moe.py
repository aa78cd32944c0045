"""Mixture of experts: router, experts, and the seam where expert parallelism plugs in.

A token's way: `Router` scores it and picks top_k experts; the dispatcher groups the (token, expert) rows by expert,
on this rank or across ranks; `Experts` runs one grouped GEMM pair over all groups; the dispatcher brings the rows back
and sums them per token in a fixed order. The router's weight of a row is folded into SwiGLU's result, so that the
way back is a plain sum.

Shapes: B batch, S sequence, T = B * S tokens, D hidden, E experts, k experts per token, R = T * k rows, I expert width.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from titanlite.config.model import ModelConfig
from titanlite.materialize.recipes import Normal, Zeros
from titanlite.materialize.sources import Init, Source
from titanlite.models.layers import FeedForward
from titanlite.ops import group_by_expert, grouped_gemm, local_tensor, permute_tokens, swiglu, unpermute_sum
from titanlite.ops.grouped_gemm import GroupedGemmBackend
from titanlite.ops.matmul import wide_linear
from titanlite.ops.moe_experts import Travel, moe_experts


class Routing(NamedTuple):
    """The router's decision for each token."""

    topk_scores_Tk: torch.Tensor  # weight of each chosen expert, float32
    topk_expert_ids_Tk: torch.Tensor  # chosen experts, int64
    aux_loss: torch.Tensor | None  # balance losses, summed over the tokens; None when their coefficients are 0


class ExpertCounter(Protocol):
    """Rows that one layer's experts got in the latest forward in training mode, on this rank."""

    @property
    def tokens_per_expert(self) -> torch.Tensor: ...  # (E,) int64, routed rows of this rank's valid tokens
    @property
    def chosen_rows(self) -> torch.Tensor | None: ...  # (E,) int64, chosen by its tokens, with padding; None: unknown
    @property
    def row_ends(self) -> torch.Tensor | None: ...  # int32 end of the rows that each expert here got; None: unknown
    @property
    def first_expert(self) -> int: ...  # number of the first expert on this rank


class Router(nn.Module):
    """Scores in float32, group-limited top-k, selection biased by `expert_bias`, weights from the unbiased scores.

    Softmax scores as in Qwen3-MoE, or sigmoid scores as in DeepSeek-V3 (arXiv:2412.19437, eq. 12 to 16).
    """

    expert_bias: torch.Tensor  # (E,) float32, saved; moved by `optim.expert_bias.ExpertBiasBalancer`, not by gradients
    # (E,) int64, not saved; routed rows of the latest forward in training mode. It is overwritten, never added to, so
    # that a second run under activation checkpointing changes nothing.
    tokens_per_expert: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.empty(config.num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.empty(config.num_experts, dtype=torch.int64), persistent=False)
        self.aux_loss_coeff = 0.0
        self.z_loss_coeff = 0.0
        # Each sums a (B, E) tensor over ranks that hold other parts of the same sequences (cp, tp); applied in order.
        self.sequence_sums: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def declare_sources(self) -> dict[str, Source]:
        return {
            "weight": Init(Normal(std=self.config.initializer_range)),
            "expert_bias": Init(Zeros(), may_be_absent=True, dtype=torch.float32),
            "tokens_per_expert": Init(Zeros()),
        }

    def forward(self, x_BSD: torch.Tensor, valid_BS: torch.Tensor | None = None) -> Routing:
        """Route every token; tokens where `valid_BS` is False are routed, but neither counted nor balanced."""
        config = self.config
        logits_BSE = wide_linear(x_BSD, local_tensor(self.weight))
        scores_BSE = logits_BSE.softmax(dim=-1) if config.score_func == "softmax" else logits_BSE.sigmoid()
        scores_TE = scores_BSE.flatten(0, 1)
        choice_TE = (scores_TE + self.expert_bias).detach()
        if config.num_limited_groups < config.num_expert_groups:
            choice_TE = self._limit_groups(choice_TE)
        topk_expert_ids_Tk = choice_TE.topk(config.top_k, dim=-1).indices
        topk_scores_Tk = scores_TE.gather(-1, topk_expert_ids_Tk)
        if config.norm_topk_prob:
            topk_scores_Tk = topk_scores_Tk / (topk_scores_Tk.sum(dim=-1, keepdim=True) + 1e-20)
        topk_scores_Tk = topk_scores_Tk * config.routed_scaling_factor

        aux_loss = None
        if self.training:
            batch, seq_len = x_BSD.shape[:2]
            counts_BE = self._count(topk_expert_ids_Tk.view(batch, seq_len, -1), valid_BS)
            self.tokens_per_expert.copy_(counts_BE.sum(dim=0))
            if self.aux_loss_coeff or self.z_loss_coeff:
                aux_loss = self._aux_loss(logits_BSE, scores_BSE, counts_BE, valid_BS)
        return Routing(topk_scores_Tk, topk_expert_ids_Tk, aux_loss)

    def _limit_groups(self, choice_TE: torch.Tensor) -> torch.Tensor:
        """Keep the experts of the best groups, judged by the sum of their two best scores."""
        config = self.config
        grouped_TGe = choice_TE.unflatten(-1, (config.num_expert_groups, -1))
        best_TG = grouped_TGe.topk(min(2, grouped_TGe.shape[-1]), dim=-1).values.sum(dim=-1)
        kept_Tg = best_TG.topk(config.num_limited_groups, dim=-1).indices
        allowed_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, kept_Tg, True)
        return grouped_TGe.masked_fill(~allowed_TG.unsqueeze(-1), float("-inf")).flatten(1)

    def _count(self, ids_BSk: torch.Tensor, valid_BS: torch.Tensor | None) -> torch.Tensor:
        """Count each expert's valid rows per sequence, (B, E) int64: bfloat16 counts to 256 only, float32 to 16.7 M."""
        ones_BSk = torch.ones_like(ids_BSk)
        if valid_BS is not None:
            ones_BSk = ones_BSk * valid_BS.unsqueeze(-1)
        counts_BE = torch.zeros(ids_BSk.shape[0], self.config.num_experts, dtype=torch.int64, device=ids_BSk.device)
        return counts_BE.scatter_add_(1, ids_BSk.flatten(1), ones_BSk.flatten(1))

    def _aux_loss(self, logits_BSE, scores_BSE, counts_BE, valid_BS) -> torch.Tensor:
        """Sequence-wise balance loss (arXiv:2412.19437, eq. 17 to 20) and z-loss (arXiv:2202.08906, eq. 5).

        Both are means over tokens; here they are sums over this rank's tokens, to be divided by the global number of
        tokens together with the cross entropy.
        """
        weight_BS1 = 1.0 if valid_BS is None else valid_BS.unsqueeze(-1).to(scores_BSE.dtype)
        total = scores_BSE.new_zeros(())
        if self.aux_loss_coeff:
            for sum_over_ranks in self.sequence_sums:
                counts_BE = sum_over_ranks(counts_BE)
            rows_BE = counts_BE.to(scores_BSE.dtype)
            load_BE = rows_BE * self.config.num_experts / rows_BE.sum(dim=-1, keepdim=True).clamp(min=1)
            share_BSE = scores_BSE / scores_BSE.sum(dim=-1, keepdim=True) * weight_BS1
            total = total + self.aux_loss_coeff * (load_BE * share_BSE.sum(dim=1)).sum()
        if self.z_loss_coeff:
            total = total + self.z_loss_coeff * (logits_BSE.logsumexp(dim=-1, keepdim=True).square() * weight_BS1).sum()
        return total


class Experts(nn.Module):
    """All experts of a layer, laid out as in Hugging Face's models: gate_up_proj (E, 2 I, D), down_proj (E, D, I).

    Attributes:
        first_expert: number of the first expert on this rank; 0 unless expert parallelism splits them.
        multiply: multiplies grouped rows by quantized weights, transposed: (rows, weight, offsets, backend) -> rows.
            None: the weights are stored as above, and one fused operator computes all.
        read: returns the local tensor of a parameter to multiply by; FSDP may set `ExpertCopies`.
    """

    stacked_matrices: ClassVar[dict[str, int]] = {"gate_up_proj": 2}
    """Number of matrices stacked in the rows of a parameter, for optimizers that treat each by itself (Muon)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))
        self.std = config.initializer_range
        self.grouped_gemm_backend: GroupedGemmBackend = "auto"
        self.first_expert = 0
        self.multiply: Callable[..., torch.Tensor] | None = None
        self.read: Callable[[nn.Parameter], torch.Tensor] = local_tensor

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks together."""
        return self.gate_up_proj.shape[0]

    def declare_sources(self) -> dict[str, Source]:
        return {"gate_up_proj": Init(Normal(std=self.std)), "down_proj": Init(Normal(std=self.std))}

    def forward(
        self,
        x_TD: torch.Tensor,
        weight_R: torch.Tensor,
        token_R: torch.Tensor,
        rows_Tk: torch.Tensor,
        offsets_E: torch.Tensor,
        travel: Travel | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' results per token, (T, D); arguments as in `moe_experts`."""
        if self.is_fused:
            weights, backend = (self.read(self.gate_up_proj), self.read(self.down_proj)), self.grouped_gemm_backend
            return moe_experts(x_TD, *weights, weight_R, token_R, rows_Tk, offsets_E, backend, travel)
        gate_up_R2I = self.project("gate_up_proj", permute_tokens(x_TD, token_R, rows_Tk), offsets_E)
        y_RD = self.project("down_proj", swiglu(gate_up_R2I, weight_R), offsets_E)
        return unpermute_sum(y_RD, token_R, rows_Tk)

    @property
    def is_fused(self) -> bool:
        """True: one operator computes both projections. False: `project` computes each."""
        return self.multiply is None

    def project(self, name: str, x: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        """Return the grouped rows `x` times the weight `name`, transposed."""
        weight = self.read(getattr(self, name))
        if self.multiply is None:
            return grouped_gemm(x, weight.to(x.dtype).mT, offsets_E, self.grouped_gemm_backend)
        return self.multiply(x, weight, offsets_E, self.grouped_gemm_backend)


# Sends every token to its experts and back: (experts, x (T, D), topk_scores (T, k), topk_expert_ids (T, k)) -> the sums
# (T, D), and the end of each expert's rows on this rank, int32.
TokenDispatcher = Callable[[Experts, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def is_routed(name: str) -> bool:
    """Return True for parameters of routed experts, by their name in any model; False for those of shared ones."""
    return ".experts." in name


def count_rows(expert_ids_Tk: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the rows that chose each expert, (E,) int64."""
    ids_R = expert_ids_Tk.flatten()
    return ids_R.new_zeros(num_experts).scatter_add_(0, ids_R, torch.ones_like(ids_R))


def dispatch_locally(
    experts: Experts, x_TD: torch.Tensor, topk_scores_Tk: torch.Tensor, topk_expert_ids_Tk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `TokenDispatcher` for experts that are all on this rank (or all-gathered by FSDP)."""
    order_R, rows_Tk, counts_E = group_by_expert(topk_expert_ids_Tk, experts.num_experts)
    token_R = order_R // topk_expert_ids_Tk.shape[1]
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    weight_R = topk_scores_Tk.flatten().index_select(0, order_R)
    return experts(x_TD, weight_R, token_R, rows_Tk, offsets_E), offsets_E


class MoE(nn.Module):
    """Mixture-of-experts layer: routed experts plus optional shared experts. It is an `ExpertCounter`.

    Attributes:
        dispatch: token dispatcher; expert parallelism replaces it.
        chosen_rows, row_ends: as in `ExpertCounter`. Overwritten, never added to, as the router's counts are.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts: FeedForward | None = None
        if config.num_shared_experts:
            width = config.num_shared_experts * config.moe_intermediate_size
            self.shared_experts = FeedForward(config.hidden_size, width, std=config.initializer_range)
        self.dispatch: TokenDispatcher = dispatch_locally
        self.chosen_rows: torch.Tensor | None = None
        self.row_ends: torch.Tensor | None = None

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """Counts of the router."""
        return self.gate.tokens_per_expert

    @property
    def first_expert(self) -> int:
        """Number of the first expert on this rank."""
        return self.experts.first_expert

    def forward(
        self, x_BSD: torch.Tensor, valid_BS: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (B, S, D) and the balance losses of this layer, summed over tokens, or None."""
        scores_Tk, expert_ids_Tk, aux_loss = self.gate(x_BSD, valid_BS)
        # Before the routed experts, so that a recomputation can stop after these, without the all-to-all back.
        shared_BSD = None if self.shared_experts is None else self.shared_experts(x_BSD)
        out_TD, row_ends = self.dispatch(self.experts, x_BSD.flatten(0, 1), scores_Tk, expert_ids_Tk)
        if self.training:
            self.chosen_rows = count_rows(expert_ids_Tk, self.gate.config.num_experts)
            self.row_ends = row_ends
        out_BSD = out_TD.view_as(x_BSD)
        return out_BSD if shared_BSD is None else out_BSD + shared_BSD, aux_loss
