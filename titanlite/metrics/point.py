"""`StepPoint`: what one log step knows, and the named values that it becomes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.base.timers import COMMUNICATION, FSDP_COLLECTIVES

# Always written, so that a plot has no gaps; the others only where a device has them.
_PHASES = ("data", "forward", "backward", "optimizer", "other", COMMUNICATION)


class Largest(NamedTuple):
    """The largest value of some steps, and the step that had it."""

    value: float
    step: int


def find_largest(values: Sequence[float], last_step: int) -> Largest:
    """Return the largest of the `values` of the steps up to `last_step`; the first that is not finite, if any is not.

    Raises ValueError: there are no values.
    """
    place = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
    if place is None:
        place = max(range(len(values)), key=values.__getitem__)
    return Largest(values[place], last_step - len(values) + 1 + place)


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
        low, high = state.bias_range.detach().to("cpu", torch.float64)
        values |= {"moe/expert_bias_min": low, "moe/expert_bias_max": high}
    if state.row_errors is not None:
        values["moe/dropped_rows"], values["moe/duplicated_rows"] = state.row_errors.detach().to("cpu", torch.float64)
    return {name: value.tolist() for name, value in values.items()}


@dataclass(frozen=True)
class StepPoint:
    """One point of training.

    Attributes:
        step: optimizer steps done.
        loss: mean loss per token over all ranks and the steps since the previous point.
        grad_norm, lr: total 2-norm of the gradients of this step before clipping, and its learning rate.
        tokens: tokens in the rows of all ranks together since the previous point, padding included: what is computed.
        seconds: wall time since the previous point, without validations and saves.
        num_padding: how many of `tokens` are padding.
        slowest_s: time of the longest step since the previous point on this rank; None: it was not measured.
        largest: the largest values of single steps since the previous point, by metric name.
        phases: seconds of `seconds` by phase on this rank, from `timers.StepTimer`.
        ranks: values of every rank by name, from `gather_ranks`; empty: nothing is known of ranks and memory.
        group_norms: 2-norm of the gradients by group of parameters.
        moe: state of the MoE layers; None for dense models.
        extra: more values, under the names that TensorBoard shall show.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    num_padding: int = 0
    slowest_s: float | None = None
    largest: Mapping[str, Largest] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    group_norms: Mapping[str, float] = field(default_factory=dict)
    moe: MoEState | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def unpadded_tokens(self) -> int:
        """Those of `tokens` that are no padding: what the model learns from."""
        return self.tokens - self.num_padding

    def values(self, steps: int, flops_per_token: int, num_ranks: int) -> dict[str, float]:
        """Return the values that need no other rank, by metric name; this point covers `steps` optimizer steps."""
        seconds = max(self.seconds, 1e-9)
        flops_per_gpu = self.tokens * flops_per_token / seconds / num_ranks
        values = {
            "loss/train": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "throughput/tokens_per_s": self.unpadded_tokens / seconds,
            "throughput/tflops_per_gpu": flops_per_gpu / 1e12,
            "data/padding": self.num_padding / max(self.tokens, 1),
            "time/step_s": seconds / steps,
        }
        values.update({name: largest.value for name, largest in self.largest.items()})
        if self.slowest_s is not None:
            values["time/step_max_s"] = self.slowest_s
        for phase in _PHASES + ((FSDP_COLLECTIVES,) if FSDP_COLLECTIVES in self.phases else ()):
            values[f"time/{phase}_s"] = self.phases.get(phase, 0.0) / steps
        values.update({f"grad_norm/{group}": norm for group, norm in self.group_norms.items()})
        return values | dict(self.extra)
