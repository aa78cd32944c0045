"""The interface between the trainer and objectives, and the next-token objective."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from titanlite.data.dataset import IGNORE_INDEX, Batch
from titanlite.models.interface import Model


class ObjectiveSums(NamedTuple):
    """Sums over one batch of this rank."""

    # sum over units (tokens or pairs), differentiable, float32; divided by the global number of
    # units
    loss: torch.Tensor
    # balance losses, a sum over tokens; divided by the global number of tokens without padding
    aux: torch.Tensor
    metrics: torch.Tensor  # (len(metric_names),) float32, no gradient; divided like `loss`


class Objective(Protocol):
    """Loss to minimize: a sum over units (tokens or pairs), divided by their number."""

    metric_names: Sequence[str]  # names in metrics.jsonl and TensorBoard

    def prepare(
        self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device
    ) -> None:
        """Prepare for the run; by default, do nothing. Called once before the first step.

        `batches` are all coming batches (on the host, lazy), and `get_model` returns the model with
        the run's initial weights. Collective: every rank must call.
        """

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the units in `batch`: an int64 scalar on its device, without synchronization."""
        ...

    def __call__(self, model: Model, batch: Batch) -> ObjectiveSums:
        """Return the sums over `batch`. Collective: runs the sharded model; every rank must
        call.
        """
        ...


class NextToken(Objective):
    """Cross entropy of the labels; each token with a label is a unit."""

    metric_names: Sequence[str] = ()

    def count(self, batch: Batch) -> torch.Tensor:
        return (batch.labels != IGNORE_INDEX).sum()

    def __call__(self, model: Model, batch: Batch) -> ObjectiveSums:
        losses = model(
            batch.tokens, batch.labels, batch.positions, batch.document_ids, **batch.inputs
        )
        return ObjectiveSums(losses.cross_entropy, losses.aux, losses.cross_entropy.new_zeros(0))
