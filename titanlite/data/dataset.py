"""Packed sequences: the token array, cut every seq_len tokens even within documents.

Shape suffixes: B sequences in a batch, L tokens per sequence.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from titanlite.base.errors import DataError
from titanlite.data.tokens import TokenizedCorpus
from titanlite.ops import IGNORE_INDEX
from titanlite.ops.attention import find_starts

_ROUNDS = 6  # rounds of the Feistel network
_MIX = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
# Enough to distinguish one corpus from another.
_CHECKED_TOKENS = 1 << 20


@dataclass(frozen=True)
class Batch:
    """B sequences of L tokens; all tensors are int64 and of shape (B, L)."""

    tokens: Tensor  # input token ids
    # the next token, or -100 if there is none to predict, as after an end-of-text token
    labels: Tensor
    positions: Tensor  # of the token in its document, counted from the document's start in this row
    # Documents of the row, counted from 0; attention must not cross them. Padding has -1. Of a
    # preference pair, the chosen answer has the id 2n and the rejected one 2n + 1, in the same row.
    document_ids: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Further keyword arguments of the model's forward; see `ImageBatch`."""
        return {}

    def count_tokens(self) -> Tensor:
        """Count the tokens without padding: int64 scalar on the batch's device; no
        synchronization.
        """
        if self.document_ids is None:  # in benchmarks: a row is one document
            return torch.tensor(self.tokens.numel(), device=self.tokens.device)
        return (self.document_ids >= 0).sum()

    def to(self, device: torch.device | str) -> "Batch":
        """Return a copy of the batch on `device`; tensors that are already there are shared."""
        moved = {field.name: copy_to(device, getattr(self, field.name)) for field in fields(Batch)}
        if torch.device(device).type == "cuda" and self.document_ids.device.type == "cpu":
            return BatchWithStarts(**moved, starts=copy_to(device, find_starts(self.document_ids)))
        return Batch(**moved)

    def with_rows(self, count: int) -> "Batch":
        """Return a batch of the same shape whose rows from `count` on are padding, without labels
        and documents.
        """
        if count >= len(self.tokens):
            return self
        fill = {"labels": IGNORE_INDEX, "positions": 0, "document_ids": -1}
        kept = (torch.arange(len(self.tokens), device=self.tokens.device) < count).unsqueeze(1)
        return replace(
            self, **{name: getattr(self, name).where(kept, value) for name, value in fill.items()}
        )


@dataclass(frozen=True)
class BatchWithStarts(Batch):
    """A batch on a CUDA device with the starts of its documents, which `find_starts` found without
    a wait on the host.
    """

    starts: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"starts_N1": self.starts}


def copy_to(device: torch.device | str, tensor: Tensor) -> Tensor:
    """Return `tensor` on `device`; if it is there already, return it unchanged. A copy from the
    host to CUDA is queued, from pinned memory.

    A copy from pageable memory would wait for all queued work.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class TrainDataset(Protocol):
    """Data for a loader: numbered sequences, and an order that is a function of only (seed,
    sample).
    """

    seq_len: int

    @property
    def num_train_sequences(self) -> int | None:
        """Number of sequences of one epoch; None for a stream, whose end is not known."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest token id that a batch can hold, plus one."""
        ...

    @property
    def form(self) -> str:
        """Format of the rows: "text", or a format of `features/sft/forms.py`, such as "preference"
        for pairs.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """Description of the sequences: equal for equal sequences."""
        ...

    def get_train_indices(self, seed: int, start: int, stop: int) -> np.ndarray:
        """Sequence indices (stop - start,) int64 of the training samples [start, stop)."""
        ...

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the sequences `indices` (B,), as CPU tensors in that order."""
        ...


class SequenceDataset(TrainDataset, Protocol):
    """A `TrainDataset` with held-out sequences: the data of one source."""

    num_validation_sequences: int

    def get_validation_indices(self, start: int, stop: int) -> np.ndarray:
        """Sequence indices (stop - start,) int64 of the validation samples [start, stop), repeating
        past the last.
        """
        ...


class Source(NamedTuple):
    """One of the datasets that a run reads, with its share of the training sequences; without a
    name if it is the only one.
    """

    name: str
    share: float
    dataset: SequenceDataset


@runtime_checkable
class Mixture(Protocol):
    """A dataset that reads several sources and tracks a position in each."""

    # by name: sequences taken from a source in addition to those that follow from its share
    offsets: dict[str, int]

    @property
    def sources(self) -> list[Source]:
        """The sources with their shares of the training sequences."""
        ...

    def get_taken(self, seed: int, samples: int) -> dict[str, int]:
        """Return the position of each source, in sequences, before training sample `samples`."""
        ...

    def resume_at(self, seed: int, samples: int, taken: Mapping[str, int]) -> None:
        """Continue at sample `samples`, where each source has given its `taken` sequences; new
        sources begin at 0.
        """


def get_sources(dataset: TrainDataset) -> list[Source]:
    """Return the sources of a mixture, or `dataset` as the only source."""
    return (
        dataset.sources
        if isinstance(dataset, Mixture)
        else [Source("", 1.0, cast(SequenceDataset, dataset))]
    )


class ShuffledSequences:
    """A `SequenceDataset` with training sequences in a shuffled order, followed by the held-out
    sequences.

    Training sample n is number n % N of epoch n // N, and each epoch is a permutation of the N
    sequences that depends only on (seed, epoch). It is computed for the requested positions
    (`permute_places`): storing a permutation of 244 million sequences would take 6 GB.
    """

    num_train_sequences: int
    num_validation_sequences: int

    def get_train_indices(self, seed: int, start: int, stop: int) -> np.ndarray:
        samples = np.arange(start, stop, dtype=np.int64)
        epochs, places = np.divmod(samples, self.num_train_sequences)
        indices = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute_places(seed, int(epoch), self.num_train_sequences, places[here])
        return indices

    def get_validation_indices(self, start: int, stop: int) -> np.ndarray:
        return (
            self.num_train_sequences
            + np.arange(start, stop, dtype=np.int64) % self.num_validation_sequences
        )


class PackedDataset(ShuffledSequences):
    """Sequence i is `tokens[i * L : i * L + L + 1]`: L inputs and, shifted by one, L labels.

    The last `get_num_held_out` sequences are held out. The last label of the training part is the
    first input of the held-out part, and is not a label there: no prediction is both trained and
    validated.

    Raises DataError: there are fewer than two sequences (one, if no sequence is held out).
    """

    form = "text"

    def __init__(
        self, tokenized: TokenizedCorpus, seq_len: int, validation_share: float | None = None
    ) -> None:
        num_tokens = len(tokenized.tokens)
        num_sequences = max(0, num_tokens - 1) // seq_len  # the last label needs one more token
        holds_out = validation_share != 0
        if num_sequences < 1 + holds_out:
            needed = (
                "2 are needed, one to train on and one held out" if holds_out else "1 is needed"
            )
            raise DataError(
                f"data: {num_tokens} tokens give {num_sequences} sequence(s) of training.seq_len "
                f"({seq_len}), but {needed}. Lower training.seq_len or use more text."
            )
        self.tokenized = tokenized
        self.seq_len = seq_len
        self.num_sequences = num_sequences
        self.validation_share = validation_share
        self.num_validation_sequences = get_num_held_out(num_sequences, validation_share)
        self.num_train_sequences = num_sequences - self.num_validation_sequences

    @property
    def vocab_size(self) -> int:
        return self.tokenized.vocab_size

    @property
    def fingerprint(self) -> str:
        """Description by tokens, documents, a checksum and the length of a sequence."""
        tokens = self.tokenized.tokens
        checksum = zlib.crc32(tokens[:_CHECKED_TOKENS].tobytes())
        held_out = f", {self.num_validation_sequences} held out"
        return (
            f"{len(tokens)} tokens in {self.tokenized.num_documents} documents (checksum "
            f"{checksum:08x}), sequences of {self.seq_len}"
            f"{'' if self.validation_share is None else held_out}"
        )

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        seq_len = self.seq_len
        starts = (int(index) * seq_len for index in indices)
        rows = [self.tokenized.tokens[start : start + seq_len + 1] for start in starts]
        rows_BL1 = np.stack(rows).astype(np.int64)
        tokens_BL = rows_BL1[:, :-1]
        is_end_BL = tokens_BL == self.tokenized.eos_token_id
        labels_BL = np.where(is_end_BL, IGNORE_INDEX, rows_BL1[:, 1:])

        is_start_BL = np.zeros_like(is_end_BL)
        is_start_BL[:, 1:] = is_end_BL[:, :-1]
        arange_L = np.arange(seq_len, dtype=np.int64)
        positions_BL = arange_L - np.maximum.accumulate(np.where(is_start_BL, arange_L, 0), axis=1)
        document_ids_BL = np.cumsum(is_start_BL, axis=1, dtype=np.int64)
        return Batch(
            tokens=torch.from_numpy(np.ascontiguousarray(tokens_BL)),
            labels=torch.from_numpy(labels_BL),
            positions=torch.from_numpy(positions_BL),
            document_ids=torch.from_numpy(document_ids_BL),
        )


def get_num_held_out(total: int, share: float | None = None) -> int:
    """Return how many of `total` are held out: the fraction `share` (0: none; otherwise at least 1,
    and not all).

    By default it is 1 %, but at least the smaller of 64 and 10 %, and at least 1.
    """
    if share is None:
        return max(-(-total // 100), min(64, total // 10), 1)
    return min(max(round(share * total), 1), total - 1) if share else 0


def permute_places(
    seed: int, epoch: int, num_sequences: int, places: np.ndarray | None = None
) -> np.ndarray:
    """Map the positions `places` (n,) int64, by default all, through a permutation of
    `num_sequences` that is keyed by (seed, epoch).

    A Feistel network permutes the numbers below the next power of four. Results outside of the
    range are mapped again until they are inside (cycle walking: Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains"), at most four times on average.
    """
    half = np.uint64(max(-(-(num_sequences - 1).bit_length() // 2), 1))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(
        _ROUNDS
    )
    places = np.arange(num_sequences) if places is None else places
    found = places.astype(np.uint64)
    walking = np.ones(len(found), dtype=bool)
    while walking.any():
        left = found[walking] >> half
        right = found[walking] & mask
        for key in keys:
            mixed = (right ^ key) * _MIX[0]  # splitmix64's finalizer, modulo 2**64
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(27))) >> np.uint64(32)) & mask
        found[walking] = left << half | right
        walking = found >= num_sequences
    return found.astype(np.int64)
