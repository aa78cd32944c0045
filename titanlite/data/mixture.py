"""Several datasets as one: sample n is a sequence of one of them, and which one is a function of (seed, n) alone.

Samples come in periods. Each has a fixed number of places for every source, its quota, in an order that depends on
(seed, period). So shares hold in every period, how many sequences a source gave before sample n is known without
counting them from the first one, and a run resumes at any sample. With weights, a period has 16384 samples, and each
source goes through epochs of its own. Without, quotas are the sizes of the sources: a period is an epoch of them all.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from titanlite.data.dataset import Batch, SequenceDataset, get_permutation
from titanlite.errors import DataError

PERIOD = 1 << 14  # samples, where there are weights: shares are multiples of 1/16384


class Source(NamedTuple):
    """One of the datasets that a run reads.

    Attributes:
        name: as in the configuration; empty for a dataset that is the only one.
        share: of the training sequences.
    """

    name: str
    share: float
    dataset: SequenceDataset


class Use(NamedTuple):
    """How much of a source the first samples of a run take; `epochs` is None where the size is not known."""

    source: str
    num_sequences: int
    epochs: float | None


def get_source_seed(seed: int, name: str) -> int:
    """The seed of the order of source `name`: sources of one size are not to go side by side."""
    return seed + (zlib.crc32(name.encode()) << 32)


class MixtureDataset:
    """The sequences of `sources`; sequence i of source number s of S has the index i * S + s.

    Args:
        sources: by name, with the same `seq_len`, and streams with the seed `get_source_seed(seed, name)`.
        weights: of each source, more than 0; None: as many sequences of each as it has.

    Raises:
        DataError: some sources have preference pairs and others have not; without weights, a source has no known end.
    """

    def __init__(self, sources: Mapping[str, SequenceDataset], weights: Sequence[float] | None) -> None:
        self.names, self.parts = list(sources), list(sources.values())
        self.seq_len = self.parts[0].seq_len
        self.form = _get_form(sources)
        self.num_validation_sequences = sum(part.num_validation_sequences for part in self.parts)
        self._order = _Order(_get_sizes(sources) if weights is None else _get_quotas(weights))
        # Sequences of an epoch of all sources; None with weights, with which each has epochs of its own.
        self.num_train_sequences = self._order.length if weights is None else None

    @property
    def vocab_size(self) -> int:
        """The largest of all sources."""
        return max(part.vocab_size for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """The fingerprints of the sources, with their shares where these are chosen."""
        shares = [f" {source.share:.2%}" if self.num_train_sequences is None else "" for source in self.sources]
        parts = zip(self.sources, shares, strict=True)
        return "; ".join(f"{source.name}{share}: {source.dataset.fingerprint}" for source, share in parts)

    @property
    def sources(self) -> list[Source]:
        """The sources with their shares of the training sequences."""
        shares = (self._order.quotas / self._order.length).tolist()
        return [Source(*item) for item in zip(self.names, shares, self.parts, strict=True)]

    def get_train_indices(self, seed: int, start: int, stop: int) -> np.ndarray:
        """Sequence indices (stop - start,) int64 of the training samples [start, stop), counted from the first step."""
        indices = np.empty(stop - start, dtype=np.int64)
        for places, number, first in self._order.get_runs(seed, start, stop):
            part, part_seed = self.parts[number], get_source_seed(seed, self.names[number])
            of_part = part.get_train_indices(part_seed, first, first + len(places))
            indices[places - start] = of_part * len(self.parts) + number
        return indices

    def get_validation_indices(self, start: int, stop: int) -> np.ndarray:
        """Sequence indices (stop - start,) int64 of the validation samples [start, stop), one source after the other.

        Past the last they repeat. A loader takes the held-out sequences of each source by themselves.
        """
        ends = np.cumsum([part.num_validation_sequences for part in self.parts])
        samples = np.arange(start, stop, dtype=np.int64) % ends[-1]
        numbers = np.searchsorted(ends, samples, side="right")
        indices = np.empty_like(samples)
        for number, (part, end) in enumerate(zip(self.parts, ends.tolist(), strict=True)):
            which = numbers == number
            first = end - part.num_validation_sequences
            found = [part.get_validation_indices(place, place + 1)[0] for place in (samples[which] - first).tolist()]
            indices[which] = np.array(found, dtype=np.int64) * len(self.parts) + number
        return indices

    def locate(self, index: int) -> tuple[str, SequenceDataset, int]:
        """Name and dataset of the source that sequence `index` is of, and its index there."""
        place, number = divmod(int(index), len(self.parts))
        return self.names[number], self.parts[number], place

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """The sequences `indices` (B,), as CPU tensors in that order.

        Raises:
            IndexError: an index is negative, or the source has no such sequence.
        """
        places_B, numbers_B = np.divmod(np.asarray(indices, dtype=np.int64), len(self.parts))
        order = np.argsort(numbers_B, kind="stable")
        batches = [self.parts[number].batch(places_B[numbers_B == number]) for number in np.unique(numbers_B)]
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        names = [field.name for field in fields(Batch)]
        return Batch(**{name: torch.cat([getattr(batch, name) for batch in batches])[back] for name in names})


def get_sources(dataset: SequenceDataset) -> list[Source]:
    """The sources of a mixture, or the one that `dataset` is."""
    return dataset.sources if isinstance(dataset, MixtureDataset) else [Source("", 1.0, dataset)]


def get_use(dataset: SequenceDataset, num_samples: int) -> list[Use]:
    """How much of each source the first `num_samples` samples take, to within a period."""
    found = []
    for name, share, part in get_sources(dataset):
        size = part.num_train_sequences
        found.append(Use(name, round(num_samples * share), None if size is None else num_samples * share / size))
    return found


def _get_form(sources: Mapping[str, SequenceDataset]) -> str:
    forms = {name: part.form for name, part in sources.items()}
    pairs = [name for name, form in forms.items() if form == "preference"]
    if pairs and len(pairs) < len(forms):
        others = ", ".join(f"{name} ({form})" for name, form in forms.items() if name not in pairs)
        raise DataError(
            f"data.sources: {', '.join(pairs)} has preference pairs, but {others} has none, and a run has one "
            "objective. Give it one kind of sources."
        )
    kinds = dict.fromkeys(forms.values())
    return next((form for form in kinds if form != "text"), "text")


class _Order:
    """Periods of `sum(quotas)` samples, in each of which source s has quotas[s] places, by (seed, period)."""

    def __init__(self, quotas: np.ndarray) -> None:
        self.quotas, self.length = quotas, int(quotas.sum())
        places = np.repeat(np.arange(len(quotas), dtype=np.int32), quotas)
        # A step can straddle two periods.
        self._get_period = lru_cache(maxsize=2)(lambda seed, period: places[get_permutation(seed, period, self.length)])

    def get_runs(self, seed: int, start: int, stop: int) -> Iterator[tuple[np.ndarray, int, int]]:
        """Where each source is in the samples [start, stop): (samples (n,) int64, source, number of the first there).

        In a source they follow each other. Each source comes once for each period.
        """
        firsts = range(start - start % self.length + self.length, stop, self.length)
        for low, high in pairwise([start, *firsts, stop]):
            period, place = divmod(low, self.length)
            sources = self._get_period(seed, period)
            before, here = sources[:place], sources[place : place + high - low]
            for number in np.unique(here).tolist():
                first = period * int(self.quotas[number]) + int(np.count_nonzero(before == number))
                yield low + np.flatnonzero(here == number), number, first


def _get_quotas(weights: Sequence[float]) -> np.ndarray:
    """The weights as int64 that add up to `PERIOD`: largest remainders, and at least 1 each."""
    exact = PERIOD * np.asarray(weights, dtype=np.float64) / np.sum(weights)
    quotas = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: PERIOD - int(quotas.sum())]] += 1
    for number in np.flatnonzero(quotas == 0):
        quotas[number] = 1
        quotas[np.argmax(quotas)] -= 1
    return quotas


def _get_sizes(sources: Mapping[str, SequenceDataset]) -> np.ndarray:
    for name, part in sources.items():
        if part.num_train_sequences is None:
            raise DataError(f"data.sources.{name}: the size of a stream is not known. Set the weight of every source.")
    return np.array([part.num_train_sequences for part in sources.values()], dtype=np.int64)
