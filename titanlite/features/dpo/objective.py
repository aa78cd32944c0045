"""Direct preference optimization (arXiv:2305.18290) on packed rows of pairs.

In each row document 2 n is the chosen answer of a pair and document 2 n + 1 the rejected one, each behind its own copy
of the prompt; prompts and padding have no labels.

Shapes: B rows, S tokens, N documents of the fullest row (even), P = N / 2 pairs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from titanlite.base.log import logger
from titanlite.data.dataset import Batch
from titanlite.models.interface import Model
from titanlite.objective import ObjectiveSums


class Reference(Protocol):
    """Where the log-probabilities of the reference model come from."""

    def fill(self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device) -> None:
        """`Objective.prepare`."""
        ...

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        """Log p(document) of the reference model, (B, N) float64, no gradient."""
        ...


class DPO:
    """Mean over the pairs of `-log sigmoid(margin)`, the margin being that of the rewards
    `beta * (log p(answer) - log p_reference(answer))` (arXiv:2305.18290, eq. 7). With label smoothing e, for a share e
    of wrong preferences, `-(1 - e) log sigmoid(margin) - e log sigmoid(-margin)` (ericmitchell.ai/cdpo.pdf). A unit is
    a pair.

    Attributes:
        reference: gives the reference model's log-probabilities.
    """

    metric_names: Sequence[str] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margin",
        "rewards/accuracy",
        "logps/chosen",
        "logps/rejected",
    )

    def __init__(self, beta: float, label_smoothing: float, reference: Reference) -> None:
        self.reference = reference
        self._beta, self._smoothing = beta, label_smoothing

    def prepare(self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device) -> None:
        """Compute the reference's log-probabilities, where they are to be cached."""
        self.reference.fill(batches, get_model, device)

    def count(self, batch: Batch) -> torch.Tensor:
        ids_BS = batch.document_ids
        before_BS = F.pad(ids_BS, (1, 0), value=-1)[:, :-1]
        return ((ids_BS != before_BS) & (ids_BS >= 0) & (ids_BS % 2 == 0)).sum()

    def __call__(self, model: Model, batch: Batch) -> ObjectiveSums:
        # First the reference: routers count the rows of the latest forward, which must be that of the trained model.
        reference_BP2 = self.reference(model, batch).unflatten(1, (-1, 2))
        log_probs_BN, aux = document_log_probs(model, batch)
        log_probs_BP2 = log_probs_BN.unflatten(1, (-1, 2))
        rewards_BP2 = self._beta * (log_probs_BP2 - reference_BP2)
        margin_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
        loss_BP = -(1 - self._smoothing) * F.logsigmoid(margin_BP) - self._smoothing * F.logsigmoid(-margin_BP)

        present_BP2 = present_documents(batch.document_ids, log_probs_BN.shape[1]).unflatten(1, (-1, 2))
        pair_BP = present_BP2.all(dim=-1)
        # Half a pair has no loss; a plausible number would hide it.
        torn_BP = present_BP2.any(dim=-1) & ~pair_BP
        loss_BP = loss_BP.where(pair_BP, 0.0).masked_fill(torn_BP, float("nan"))
        with torch.no_grad():
            columns = [*rewards_BP2.unbind(-1), margin_BP, (margin_BP > 0).double(), *log_probs_BP2.unbind(-1)]
            metrics = torch.stack([column.where(pair_BP, 0.0).sum() for column in columns]).float()
        return ObjectiveSums(loss_BP.sum().float(), aux, metrics)


def document_log_probs(model: Model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each document's labels (B, N) float64, the model's balance losses).

    Summed in float64 by a matrix product with the documents' masks: in fixed order, where an `index_add` on CUDA would
    use atomics. The number of documents is copied to the host, a synchronization point.
    """
    losses = model(batch.tokens, batch.labels, batch.positions, batch.document_ids, reduction="none", **batch.inputs)
    member_BNS = _membership(batch.document_ids, num_documents(batch.document_ids)).double()
    return -(member_BNS @ losses.cross_entropy.double().unsqueeze(-1)).squeeze(-1), losses.aux


def num_documents(ids_BS: torch.Tensor) -> int:
    """Documents of the fullest row, rounded up to whole pairs."""
    return max(-(-(int(ids_BS.max()) + 1) // 2), 1) * 2


def present_documents(ids_BS: torch.Tensor, num: int) -> torch.Tensor:
    """Which of documents 0 to num - 1 a row has, (B, num) bool."""
    return _membership(ids_BS, num).any(dim=-1)


def _membership(ids_BS: torch.Tensor, num: int) -> torch.Tensor:
    return ids_BS.unsqueeze(1) == torch.arange(num, device=ids_BS.device)[None, :, None]


def turn_off_dropout(model: torch.nn.Module) -> None:
    """Let all layers keep everything: DPO compares with a reference without dropout, whose noise would be reward."""
    found = set()
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.Dropout)
        for name in ["p"] if is_dropout else [name for name in vars(module) if name.endswith("dropout")]:
            value = getattr(module, name)
            if isinstance(value, float) and value > 0.0:
                found.add(value)
                setattr(module, name, 0.0)
    if found:
        logger.info("dpo: dropout of %s is off, as in the reference", ", ".join(map(str, sorted(found))))
