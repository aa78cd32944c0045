"""Aux-loss-free load balancing (arXiv:2408.15664): experts that got too few tokens become easier to
choose.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from titanlite.base.agree import get_rank
from titanlite.base.log import logger
from titanlite.config import AnyModelConfig, ModelConfig, TransformersConfig
from titanlite.config.schema import MoESection
from titanlite.models.families import families, family_of
from titanlite.models.interface import Model

BIAS_UPDATE_RATE = 1e-3  # from arXiv:2408.15664
AUX_LOSS_COEFF = 0.02
"""Gives the most even load among values from 0.001 to 1 at the same loss. Measured with 4 experts,
top-2, 100 steps; 0.02 and 0.1 also with the quick start's 8 experts, 30 steps.
"""


class ExpertBiasBalancer:
    """Counter of routed tokens per layer and expert over a step, which moves every router's
    `expert_bias` once per step.

    If a transformers class has no such bias, the tokens of its experts are still counted, where
    that is possible. A step adds `update_rate` to a bias, or subtracts it. `sum_over_ranks` sums a
    tensor on the model's device, in place. With pipeline stages, of `stage_size` ranks each, the
    model has the counters of this stage's layers.
    """

    def __init__(
        self,
        model: Model,
        update_rate: float,
        sum_over_ranks: Callable[[torch.Tensor], object],
        stage_size: int | None = None,
    ) -> None:
        numbers = model.moe_layer_numbers()
        counters = model.expert_counters()
        self._num_layers = len(numbers)
        # The layers of a stage are consecutive; this rank adds zeros for the layers of other
        # stages.
        start = numbers.index(next(iter(counters))) if counters else 0
        self._here = slice(start, start + len(counters))
        self._counters = list(counters.values())
        balanced = model.moe_layers()
        self._routers = [moe.gate for moe in balanced.values()]
        self._rows = [numbers.index(number) for number in balanced]  # of the routers, in `counts`
        self._update_rate = update_rate
        self._sum_over_ranks = sum_over_ranks
        self._stage_size = stage_size
        if numbers:
            device = next(buffer.device for buffer in model.buffers() if not buffer.is_meta)
            # (layers, E) int64: this rank's rows since the last `step`
            self.counts = torch.zeros(
                len(numbers), model.config.num_experts, dtype=torch.int64, device=device
            )

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the counts of the latest forward; call once per forward, after it or after its
        backward.

        The counters overwrite their counts, so recomputation in backward does not count twice.
        """
        if self._counters:
            self.counts[self._here] += torch.stack(
                [counter.tokens_per_expert for counter in self._counters]
            )

    @torch.no_grad()
    def step(self, finite: torch.Tensor) -> torch.Tensor | None:
        """Update the biases by `rate * sign(mean - count)`, centred; return the global counts
        (layers, E), or None.

        Only differences of biases matter to a top-k. Without centring, their common part grows
        without bound and uses up float32's precision. Counts are integers: with counts in bfloat16,
        the sign of an update was once wrong. Biases are unchanged if the bool scalar `finite` is
        False, or if the router's weight is frozen.

        Collectives: one sum over all ranks for all layers; every rank must call.
        """
        if not self._num_layers:
            return None
        counts = self.counts.clone()
        self._sum_over_ranks(counts)
        self.counts.zero_()
        if self._update_rate:
            deficit = counts.sum(dim=1, keepdim=True) - counts * counts.shape[1]
            delta = deficit.sign().to(torch.float32)
            delta = (delta - delta.mean(dim=1, keepdim=True)) * (
                self._update_rate * finite.to(delta.device)
            )
            for router, router_delta in zip(self._routers, delta[self._rows], strict=True):
                if router.weight.requires_grad:
                    router.expert_bias.add_(router_delta)
        return counts

    def bias_range(self) -> torch.Tensor | None:
        """Return the smallest and largest `expert_bias` of each layer, (2, layers) float32 on the
        device; None without biases.

        Collectives: with pipeline stages one sum over all ranks; every rank must call.
        """
        if not self._routers and (self._stage_size is None or not self._num_layers):
            return None
        ranges = torch.zeros(2, self._num_layers, device=self.counts.device)
        if self._routers:
            biases = torch.stack([router.expert_bias for router in self._routers])
            ranges[:, self._rows] = torch.stack(biases.aminmax(dim=1))
        if self._stage_size is not None:
            self._sum_over_ranks(ranges)
            ranges /= self._stage_size
        return ranges


def get_bias_update_rate(section: MoESection, model: Model) -> float:
    """Return the configured rate. If it is not set, a bias is trained only if the exported
    architecture can hold it.
    """
    if not model.moe_layers():
        return 0.0
    if section.expert_bias_update_rate is not None:
        return section.expert_bias_update_rate
    is_native = isinstance(model.config, ModelConfig)
    has_bias = is_native and family_of(model.config).expert_bias_key is not None
    return BIAS_UPDATE_RATE if has_bias else 0.0


def complete_balancing(
    section: MoESection,
    model: AnyModelConfig,
    before: Mapping[str, str] | None = None,
    *,
    has_weights: bool,
) -> MoESection:
    """Return `section` with the default balancing for a native model with experts and random
    weights.

    The default is the bias if the exported architecture has one, else the balance loss; with
    `has_weights` there is none. A resumed run keeps its balance loss: `before` is the identity in
    its checkpoint. A checkpoint without that entry is from a run that had no balance loss by
    default.
    """
    rate = section.expert_bias_update_rate
    coeff = section.aux_loss_coeff
    if not has_weights and isinstance(model, ModelConfig) and model.num_experts > model.top_k:
        if family_of(model).expert_bias_key is not None:
            rate = BIAS_UPDATE_RATE if rate is None else rate
        elif coeff is None and not rate:
            coeff = AUX_LOSS_COEFF
    if section.aux_loss_coeff is None and before is not None and model.num_experts:
        kept = before.get("moe.aux_loss_coeff", "0.0")
        coeff = None if kept == "None" else float(kept)
    for key, value in (("expert_bias_update_rate", rate), ("aux_loss_coeff", coeff)):
        if value is not None and getattr(section, key) is None:
            why = "the default from random weights" if before is None else "as when the run began"
            logger.info("moe: experts are balanced with moe.%s = %g, %s", key, value, why)
    return replace(section, expert_bias_update_rate=rate, aux_loss_coeff=coeff)


def advise_balancing(section: MoESection, implementation: str, model: Model) -> str:
    """Return the remedy if experts get no tokens; `implementation` is the setting of the model
    section.
    """
    routers = [moe.gate for moe in model.moe_layers().values()]
    rate = get_bias_update_rate(section, model)
    if rate and any(router.weight.requires_grad for router in routers):
        return f"Raise moe.expert_bias_update_rate, which is {rate:g}."
    if isinstance(model.config, TransformersConfig):
        if routers:
            return f"Nothing balances them: set moe.expert_bias_update_rate = {BIAS_UPDATE_RATE:g}."
        own = (
            f"transformers' {model.config.architecture} routes by itself, and no setting balances "
            "it"
        )
        if model.config.family in families() and implementation == "transformers":
            return (
                f'{own}. Set model.implementation = "native" and moe.aux_loss_coeff = '
                f"{AUX_LOSS_COEFF:g}."
            )
        return f"{own}: a native family (model.name) has moe.aux_loss_coeff."
    if section.aux_loss_coeff:
        return f"Raise moe.aux_loss_coeff, which is {section.aux_loss_coeff:g}."
    return f"Nothing balances them: set moe.aux_loss_coeff = {AUX_LOSS_COEFF:g}."


def warn_of_ignored_balancing(section: MoESection, num_experts: int) -> None:
    """Warn on rank 0 of settings that a model without experts ignores. It is not an error, so that
    families can be compared with one file.
    """
    names = ("expert_bias_update_rate", "aux_loss_coeff", "z_loss_coeff")
    given = [f"moe.{name} = {value}" for name in names if (value := getattr(section, name))]
    if given and num_experts == 0 and get_rank() == 0:
        logger.warning(
            "moe: the model has no experts to balance, so these have no effect: %s",
            ", ".join(given),
        )
