"""Several datasets as one: sample n is a sequence of one of them, chosen by a function of (seed, n)
alone.

Samples come in periods. In each period every source has a fixed number of samples, its quota, in an
order that depends on (seed, period). So the fractions are exact in every period, and a run resumes
at any sample without counting from the first one. With weights, a period has 16384 samples, and
each source has its own epochs. Without weights, a period is an epoch of all sources; at most 16384
of its samples are in memory at a time.
"""

import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from titanlite.base.errors import DataError
from titanlite.base.text import list_names
from titanlite.config import data as data_config
from titanlite.config.data import SourceSection
from titanlite.config.schema import JobConfig
from titanlite.data.dataset import (
    Batch,
    SequenceDataset,
    Source,
    permute_places,
)
from titanlite.data.loader import build_packed, resolve_tokenizer_path
from titanlite.features.sft.build import build_example_dataset, load_example_tokenizer
from titanlite.features.streams.stream import build_stream_dataset

PERIOD = 1 << 14  # samples, if there are weights: fractions are multiples of 1/16384


def get_source_seed(seed: int, name: str) -> int:
    """Return the seed for the order of source `name`, because sources of equal size must not have
    the same order.
    """
    return seed + (zlib.crc32(name.encode()) << 32)


class MixtureDataset:
    """The sequences of `sources`; sequence i of source number s of S has the index i * S + s.

    Attributes:
        offsets: number of sequences that a source is ahead of its quota, in a run that began with a
            different mixture (`resume_at`).

    Raises:
        DataError: only some sources have preference pairs.
    """

    def __init__(
        self, sources: Mapping[str, SequenceDataset], weights: Mapping[str, float] | None
    ) -> None:
        # sorted, so that the order in the configuration does not matter
        self.names = sorted(sources)
        self.parts = [sources[name] for name in self.names]
        self.seq_len = self.parts[0].seq_len
        self.form = _get_form(sources)
        if weights is None and len(sources) == 1:
            weights = dict.fromkeys(self.names, 1.0)  # a stream may be the only one
        self.order = _Order(
            np.array([part.num_train_sequences for part in self.parts], dtype=np.int64)
            if weights is None
            else _get_quotas([weights[name] for name in self.names])
        )
        # number of sequences in an epoch of all sources; None with weights, because each source
        # then has its own epochs
        self.num_train_sequences = self.order.length if weights is None else None
        self.offsets: dict[str, int] = {}

    @property
    def vocab_size(self) -> int:
        return max(part.vocab_size for part in self.parts)

    @property
    def fingerprint(self) -> str:
        quotas = [
            f" {quota}/{PERIOD}" if self.num_train_sequences is None else ""
            for quota in self.order.quotas
        ]
        parts = zip(self.names, quotas, self.parts, strict=True)
        return "; ".join(f"{name}{quota}: {part.fingerprint}" for name, quota, part in parts)

    @property
    def sources(self) -> list[Source]:
        shares = (self.order.quotas / self.order.length).tolist()
        return [Source(*item) for item in zip(self.names, shares, self.parts, strict=True)]

    def get_taken(self, seed: int, samples: int) -> dict[str, int]:
        """Return the position of each source, in sequences, before training sample `samples`."""
        counts = self.order.count_before(seed, samples).tolist()
        return {
            name: self.offsets.get(name, 0) + n for name, n in zip(self.names, counts, strict=True)
        }

    def resume_at(self, seed: int, samples: int, taken: Mapping[str, int]) -> None:
        """Continue at sample `samples`, with each source after its `taken` sequences; new sources
        begin at 0.
        """
        self.offsets = {}
        here = self.get_taken(seed, samples)
        self.offsets = {name: n for name in self.names if (n := taken.get(name, 0) - here[name])}

    def get_train_indices(self, seed: int, start: int, stop: int) -> np.ndarray:
        """Return the indices (stop - start,) int64 of the training samples [start, stop), which are
        counted from the first step.
        """
        indices = np.empty(stop - start, dtype=np.int64)
        sources = self.order.get_sources(seed, start, stop)
        for number, (name, first) in enumerate(self.get_taken(seed, start).items()):
            places = np.flatnonzero(sources == number)
            last = first + len(places)
            part_seed = get_source_seed(seed, name)
            with naming_source(name):
                of_part = self.parts[number].get_train_indices(part_seed, first, last)
            indices[places] = of_part * len(self.parts) + number
        return indices

    def locate(self, index: int) -> tuple[str, SequenceDataset, int]:
        """Return name and dataset of the source of sequence `index`, and its index there."""
        place, number = divmod(int(index), len(self.parts))
        return self.names[number], self.parts[number], place

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        rows = []
        for index in indices:
            name, part, place = self.locate(index)
            with naming_source(name):
                rows.append(part.batch([place]))
        names = [field.name for field in fields(Batch)]
        return Batch(**{name: torch.cat([getattr(row, name) for row in rows]) for name in names})


@contextmanager
def naming_source(name: str) -> Iterator[None]:
    """Add the source to a `DataError` of the body, and name settings by the source's keys."""
    try:
        yield
    except DataError as error:
        own = "|".join(field.name for field in fields(SourceSection))
        text = re.sub(
            rf"\bdata\.({own})\b", rf"data.sources.{name}.\1", str(error).removeprefix("data: ")
        )
        raise DataError(f"data.sources.{name}: {text}") from None


def _get_form(sources: Mapping[str, SequenceDataset]) -> str:
    forms = {name: part.form for name, part in sorted(sources.items())}
    pairs = [name for name, form in forms.items() if form == "preference"]
    if pairs and (unknown := [name for name, form in forms.items() if form == "auto"]):
        raise DataError(
            f"data.sources: {list_names(pairs)} has preference pairs; the format of a stream is "
            f'not known before it is read. Set data.sources.{unknown[0]}.format = "preference".'
        )
    if pairs and len(pairs) < len(forms):
        others = list_names(f"{name} ({form})" for name, form in forms.items() if name not in pairs)
        raise DataError(
            f"data.sources: {list_names(pairs)} has preference pairs, but {others} has none, and a "
            "run has one objective. Give it one kind of sources."
        )
    kinds = dict.fromkeys(forms.values())
    return next((form for form in kinds if form != "text"), "text")


class _Order:
    """Order of periods of `sum(quotas)` samples, in each of which source s has quotas[s] samples,
    by (seed, period).

    A period is divided into pieces of `PERIOD` samples, and the samples of a source are spread
    evenly over the pieces. Only one piece at a time is shuffled and in memory.
    """

    def __init__(self, quotas: np.ndarray) -> None:
        self.quotas = quotas
        self.length = int(quotas.sum())
        self._get_piece = lru_cache(maxsize=2)(self._make_piece)  # a step may need two pieces

    def _find_piece(self, seed: int, sample: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return, for the piece that contains `sample`, its first sample, the number of samples of
        each source before it, (S,) int64, and the source of each of its samples, int16.
        """
        period, place = divmod(sample, self.length)
        return self._get_piece(seed, period, place // PERIOD)

    def _make_piece(self, seed: int, period: int, piece: int) -> tuple[int, np.ndarray, np.ndarray]:
        start = piece * PERIOD
        stop = min(start + PERIOD, self.length)
        before = self._count_first(start)
        quotas = self._count_first(stop) - before
        sources = np.repeat(np.arange(len(quotas), dtype=np.int16), quotas)
        number = period * -(-self.length // PERIOD) + piece
        shuffled = sources[permute_places(seed, number, stop - start)]
        return period * self.length + start, period * self.quotas + before, shuffled

    def _count_first(self, places: int) -> np.ndarray:
        """Count the first `places` samples of a period by source, (S,) int64, if sources are spread
        evenly: sample k of the q samples of a source is due at (2k + 1) / 2q of the period. If
        several are due at the same point, the order of the sources decides.
        """

        def count_due(time: int) -> np.ndarray:
            return np.array(
                [(2 * q * time + self.length) // (2 * self.length) for q in self.quotas.tolist()]
            )

        time = (
            bisect_right(range(self.length + 1), places, key=lambda time: count_due(time).sum()) - 1
        )
        counts = count_due(time)
        due = count_due(min(time + 1, self.length)) - counts
        return counts + np.clip(places - counts.sum() - np.cumsum(due) + due, 0, due)

    def count_before(self, seed: int, sample: int) -> np.ndarray:
        """Count the samples of each source before `sample`, (S,) int64."""
        start, before, sources = self._find_piece(seed, sample)
        return before + np.bincount(sources[: sample - start], minlength=len(self.quotas))

    def get_sources(self, seed: int, start: int, stop: int) -> np.ndarray:
        """Return the source of each of the samples [start, stop), int16."""
        found = [np.empty(0, np.int16)]
        while start < stop:
            first, _, sources = self._find_piece(seed, start)
            found.append(sources[start - first : stop - first])
            start += len(found[-1])
        return np.concatenate(found)


def _get_quotas(weights: Sequence[float]) -> np.ndarray:
    """Return int64 quotas, at least 1 each, that add up to `PERIOD`, by the method of largest
    remainders.
    """
    # divided first, because the sum of huge weights would be infinite
    shares = np.asarray(weights, dtype=np.float64) / np.max(weights)
    exact = PERIOD * shares / shares.sum()
    quotas = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: PERIOD - int(quotas.sum())]] += 1
    for number in np.flatnonzero(quotas == 0):
        quotas[number] = 1
        quotas[np.argmax(quotas)] -= 1
    return quotas


def build_mixture(job: JobConfig) -> tuple[Any, MixtureDataset]:
    """Build the tokenizer and the mixture of `data.sources`. DataError: a source cannot be used;
    the message names it.
    """
    data = resolve_tokenizer_path(job)
    seq_len = job.training.seq_len
    # for text, too: a tokenizer would be trained on the first source only
    tokenizer = load_example_tokenizer(data)
    parts: dict[str, SequenceDataset] = {}
    for name, source in data_config.get_sources(data).items():
        where = f"data.sources.{name}"
        with naming_source(name):
            if source.dataset != "examples":
                _, parts[name] = build_packed(source, seq_len, where, tokenizer)
            elif source.streaming:
                seed = get_source_seed(job.training.seed, name)
                _, parts[name] = build_stream_dataset(source, seq_len, seed, where, tokenizer)
            else:
                _, parts[name] = build_example_dataset(source, seq_len, where, tokenizer)
    weights = {
        name: source.weight for name, source in data.sources.items() if source.weight is not None
    }
    return tokenizer, MixtureDataset(parts, weights or None)
