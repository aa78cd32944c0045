"""Aux-loss-free load balancing (arXiv:2408.15664): experts that got too few tokens become easier to choose."""

import torch
import torch.distributed as dist

from titanlite.logger import logger
from titanlite.models.build import AnyModel


class ExpertBiasBalancer:
    """Counts routed tokens per layer and expert over a step, and moves every router's `expert_bias` once per step.

    Attributes:
        counts: (layers, E) int64 on the model's device, this rank's rows since the last `step`.
    """

    def __init__(self, model: AnyModel, update_rate: float) -> None:
        self._routers = [moe.gate for moe in model.moe_layers().values()]
        self._update_rate = update_rate
        if self._routers:
            self.counts = torch.zeros_like(self._stacked())
        frozen = sum(not router.weight.requires_grad for router in self._routers)
        if frozen and update_rate:
            logger.info("moe: %d of %d routers are frozen, and so is their expert_bias", frozen, len(self._routers))

    def _stacked(self) -> torch.Tensor:
        return torch.stack([router.tokens_per_expert for router in self._routers])

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the counts of the latest forward; call once per micro-batch, after its backward or its forward.

        The routers overwrite their counts, so recomputation in backward does not count twice.
        """
        if self._routers:
            self.counts += self._stacked()

    @torch.no_grad()
    def step(self, finite: torch.Tensor) -> torch.Tensor | None:
        """Update the biases by `rate * sign(mean - count)`, centred; return the global counts (layers, E), or None.

        Only differences of biases matter to a top-k, so each update is made to sum to zero. Otherwise the common part
        grows without bound where more experts are below the mean than above, and eats float32's precision.

        Like the weights, the biases stay as they are in a step whose bool scalar `finite` is False, and always where
        the router's weight is frozen.

        Integer arithmetic throughout: bfloat16 counts once flipped the sign of the update.

        Collectives: one all-reduce over the default process group for all layers; every rank must call.
        """
        if not self._routers:
            return None
        dist.all_reduce(self.counts)
        counts = self.counts.clone()
        self.counts.zero_()
        if self._update_rate:
            deficit = counts.sum(dim=1, keepdim=True) - counts * counts.shape[1]
            delta = deficit.sign().to(torch.float32)
            delta = (delta - delta.mean(dim=1, keepdim=True)) * (self._update_rate * finite.to(delta.device))
            for router, router_delta in zip(self._routers, delta, strict=True):
                if router.weight.requires_grad:
                    router.expert_bias += router_delta
        return counts
