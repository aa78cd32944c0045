"""Direct preference optimization (arXiv:2305.18290) on packed rows of pairs.

In each row document 2 n is the chosen answer of a pair and document 2 n + 1 the rejected one, each after its own copy
of the prompt; prompts and padding have no labels. The log-probabilities of the reference model are computed in each
step, or once before.

Shapes: B rows, S tokens, N documents of the fullest row (even), P = N / 2 pairs.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlite.base.agree import gather_objects, on_first_rank
from titanlite.base.errors import CheckpointError, DataError, TrainingError
from titanlite.base.files import write_atomic
from titanlite.base.log import logger
from titanlite.config.schema import JobConfig
from titanlite.data.dataset import Batch
from titanlite.features.lora.layers import adapters_disabled
from titanlite.features.transformers.probes import evaluation
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

    def __init__(self, beta: float, label_smoothing: float, reference: "AdaptersOff | CachedReference") -> None:
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

        present_BN = _membership(batch.document_ids, log_probs_BN.shape[1]).any(dim=-1)
        present_BP2 = present_BN.unflatten(1, (-1, 2))
        pair_BP = present_BP2.all(dim=-1)
        # Half a pair has no loss; a plausible number would hide that.
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


_KEY_BYTES = 16
_Pairs = dict[bytes, tuple[float, float]]


def document_log_probs(model: Model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probability of each document's labels (B, N) float64, the model's balance losses).

    Summed in float64 by a matrix product with the documents' masks: in fixed order, where an `index_add` on CUDA would
    use atomics. The number of documents is copied to the host, a synchronization point.
    """
    losses = model(batch.tokens, batch.labels, batch.positions, batch.document_ids, reduction="none", **batch.inputs)
    member_BNS = _membership(batch.document_ids, num_documents(batch.document_ids)).double()
    return -(member_BNS @ losses.cross_entropy.double().unsqueeze(-1)).squeeze(-1), losses.aux


def num_documents(ids_BS: torch.Tensor) -> int:
    """Count the documents of the fullest row, rounded up to whole pairs."""
    return max(-(-(int(ids_BS.max()) + 1) // 2), 1) * 2


def _membership(ids_BS: torch.Tensor, num: int) -> torch.Tensor:
    """Return which tokens belong to documents 0 to num - 1, (B, num, S) bool."""
    return ids_BS.unsqueeze(1) == torch.arange(num, device=ids_BS.device)[None, :, None]


class AdaptersOff:
    """The frozen base model is the reference: one more forward per batch without adapters, no second model."""

    def fill(self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device) -> None:
        """Do nothing."""

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        """Log p(document), (B, N) float64. Collective: runs the sharded model; every rank must call."""
        with adapters_disabled(model):
            return reference_log_probs(model, batch)


@torch.no_grad()
def reference_log_probs(model: Model, batch: Batch) -> torch.Tensor:
    """Log p(document) (B, N) float64 of `model` as it is, in evaluation mode: routers count nothing."""
    with evaluation(model):
        return document_log_probs(model, batch)[0]


class CachedReference:
    """Log-probabilities of the initial weights, by pair, kept in the file `path` of this run. A pair is keyed by the
    hash of its tokens and labels, so that another mesh, batch size or data order finds it again. `weights` identifies
    the initial weights; a file of others is ignored.
    """

    def __init__(self, path: Path, weights: str) -> None:
        self._path, self._weights = path, weights
        self._pairs: _Pairs = {}

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        """Log p(document), (B, N) float64; the batch is copied to the host to be looked up.

        Raises:
            TrainingError: a pair was not there when the cache was filled.
        """
        found = np.zeros((batch.tokens.shape[0], num_documents(batch.document_ids)))
        for row, pair, key in _keys(batch):
            if key not in self._pairs:
                raise TrainingError(
                    "dpo.reference: a pair of this batch has no cached log-probabilities. The data changed since the "
                    "run began; start it again."
                )
            found[row, 2 * pair : 2 * pair + 2] = self._pairs[key]
        return torch.from_numpy(found).to(batch.tokens.device)

    def fill(self, batches: Iterable[Batch], get_model: Callable[[], Model], device: torch.device) -> None:
        """Compute and save all pairs of this rank's `batches` (as many on every rank) that the file does not have. The
        model with the initial weights is built only if a pair is missing.

        Raises:
            CheckpointError: on all ranks; the file is damaged, or cannot be written.

        Collectives: one small all-reduce per batch, a forward of the model where a pair is missing on any rank, and a
        gather at the end; every rank must call.
        """
        path, weights = self._path, self._weights
        self._pairs = on_first_rank(lambda: _load(path, weights))
        known, new, model = len(self._pairs), {}, None
        for batch in batches:
            keys = list(_keys(batch))
            missing = torch.tensor(any(key not in self._pairs for _, _, key in keys), dtype=torch.int32, device=device)
            dist.all_reduce(missing, op=dist.ReduceOp.MAX)
            if not int(missing):
                continue
            model = get_model() if model is None else model
            log_probs_BN = reference_log_probs(model, batch.to(device)).cpu().numpy()
            for row, pair, key in keys:
                chosen, rejected = log_probs_BN[row, 2 * pair : 2 * pair + 2].tolist()
                self._pairs[key] = new[key] = (chosen, rejected)
        # Of several pipeline stages the last has the values, and its ranks come last.
        found = {key: value for pairs in gather_objects(new) for key, value in pairs.items()}
        if found:
            self._pairs |= found
            on_first_rank(lambda: _save(path, weights, self._pairs))
        logger.info("dpo: reference log-probabilities of %d pairs from %s, %d computed", known, path, len(found))


def describe_weights(folder: str, seed: int, dtype: str) -> str:
    """Identify the weights that a run begins with: by the files in `folder` (name, size, time), or by the seed."""
    if not folder:
        return f"random weights, seed {seed}, {dtype}"
    files = sorted(Path(folder).glob("*.safetensors"))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{os.path.abspath(folder)} {hashlib.sha256(json.dumps(stats).encode()).hexdigest()}, {dtype}"


def _keys(batch: Batch) -> Iterator[tuple[int, int, bytes]]:
    """Yield (row, pair, hash) of every pair in `batch`."""
    tokens, labels, ids = (tensor.cpu().numpy() for tensor in (batch.tokens, batch.labels, batch.document_ids))
    for row in range(ids.shape[0]):
        for pair in range(-(-(int(ids[row].max()) + 1) // 2)):
            digest = hashlib.blake2b(digest_size=_KEY_BYTES)
            for document in (2 * pair, 2 * pair + 1):
                at = ids[row] == document
                digest.update(np.int64(at.sum()).tobytes() + tokens[row][at].tobytes() + labels[row][at].tobytes())
            yield row, pair, digest.digest()


def _load(path: Path, weights: str) -> _Pairs:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return {}
    try:
        with safe_open(path, "np") as file:
            if (file.metadata() or {}).get("weights") != weights:
                logger.warning("dpo: %s is of other initial weights and is not used", path)
                return {}
            keys, values = file.get_tensor("keys"), file.get_tensor("log_probs")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"dpo.reference: cannot read {path}: {error}. Remove it; it is computed again.") from None
    return {key.tobytes(): (chosen, rejected) for key, (chosen, rejected) in zip(keys, values.tolist(), strict=True)}


def _save(path: Path, weights: str, pairs: _Pairs) -> None:
    from safetensors.numpy import save

    keys = np.frombuffer(b"".join(pairs), dtype=np.uint8).reshape(-1, _KEY_BYTES)
    values = np.array(list(pairs.values()), dtype=np.float64)
    try:
        with write_atomic(path) as file:
            file.write(save({"keys": keys, "log_probs": values}, {"format": "np", "weights": weights}))
    except OSError as error:
        raise CheckpointError(
            f"dpo.reference: cannot write {path}: {error}. Free space or change job.dump_folder."
        ) from None
