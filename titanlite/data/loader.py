"""Batches of a step as a pure function of (seed, step), and their construction from the
configuration.

The data position of a run is its step, and nothing else. There is no background thread: a
micro-batch of 16 Ki tokens takes under 1 ms from the page cache, and a step starts its GPU work
before the next step requests data.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.base.errors import DataError
from titanlite.base.log import logger, warn_once
from titanlite.base.text import format_count
from titanlite.config.data import DataSection
from titanlite.config.parallelism import resolve_global_batch_size
from titanlite.config.schema import JobConfig
from titanlite.data.corpus import build_corpus
from titanlite.data.dataset import (
    Batch,
    Mixture,
    PackedDataset,
    SequenceDataset,
    TrainDataset,
    get_sources,
)
from titanlite.data.tokenizer import HFTokenizer, build_tokenizer
from titanlite.data.tokens import build_tokens
from titanlite.models.families import get_model_type


class ValidationSet(NamedTuple):
    """Held-out micro-batches of one source for this rank, as CPU tensors.

    `weight` is the weight of a sequence in the validation loss, so that each source counts by its
    share.
    """

    source: str
    weight: float
    batches: Iterator[Batch]


@dataclass
class TrainLoader:
    """The part of every global batch that one data-parallel rank trains on.

    Step s trains on the samples [s * G, (s + 1) * G) of the endless sample order of `dataset`, on
    any mesh; G is `global_batch_size`. Micro-batch m of rank r holds `local_batch_size` of these
    samples, starting at (m * dp_degree + r) * local_batch_size; over all ranks and micro-batches
    each sample appears once. Ranks that differ only in context, tensor or expert parallel
    coordinates share a `dp_rank` and get the same batches. The global batch is a multiple of
    `local_batch_size * dp_degree`.
    """

    dataset: TrainDataset
    _: KW_ONLY
    seed: int
    global_batch_size: int
    local_batch_size: int
    dp_rank: int
    dp_degree: int
    _start: tuple[int, int] = field(default=(0, 0), init=False)  # a step, and the samples before it

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // (self.local_batch_size * self.dp_degree)

    @property
    def fingerprint(self) -> str:
        """Description of the data order: equal for equal orders."""
        return f"{self.dataset.fingerprint}, seed {self.seed}, order keyed"

    @property
    def mixture(self) -> str:
        """The shares of the sources as text; empty for a single source."""
        sources = get_sources(self.dataset)
        return (
            ", ".join(f"{source.share:.2%} {source.name}" for source in sources)
            if sources[0].name
            else ""
        )

    def start_from(
        self, step: int, samples: int, skip_to: int = 0, taken: Mapping[str, int] | None = None
    ) -> None:
        """Start step `step` after the first `samples` samples of the data order; skip the samples
        before `skip_to`.

        The global batch size may differ from earlier steps. `taken` is the number of sequences that
        earlier steps took from each source of a mixture, which may have been a different mixture.
        """
        if isinstance(self.dataset, Mixture):
            self.dataset.resume_at(self.seed, samples, taken or {})
        self._start = (step, max(samples, skip_to))

    def get_taken(self, step: int) -> dict[str, int]:
        """Return the position of each source of a mixture, in sequences, before `step`; empty for a
        single source.
        """
        if not isinstance(self.dataset, Mixture):
            return {}
        return self.dataset.get_taken(self.seed, self.samples_before(step))

    def samples_before(self, step: int) -> int:
        """Count the samples of the data order that the steps before `step` trained on or skipped;
        the run was not resumed after `step`.
        """
        first, samples = self._start
        return samples + (step - first) * self.global_batch_size

    def micro_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of this rank in training step `step`, counted from 0; CPU
        tensors.

        A list and not an iterator: the loss of the first micro-batch is divided by the valid tokens
        of all of them.
        """
        start = self.samples_before(step)
        indices = self.dataset.get_train_indices(self.seed, start, start + self.global_batch_size)
        indices = indices.reshape(self.num_micro_batches, self.dp_degree, self.local_batch_size)
        return [self.dataset.batch(micro_batch) for micro_batch in indices[:, self.dp_rank]]

    def validation_sets(self, num_steps: int) -> list[ValidationSet]:
        """Return every held-out sequence of each source once, or the first `num_steps` global
        batches of each source (0: all).

        The result is the same at every validation and on any mesh. All ranks get the same number of
        micro-batches of equal shape, filled up with rows without labels.
        """
        most = num_steps * self.global_batch_size or sys.maxsize
        found = []
        for name, share, dataset in get_sources(self.dataset):
            if count := min(most, dataset.num_validation_sequences):
                batches = self._validate_on(dataset, count)
                found.append(ValidationSet(name, share / count, batches))
        return [each._replace(weight=each.weight / found[0].weight) for each in found]

    def validation_batches(self, num_steps: int) -> Iterator[Batch]:
        """Return this rank's micro-batches in all `validation_sets`, one after another; CPU
        tensors.
        """
        return chain.from_iterable(held_out.batches for held_out in self.validation_sets(num_steps))

    def coming_batches(self, step: int, job: JobConfig) -> Iterator[Batch]:
        """Yield every micro-batch that this rank trains on from `step` on, then every micro-batch
        that it validates on, as CPU tensors.
        """
        for number in range(step, job.training.steps):
            yield from self.micro_batches(number)
        if job.validation.enable:
            yield from self.validation_batches(job.validation.steps)

    def _validate_on(self, dataset: SequenceDataset, count: int) -> Iterator[Batch]:
        size = self.local_batch_size
        for start in range(self.dp_rank * size, count + self.dp_rank * size, self.dp_degree * size):
            indices = dataset.get_validation_indices(start, start + size)
            yield dataset.batch(indices).with_rows(max(0, count - start))


def build_loader(
    job: JobConfig, dataset: TrainDataset, dp_rank: int, dp_degree: int, before: int | None = None
) -> TrainLoader:
    """Return the batches of one data-parallel rank from `dataset`. No collectives.

    `before` is the batch size that a resumed run had before.

    Raises DataError: the text, a row or the tokenizer is missing or unusable, or there is too
    little data for `seq_len`.
    """
    training = job.training
    # The number of examples is read only if it is needed, because streams read rows for it. A
    # plain-text document, or an image, counts as one example.
    sources = get_sources(dataset) if training.global_batch_size is None and before is None else []
    examples = sum(
        source.share * getattr(source.dataset, "examples_per_sequence", 1.0) for source in sources
    )
    sizes = [source.dataset.num_train_sequences or 0 for source in sources]
    loader = TrainLoader(
        dataset,
        seed=training.seed,
        global_batch_size=resolve_global_batch_size(
            job, dp_degree, examples, sum(sizes) if all(sizes) else None, before
        ),
        local_batch_size=training.local_batch_size or 1,  # 1 until it is chosen
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )
    if loader.mixture:
        logger.info(f"data: {loader.mixture}")
    return loader


def get_kind(data: DataSection) -> str:
    """Return the configured kind of data: "text", "examples", "stream", "mixture" or "images".

    Raises DataError: the configuration names no data.
    """
    if data.dataset == "none":
        raise DataError(
            "data: no data is set to train the pretrained model on. Set data.path to a file, "
            'folder or hub id; or data.dataset = "stdlib" for the Python files of the standard '
            "library."
        )
    if data.sources and data.dataset != "images":
        return "mixture"
    if data.dataset in ("text", "stdlib"):
        return "text"
    return "stream" if data.dataset == "examples" and data.streaming else data.dataset


def build_text(job: JobConfig) -> tuple[HFTokenizer, PackedDataset]:
    """Return the tokenizer and the sequences of plain text."""
    data = resolve_tokenizer_path(job)
    return build_packed(data, job.training.seq_len, "data", None, get_model_type(job.model))


def resolve_tokenizer_path(job: JobConfig) -> DataSection:
    """Return `job.data`, with the tokenizer of `model.hf_assets_path` if no other is configured."""
    data = job.data
    assets = Path(job.model.hf_assets_path).expanduser()
    if (
        job.model.hf_assets_path
        and not data.tokenizer_path
        and (assets / "tokenizer.json").is_file()
    ):
        # Pretrained weights are useless with another tokenizer's ids.
        data = replace(data, tokenizer_path=str(assets))
        logger.info(f"data: using the tokenizer in {assets}")
    return data


def build_packed(
    data: DataSection, seq_len: int, where: str, tokenizer: Any, model_type: str = ""
) -> tuple[HFTokenizer, PackedDataset]:
    """Return the tokenizer, trained on the text unless one is given, and the sequences of
    `data.path`.
    """
    corpus = build_corpus(data)
    tokenizer = build_tokenizer(data, corpus, model_type) if tokenizer is None else tokenizer
    tokenized = build_tokens(data, corpus, tokenizer)
    dataset = PackedDataset(tokenized, seq_len, data.validation_share)
    logger.info(
        f"{where}: {len(tokenized.tokens)} tokens, vocabulary {tokenized.vocab_size}, in "
        f"{tokenized.describe()}; sequences of {seq_len} tokens: {dataset.num_train_sequences} to "
        f"train on, {dataset.num_validation_sequences} held out"
    )
    if warning := tokenized.get_warning():
        warn_once(f"{where}: {warning}")
    return tokenizer, dataset


def resolve_steps(job: JobConfig, loader: TrainLoader, before: Any = None) -> JobConfig:
    """Return `job` with its global batch size, and with its epochs converted to steps. `before` is
    the `Progress` of the resumed run, from which epochs are counted.
    """
    training = job.training
    sequences = loader.dataset.num_train_sequences
    batch = loader.global_batch_size
    if training.global_batch_size is None:
        training = replace(training, global_batch_size=batch)
    done = 0
    seen = 0
    if before is not None and not job.data.skip_to_sample:  # otherwise skipped samples would count
        done = before.step
        seen = before.samples
    if training.epochs and sequences is not None:
        training = replace(
            training, steps=done + math.ceil((training.epochs * sequences - seen) / batch)
        )
    seen += (training.steps - done) * batch
    epochs = "" if sequences is None else f", {seen / sequences:.3g} epochs"
    logger.info(
        f"training: {format_count(training.steps, 'step')} of {format_count(batch, 'sequence')}, "
        f"{seen * training.seq_len:,} tokens with padding{epochs}"
    )
    warmup_steps = job.lr_scheduler.warmup_steps
    if warmup_steps >= training.steps > 0:
        warn_once(
            f"training: lr_scheduler.warmup_steps = {warmup_steps}, and the run has "
            f"{training.steps} steps: the learning rate never reaches optimizer.lr before the last "
            "one. Lower it, or set it to -1 for 3% of the steps."
        )
    return replace(job, training=training)


def check_form(job: JobConfig, form: str) -> list[str]:
    """Return the problem of rows for fine-tuning with a model whose weights are random although the
    user did not request that.
    """
    if form == "text" or job.checkpoint.initial_load_path or job.model.init == "random":
        return []
    return [
        "model: the run would begin with random weights, and its data are rows of format "
        f"'{form}', for fine-tuning. Set model.path to the model to fine-tune; or "
        'model.init = "random", if random weights are meant.'
    ]
