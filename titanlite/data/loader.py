"""Batches of a step as a pure function of (seed, step): the data position of a run is its step, and nothing else.

There is no background thread. A micro-batch of 16 Ki tokens takes under 1 ms from the page cache, and a step
starts its GPU work before the next step asks for data.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import NamedTuple

from titanlite.base.log import logger
from titanlite.data.dataset import Batch, Mixture, SequenceDataset, Source, TrainDataset, get_orders, get_sources

_KEYED = ", order keyed"  # in the fingerprint of a run whose order is


class ValidationSet(NamedTuple):
    """Held-out micro-batches of one source for this rank, CPU tensors.

    `weight` is the weight of a sequence in the validation loss, so that each source counts by its share.
    """

    source: str
    weight: float
    batches: Iterator[Batch]


@dataclass
class TrainLoader:
    """The part of every global batch that one data-parallel rank trains on.

    Step s trains on the samples [s * G, (s + 1) * G) of the endless sample order of `dataset`, G being
    `global_batch_size`, on any mesh. Micro-batch m of rank r holds `local_batch_size` samples of those, starting at
    (m * dp_degree + r) * local_batch_size; over all ranks and micro-batches each sample appears once.
    Ranks that differ only in context, tensor or expert parallel coordinates share a `dp_rank` and get the same batches.
    The global batch is a multiple of `local_batch_size * dp_degree`.
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
        """Description of the data order in words: equal for equal orders."""
        keyed = _KEYED if any(order.is_keyed for order in get_orders(self.dataset)) else ""
        return f"{self.dataset.fingerprint}, seed {self.seed}{keyed}"

    @property
    def mixture(self) -> str:
        """Shares of the sources in words; empty for a single source."""
        sources = get_sources(self.dataset)
        return ", ".join(f"{source.share:.2%} {source.name}" for source in sources) if sources[0].name else ""

    def start_from(
        self, step: int, samples: int, skip_to: int = 0, taken: Mapping[str, int] | None = None, fingerprint: str = ""
    ) -> None:
        """Start step `step` after the first `samples` samples of the data order; leave out those before `skip_to`.

        The global batch size may differ from that of earlier steps. `taken` are the sequences that earlier steps took
        of each source of a mixture, which may have been another mixture. `fingerprint` is that of earlier steps: a run
        keeps the kind of order that it began with (`ShuffledOrder.is_keyed`).
        """
        for order in get_orders(self.dataset) if fingerprint else ():
            order.is_keyed = order.is_keyed and fingerprint.endswith(_KEYED)
        if isinstance(self.dataset, Mixture):
            self.dataset.go_on(self.seed, samples, taken or {})
        self._start = (step, max(samples, skip_to))

    def get_taken(self, step: int) -> dict[str, int]:
        """Return the position of each source of a mixture, in sequences, before `step`; empty for a single source."""
        if not isinstance(self.dataset, Mixture):
            return {}
        return self.dataset.get_taken(self.seed, self.samples_before(step))

    def samples_before(self, step: int) -> int:
        """Count the samples of the data order that the steps before `step` trained on, or left out.

        Raises ValueError: the run was resumed after `step`.
        """
        first, samples = self._start
        if step < first:
            raise ValueError(f"step {step} is before step {first}, from which this run goes on")
        return samples + (step - first) * self.global_batch_size

    def micro_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of this rank in training step `step`, counted from 0; CPU tensors.

        A list and not an iterator: the loss of the first micro-batch is divided by the valid tokens of all of them.
        """
        start = self.samples_before(step)
        indices = self.dataset.get_train_indices(self.seed, start, start + self.global_batch_size)
        indices = indices.reshape(self.num_micro_batches, self.dp_degree, self.local_batch_size)
        return [self.dataset.batch(micro_batch) for micro_batch in indices[:, self.dp_rank]]

    def validation_sets(self, num_steps: int) -> list[ValidationSet]:
        """Return every held-out sequence of each source once, or the first `num_steps` global batches of each (0: all).

        The same at every validation and on any mesh. All ranks get equally many micro-batches of equal shape, filled up
        with rows without labels.
        """
        held_out = self._held_out(num_steps)
        weights = [source.share / count for source, count in held_out]
        return [
            ValidationSet(source.name, weight / weights[0], self._validate_on(source.dataset, count))
            for (source, count), weight in zip(held_out, weights, strict=True)
        ]

    def validation_batches(self, num_steps: int) -> Iterator[Batch]:
        """Return the micro-batches of this rank in all `validation_sets`, one after the other; CPU tensors."""
        return chain.from_iterable(held_out.batches for held_out in self.validation_sets(num_steps))

    def log_validation_size(self, num_steps: int, freq: int) -> None:
        """Log which held-out sequences a validation leaves out, and warn if it is longer than `freq` training steps."""
        held_out = self._held_out(num_steps)
        for source, count in held_out:
            if count < source.dataset.num_validation_sequences:
                logger.info(
                    "data: each validation takes the first %d of %d held-out sequences%s: validation.steps = %d",
                    *(count, source.dataset.num_validation_sequences, f" of {source.name}" if source.name else ""),
                    num_steps,
                )
        num_batches = sum(-(-count // self.global_batch_size) for _, count in held_out)
        if num_batches > freq:
            logger.warning(
                "data: a validation runs %d batches, after every %d that are trained on (validation.freq). To bound "
                "that, set validation.steps, or raise validation.freq.",
                *(num_batches, freq),
            )

    def _held_out(self, num_steps: int) -> list[tuple[Source, int]]:
        """Return the sources with held-out sequences, each with the number of them that a validation takes."""
        most = num_steps * self.global_batch_size or sys.maxsize
        counts = [(source, source.dataset.num_validation_sequences) for source in get_sources(self.dataset)]
        return [(source, min(most, count)) for source, count in counts if count]

    def _validate_on(self, dataset: SequenceDataset, count: int) -> Iterator[Batch]:
        size = self.local_batch_size
        for start in range(self.dp_rank * size, count + self.dp_rank * size, self.dp_degree * size):
            indices = dataset.get_validation_indices(start, start + size)
            yield dataset.batch(indices).with_rows(max(0, count - start))
