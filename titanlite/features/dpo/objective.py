"""Direct preference optimization (arXiv:2305.18290) on packed rows of pairs.

In each row document 2 n is the chosen answer of a pair and document 2 n + 1 the rejected one, each after its own copy
of the prompt; prompts and padding have no labels.

Shapes: B rows, S tokens, N documents of the fullest row (even), P = N / 2 pairs.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from titanlite.base.errors import DataError
from titanlite.base.log import logger
from titanlite.config.schema import JobConfig
from titanlite.data.dataset import Batch
from titanlite.features.dpo.reference import (
    AdaptersOff,
    CachedReference,
    describe_weights,
    document_log_probs,
    present_documents,
)
from titanlite.models.interface import Model
from titanlite.objective import ObjectiveSums


class DPO:
    """Mean over the pairs of `-log sigmoid(margin)`, the margin being that of the rewards
    `beta * (log p(answer) - log p_reference(answer))` (arXiv:2305.18290, eq. 7). With label smoothing e, for a share e
    of wrong preferences, `-(1 - e) log sigmoid(margin) - e log sigmoid(-margin)` (ericmitchell.ai/cdpo.pdf). A unit is
    a pair.
    """

    metric_names: Sequence[str] = (
        *(f"rewards/{name}" for name in ("chosen", "rejected", "margin", "accuracy")),
        *(f"logps/{name}" for name in ("chosen", "rejected")),
    )

    def __init__(self, beta: float, label_smoothing: float, reference: AdaptersOff | CachedReference) -> None:
        self.reference = reference
        self._beta, self._smoothing = beta, label_smoothing

    def prepare(self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device) -> None:
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


def build_dpo(job: JobConfig, form: str) -> DPO | None:
    """Build the objective for rows of `form` if `training.objective` is "dpo"; None if not.

    Raises:
        DataError: pairs would be trained token by token, both sides alike, or there are no pairs to compare.
    """
    if form == "preference" and job.training.objective == "next_token":
        raise DataError(
            "data: the rows are preference pairs; next-token training would imitate both sides. Set training.objective "
            '= "dpo".'
        )
    if form != "preference" and job.training.objective == "dpo":
        raise DataError(
            f"data: training.objective = \"dpo\" needs preference pairs, but the rows are of form '{form}'. Set "
            'data.dataset = "examples" and data.path to rows with prompt, chosen and rejected; streams say so '
            'themselves, with data.format = "preference".'
        )
    if job.training.objective != "dpo":
        return None
    section = job.dpo
    # Adapters that were trained before belong to the model that training begins with.
    fresh_adapters = job.lora.rank > 0 and not job.lora.init_from
    if section.reference == "adapters_off" or (section.reference == "auto" and fresh_adapters):
        return DPO(section.beta, section.label_smoothing, AdaptersOff())
    dtypes = f"{job.training.dtype}, computed in {job.training.mixed_precision_param}"
    weights = describe_weights(job.checkpoint.initial_load_path, job.training.seed, dtypes)
    if job.lora.init_from:
        weights += f" with {describe_weights(job.lora.init_from, job.training.seed, dtypes)}"
    reference = CachedReference(Path(job.job.dump_folder) / "reference_log_probs.safetensors", weights)
    return DPO(section.beta, section.label_smoothing, reference)


def turn_off_dropout(model: torch.nn.Module) -> None:
    """Set dropout to 0 in all layers: the reference has none, so its noise would count as reward."""
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
