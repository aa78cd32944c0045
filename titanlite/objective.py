"""The interface between trainer and objectives, and the objective of next-token prediction."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from titanlite.data.dataset import IGNORE_INDEX, Batch
from titanlite.models.interface import Model


class ObjectiveSums(NamedTuple):
    """Sums over one batch of this rank."""

    # of units (tokens or pairs), differentiable float32; divide by the global number of units
    loss: torch.Tensor
    # balance losses of tokens; divide by the global number of tokens without padding
    aux: torch.Tensor
    metrics: torch.Tensor  # (number of `metric_names`,) float32, no gradient; divide like `loss`


class Objective(Protocol):
    """Loss to minimize: a sum over units (tokens or pairs), divided by their number."""

    metric_names: Sequence[str]  # names in metrics.jsonl and TensorBoard

    def prepare(
        self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device
    ) -> None:
        """Prepare for the run: called once before the first step, with all coming batches (on the
        host, lazy) and the model with the run's initial weights. Collective: every rank must call.
        By default nothing is done.
        """

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the units in `batch`, int64 scalar on its device; no synchronization."""
        ...

    def __call__(self, model: Model, batch: Batch) -> ObjectiveSums:
        """Return the sums over `batch`. Collective: runs the sharded model; every rank must
        call.
        """
        ...


class NextToken(Objective):
    """Cross entropy of the labels; a unit is a token with a label."""

    metric_names: Sequence[str] = ()

    def count(self, batch: Batch) -> torch.Tensor:
        return (batch.labels != IGNORE_INDEX).sum()

    def __call__(self, model: Model, batch: Batch) -> ObjectiveSums:
        losses = model(
            batch.tokens, batch.labels, batch.positions, batch.document_ids, **batch.inputs
        )
        return ObjectiveSums(losses.cross_entropy, losses.aux, losses.cross_entropy.new_zeros(0))
