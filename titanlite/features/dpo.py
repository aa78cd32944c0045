"""Direct preference optimization (arXiv:2305.18290) on packed rows of pairs.

In each row, document 2 n has the prompt and the chosen answer of a pair, and document 2 n + 1 has
the prompt and the rejected answer; prompts and padding have no labels. The log-probabilities of the
reference model are computed in each step, or once before the first step.

Shapes: B rows, S tokens, N documents of the fullest row (even), P = N / 2 pairs.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlite.base.agree import gather_objects
from titanlite.base.errors import TrainingError
from titanlite.base.log import logger
from titanlite.config.schema import JobConfig
from titanlite.data.dataset import Batch
from titanlite.distributed.fsdp import forward_only
from titanlite.features.lora.layers import adapters_disabled
from titanlite.models.interface import Model
from titanlite.objective import ObjectiveSums


class DPO:
    """Mean over the pairs of `-log sigmoid(margin)`, where the margin is the difference of the
    rewards `beta * (log p(answer) - log p_reference(answer))` (arXiv:2305.18290, eq. 7).

    With label smoothing e, for a fraction e of wrong preferences, the loss is `-(1 - e) log
    sigmoid(margin) - e log sigmoid(-margin)` (ericmitchell.ai/cdpo.pdf). A unit is a pair.
    """

    metric_names: Sequence[str] = (
        *(f"rewards/{name}" for name in ("chosen", "rejected", "margin", "accuracy")),
        *(f"logps/{name}" for name in ("chosen", "rejected")),
    )

    def __init__(
        self, beta: float, label_smoothing: float, reference: "AdaptersOff | CachedReference"
    ) -> None:
        self.reference = reference
        self._beta, self._smoothing = beta, label_smoothing

    def prepare(
        self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device
    ) -> None:
        if isinstance(self.reference, CachedReference):
            self.reference.fill(batches, get_model, device)

    def count(self, batch: Batch) -> torch.Tensor:
        ids_BS = batch.document_ids
        before_BS = F.pad(ids_BS, (1, 0), value=-1)[:, :-1]
        return ((ids_BS != before_BS) & (ids_BS >= 0) & (ids_BS % 2 == 0)).sum()

    def __call__(self, model: Model, batch: Batch) -> ObjectiveSums:
        # The reference comes first: routers count the rows of the latest forward, which must be the
        # forward of the trained model.
        reference_BP2 = self.reference(model, batch).unflatten(1, (-1, 2))
        log_probs_BN, aux = document_log_probs(model, batch)
        log_probs_BP2 = log_probs_BN.unflatten(1, (-1, 2))
        rewards_BP2 = self._beta * (log_probs_BP2 - reference_BP2)
        margin_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
        loss_BP = -(1 - self._smoothing) * F.logsigmoid(margin_BP) - self._smoothing * F.logsigmoid(
            -margin_BP
        )

        present_BN = _membership(batch.document_ids, log_probs_BN.shape[1]).any(dim=-1)
        present_BP2 = present_BN.unflatten(1, (-1, 2))
        pair_BP = present_BP2.all(dim=-1)
        # Half a pair has no loss. It must not get a plausible value.
        torn_BP = present_BP2.any(dim=-1) & ~pair_BP
        loss_BP = loss_BP.where(pair_BP, 0.0).masked_fill(torn_BP, float("nan"))
        with torch.no_grad():
            columns = [
                *rewards_BP2.unbind(-1),
                margin_BP,
                (margin_BP > 0).double(),
                *log_probs_BP2.unbind(-1),
            ]
            metrics = torch.stack([column.where(pair_BP, 0.0).sum() for column in columns]).float()
        return ObjectiveSums(loss_BP.sum().float(), aux, metrics)


def check_pairs(job: JobConfig, form: str) -> list[str]:
    """Return a problem if rows of the format `form` do not match `training.objective`: pairs with
    an objective that would train both answers, or DPO without pairs.
    """
    if form == "preference" and job.training.objective == "next_token":
        return [
            "data: the rows are preference pairs; next-token training would imitate both sides. "
            'Set training.objective = "dpo".'
        ]
    if form != "preference" and job.training.objective == "dpo":
        return [
            'data: training.objective = "dpo" needs preference pairs, but the rows have the format '
            f"'{form}'. Set data.dataset = \"examples\" and data.path to rows with prompt, chosen "
            'and rejected; for a stream, also set data.format = "preference".'
        ]
    return []


def build_dpo(job: JobConfig) -> DPO | None:
    """Build the objective if `training.objective` is "dpo", else return None. Call `check_pairs`
    before.
    """
    if job.training.objective != "dpo":
        return None
    # Adapters from lora.init_from belong to the initial model.
    fresh_adapters = job.lora.rank > 0 and not job.lora.init_from
    is_off = job.dpo.reference == "adapters_off" or (job.dpo.reference == "auto" and fresh_adapters)
    return DPO(
        job.dpo.beta, job.dpo.label_smoothing, AdaptersOff() if is_off else CachedReference()
    )


def turn_off_dropout(model: torch.nn.Module) -> None:
    """Set dropout to 0 in all layers: the reference has no dropout, so its noise would count as
    reward.
    """
    found = set()
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.Dropout)
        for name in (
            ["p"] if is_dropout else [name for name in vars(module) if name.endswith("dropout")]
        ):
            value = getattr(module, name)
            if isinstance(value, float) and value > 0.0:
                found.add(value)
                setattr(module, name, 0.0)
    if found:
        logger.info(
            "dpo: dropout of %s is off, as in the reference", ", ".join(map(str, sorted(found)))
        )


def document_log_probs(model: Model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each document's labels, (B, N) float64, and the model's balance
    losses.

    The sum is a float64 matmul with the documents' masks, which has a fixed order; `index_add` on
    CUDA would use atomics. The number of documents is copied to the host, which is a
    synchronization point.
    """
    losses = model(
        batch.tokens,
        batch.labels,
        batch.positions,
        batch.document_ids,
        reduction="none",
        **batch.inputs,
    )
    member_BNS = _membership(batch.document_ids, num_documents(batch.document_ids)).double()
    return -(member_BNS @ losses.cross_entropy.double().unsqueeze(-1)).squeeze(-1), losses.aux


def num_documents(ids_BS: torch.Tensor) -> int:
    """Count the documents of the fullest row, rounded up to whole pairs."""
    return max(int(ids_BS.max()) // 2 + 1, 1) * 2


def _membership(ids_BS: torch.Tensor, num: int) -> torch.Tensor:
    """Return which tokens belong to documents 0 to num - 1, (B, num, S) bool."""
    return ids_BS.unsqueeze(1) == torch.arange(num, device=ids_BS.device)[None, :, None]


class AdaptersOff:
    """The frozen base model as reference: it takes one more forward per batch, without adapters,
    and no second model.
    """

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return log p(document), (B, N) float64. Collective: runs the sharded model; every rank
        must call.
        """
        # No resharding: the forward of the trained model follows with the same weights.
        with adapters_disabled(model), forward_only(model, reshard=False):
            return document_log_probs(model, batch)[0]


class CachedReference:
    """Log-probabilities of the initial weights, by pair, computed before the first step of a
    process.

    A pair is keyed by the hash of its tokens and labels.
    """

    def __init__(self) -> None:
        self._pairs: dict[bytes, tuple[float, float]] = {}

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return log p(document), (B, N) float64. The batch is copied to the host for the look-up.

        Raises:
            TrainingError: the batch has a pair that was not in the batches of `fill`.
        """
        found = np.zeros((batch.tokens.shape[0], num_documents(batch.document_ids)))
        for row, pair, key in _keys(batch):
            if key not in self._pairs:
                raise TrainingError(
                    "dpo.reference: a pair of this batch has no cached log-probabilities. The data "
                    "changed since the run began; start it again."
                )
            found[row, 2 * pair : 2 * pair + 2] = self._pairs[key]
        return torch.from_numpy(found).to(batch.tokens.device)

    def fill(
        self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device
    ) -> None:
        """Compute all pairs of this rank's `batches` with the initial weights; every rank must have
        the same number of batches.

        Collectives: one small all-reduce per batch, a forward of the model if a pair is missing on
        any rank, and a gather at the end; every rank must call.
        """
        model = None
        for batch in batches:
            keys = list(_keys(batch))
            missing = torch.tensor(
                any(key not in self._pairs for _, _, key in keys), dtype=torch.int32, device=device
            )
            dist.all_reduce(missing, op=dist.ReduceOp.MAX)
            if not int(missing):
                continue
            model = get_model() if model is None else model
            with forward_only(model):
                log_probs_BN = document_log_probs(model, batch.to(device))[0].cpu().numpy()
            for row, pair, key in keys:
                chosen, rejected = log_probs_BN[row, 2 * pair : 2 * pair + 2].tolist()
                self._pairs[key] = (chosen, rejected)
        # With pipeline stages only the last one has values. Its ranks come last, so they win.
        self._pairs = {
            key: value for pairs in gather_objects(self._pairs) for key, value in pairs.items()
        }
        logger.info("dpo: reference log-probabilities of %d pairs computed", len(self._pairs))


def _keys(batch: Batch) -> Iterator[tuple[int, int, bytes]]:
    """Yield (row, pair, hash) of every pair in `batch`."""
    tokens, labels, ids = (
        tensor.cpu().numpy() for tensor in (batch.tokens, batch.labels, batch.document_ids)
    )
    for row in range(ids.shape[0]):
        for pair in range(int(ids[row].max()) // 2 + 1):
            at = ids[row] // 2 == pair
            content = np.stack([ids[row][at] % 2, tokens[row][at], labels[row][at]])
            yield row, pair, hashlib.blake2b(content.tobytes(), digest_size=16).digest()
