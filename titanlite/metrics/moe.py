"""Health of the MoE layers in numbers: how even the load is, where the selection biases lie, whether rows get lost."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MoEState:
    """What the MoE layers did in the latest step.

    Attributes:
        tokens_per_expert: rows of valid tokens, (layers, E), over all ranks, any device.
        bias_range: smallest and largest `expert_bias` of each layer, (2, layers); None for routers without.
        row_errors: rows dropped and rows that came twice since the previous point, (2, layers), over all ranks; None
            where no dispatcher tells.
    """

    tokens_per_expert: Tensor
    bias_range: Tensor | None
    row_errors: Tensor | None


def describe_moe(state: MoEState) -> dict[str, list[float]]:
    """Values per layer by metric name. Synchronizes. A layer without tokens has nan for its load."""
    counts = state.tokens_per_expert.detach().to("cpu", torch.float64)
    share = counts / counts.sum(dim=1, keepdim=True)
    # Entropy over that of an even load: 1 is balanced, 0 is one expert that gets all.
    entropy = torch.special.entr(share).sum(dim=1) / math.log(max(counts.shape[1], 2))
    values = {
        "moe/load_max_over_mean": counts.amax(dim=1) / counts.mean(dim=1),
        "moe/load_entropy": entropy,
        "moe/idle_experts": (counts == 0).to(torch.float64).mean(dim=1),
    }
    if state.bias_range is not None:
        values["moe/expert_bias_min"], values["moe/expert_bias_max"] = state.bias_range.detach().to(
            "cpu", torch.float64
        )
    if state.row_errors is not None:
        values["moe/dropped_rows"], values["moe/duplicated_rows"] = state.row_errors.detach().to("cpu", torch.float64)
    return {name: value.tolist() for name, value in values.items()}
