"""Examples packed into rows: each example, or piece of a long document, in one row, several to a
row where they fit.

Shape suffixes: B rows in a batch, L tokens per row.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

import numpy as np
import torch

from titanlite.base.errors import DataError, raise_problems
from titanlite.config.data import TooLong
from titanlite.data.dataset import (
    Batch,
    ShuffledOrder,
    ShuffledSequences,
    get_num_held_out,
    get_permutation,
)
from titanlite.features.sft.chat import TRAINED
from titanlite.features.sft.examples import TokenizedExamples
from titanlite.features.sft.forms import Form
from titanlite.ops import IGNORE_INDEX

_HOLD_OUT_SEED = 0  # not training.seed: another seed is another order of the same training data


@dataclass(frozen=True)
class ExampleSet:
    """Examples, or pieces of them, that fit into a row, with the part to use of each of their
    documents.

    Attributes:
        selected: (n,) int64, the examples that are used; one that was split is there several times.
        starts, lengths: (n, D) int64, what to use of each of the D documents of an example.
        dropped: examples left out, by reason.
    """

    examples: TokenizedExamples
    selected: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    num_cut: int = 0
    num_split: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def subset(self, which: np.ndarray) -> "ExampleSet":
        """Return the examples `which`, indices or a mask over `selected`; counts stay with the
        whole.
        """
        return ExampleSet(
            self.examples, self.selected[which], self.starts[which], self.lengths[which]
        )

    def get_documents(self, member: int) -> Iterator[slice]:
        """Return the used parts of the documents of example `member`, as places in `tokens` and
        `flags`.
        """
        places = self.examples.get_documents(int(self.selected[member]))
        parts = zip(
            places, self.starts[member].tolist(), self.lengths[member].tolist(), strict=True
        )
        return (
            slice(place.start + start, place.start + start + length)
            for place, start, length in parts
        )

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def num_trained(self) -> int:
        """Tokens that the loss is taken on."""
        if self.examples.header.form == "text":  # every token except the first is trained
            return int((self.lengths - 1).sum())
        size = self.examples.header.documents_per_example
        full = np.diff(self.examples.offsets).reshape(-1, size)[self.selected]
        trained = self.examples.num_trained.reshape(-1, size)[self.selected]
        total = int(trained[full == self.lengths].sum())
        for example, document in np.argwhere(full != self.lengths):
            total += _count_trained(
                self.examples, int(self.selected[example]), document, self.lengths[example]
            )
        return total


def _count_trained(
    examples: TokenizedExamples, example: int, document: int, lengths: np.ndarray
) -> int:
    """Count the trained labels of one document in its first `lengths[document]` tokens."""
    start = int(examples.offsets[example * examples.header.documents_per_example + document])
    return int(
        np.count_nonzero(examples.flags[start + 1 : start + int(lengths[document])] & TRAINED)
    )


def fit_examples(
    examples: TokenizedExamples, seq_len: int, too_long: TooLong, *, may_be_empty: bool = False
) -> ExampleSet:
    """Return the examples that fit into `seq_len` tokens, or can be made to.

    'cut' keeps the first tokens; of a pair, the shorter side keeps what it has and the longer one
    the rest, or each gets half. A cut example without a trained token is dropped, and counted.
    'split' is for documents of plain text: each becomes pieces of `seq_len` tokens and a rest
    (arXiv:2404.10830). Here the last token of a piece is the first of the next, so that each token
    is predicted once, as in a whole document.

    Raises:
        DataError: an example is too long and `too_long` is 'error' (names the rows), or none is
            left and `may_be_empty` is off; `too_long` is 'split' for another form than 'text', or
            for a `seq_len` of 1.
    """
    form, size = examples.header.form, examples.header.documents_per_example
    if too_long == "split" and (form != "text" or seq_len < 2):
        what = (
            f"the examples are of form '{form}'"
            if form != "text"
            else f"training.seq_len is {seq_len}"
        )
        raise DataError(
            "data: too_long = \"split\" is for documents of plain text (form 'text') and pieces of "
            "2 tokens or more, "
            f'but {what}. Set data.too_long to "cut" or "drop".'
        )
    lengths = np.diff(examples.offsets).reshape(-1, size)
    is_long = lengths.sum(1) > seq_len
    selected, starts = np.arange(len(lengths)), np.zeros_like(lengths)
    if too_long == "split" and is_long.any():
        return _split(examples, lengths[:, 0], seq_len)
    if too_long == "error" and is_long.any():
        found = np.flatnonzero(is_long)
        problems = [
            f"{examples.describe_place(i)}: {lengths[i].sum()} tokens" for i in found.tolist()
        ]
        remedy = 'Raise training.seq_len, or set data.too_long to "cut" or "drop".'
        if len(problems) == 1:
            raise DataError(f"data: {problems[0]}, but training.seq_len is {seq_len}. {remedy}")
        longest = lengths.sum(1).max()
        where = (
            f"data: examples longer than training.seq_len ({seq_len}), the longest of {longest} "
            f"tokens. {remedy}"
        )
        raise_problems(DataError, where.rstrip("."), problems)
    kept, dropped = np.ones(len(lengths), dtype=bool), {}

    def drop(which: np.ndarray, reason: str) -> None:
        kept[which] = False
        if len(which):
            dropped[reason] = len(which)

    if too_long == "drop":
        drop(np.flatnonzero(is_long), f"longer than {seq_len} tokens")
    elif is_long.any():
        lengths = lengths.copy()
        lengths[is_long] = _cut_lengths(lengths[is_long], seq_len)
        untrained = [
            i
            for i in np.flatnonzero(is_long).tolist()
            if not all(
                _count_trained(examples, i, document, lengths[i]) for document in range(size)
            )
        ]
        drop(np.array(untrained, dtype=np.int64), f"no trained token among the first {seq_len}")
    num_cut = int(np.count_nonzero(is_long & kept))
    if not kept.any() and not may_be_empty:
        raise DataError(
            f"data: none of {len(kept)} examples fits into training.seq_len ({seq_len}): "
            f"{', '.join(f'{count} {reason}' for reason, count in dropped.items())}. Raise "
            "training.seq_len."
        )
    return ExampleSet(
        examples, selected[kept], starts[kept], lengths[kept], num_cut=num_cut, dropped=dropped
    )


def _split(examples: TokenizedExamples, lengths: np.ndarray, seq_len: int) -> ExampleSet:
    """Split documents of `lengths` (n,) into pieces of at most `seq_len` tokens that overlap by one
    token.
    """
    step = seq_len - 1
    num_pieces = np.maximum(-(-(lengths - 1) // step), 1)
    selected = np.repeat(np.arange(len(lengths)), num_pieces)
    numbers = np.arange(len(selected)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = numbers * step
    pieces = np.minimum(lengths[selected] - starts, seq_len)
    num_split = int(np.count_nonzero(num_pieces > 1))
    return ExampleSet(examples, selected, starts[:, None], pieces[:, None], num_split=num_split)


def _cut_lengths(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    if lengths.shape[1] == 1:
        return np.full_like(lengths, seq_len)
    shorter = np.minimum(lengths.min(1), seq_len // 2)
    is_shorter = np.arange(2) == lengths.argmin(1)[:, None]
    return np.minimum(lengths, np.where(is_shorter, shorter[:, None], seq_len - shorter[:, None]))


def hold_out(whole: ExampleSet, share: float | None = None) -> tuple[ExampleSet, ExampleSet]:
    """Return (training set, held-out set): a fixed random choice of rows, as many as
    `get_num_held_out` says.

    By rows, because answers of one conversation share its text; not the last rows, because files
    are often sorted.

    Raises:
        DataError: there are fewer than two rows, and some are to be held out.
    """
    places = whole.examples.places[whole.selected]
    rows, row_of = np.unique(places, return_inverse=True)
    if len(rows) < 2 and share != 0:
        raise DataError(
            f"data: {len(rows)} usable row(s), but 2 are needed, one to train on and one held out. "
            "Add rows, or set data.validation_path, or data.validation_share = 0."
        )
    is_held_out = np.zeros(len(rows), dtype=bool)
    is_held_out[
        get_permutation(_HOLD_OUT_SEED, 0, len(rows))[: get_num_held_out(len(rows), share)]
    ] = True
    return whole.subset(~is_held_out[row_of]), whole.subset(is_held_out[row_of])


class ExampleDataset(ShuffledSequences):
    """Training rows, then held-out rows, of `seq_len` tokens each.

    With `packing`, examples are packed best-fit-decreasing, which depends on their lengths alone;
    without, each has a row for itself. Padding has the token `pad_token_id`, the label -100, the
    position 0 and the document id -1. `sources` are the sets that `train` and `held_out` were taken
    from, with what was cut and dropped in them.
    """

    def __init__(
        self,
        train: ExampleSet,
        held_out: ExampleSet,
        sources: tuple[ExampleSet, ...],
        seq_len: int,
        pad_token_id: int,
        *,
        packing: bool,
    ) -> None:
        self.train = train
        self.held_out = held_out
        self.sources = sources
        self.seq_len = seq_len
        self.pad_token_id = pad_token_id
        self.packing = packing
        self._rows = [
            (train, members) for members in pack_examples(train, seq_len, packing=packing)
        ]
        self.num_train_sequences = len(self._rows)
        self.order = ShuffledOrder(self.num_train_sequences)
        # in the mean; pairs are one
        self.examples_per_sequence = len(train.selected) / self.num_train_sequences
        self._rows += [
            (held_out, members) for members in pack_examples(held_out, seq_len, packing=packing)
        ]
        self.num_sequences = len(self._rows)
        self.num_validation_sequences = self.num_sequences - self.num_train_sequences
        # Examples, tokens, a digest of their source and of the way they are laid out, in words.
        self.fingerprint = self._describe()

    @property
    def vocab_size(self) -> int:
        sizes = [part.examples.header.vocab_size for part in (self.train, self.held_out)]
        return max(*sizes, self.pad_token_id + 1)

    @property
    def stop_token_ids(self) -> set[int]:
        return {token for source in self.sources for token in source.examples.header.stop_token_ids}

    @property
    def form(self) -> Form:
        return self.train.examples.header.form

    @property
    def packing_efficiency(self) -> float:
        """Share of the training rows that is not padding."""
        return self.train.num_tokens / (self.num_train_sequences * self.seq_len)

    def _describe(self) -> str:
        parts = [
            self.packing,
            self.train.selected.tobytes(),
            self.train.lengths.tobytes(),
            self.train.examples.content,
        ]
        digest = sha256()
        for part in parts:
            digest.update(part if isinstance(part, bytes) else str(part).encode())
        return (
            f"{len(self.train.selected)} examples of {self.train.num_tokens} tokens (digest "
            f"{digest.hexdigest()[:8]}), sequences of {self.seq_len}"
        )

    def get_members(self, index: int) -> tuple[ExampleSet, np.ndarray]:
        """Return the set of the examples in sequence `index`, and their numbers in order."""
        return self._rows[index]

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        places = np.asarray(indices, dtype=np.int64)
        if places.size == 0 or places.min() < 0 or places.max() >= self.num_sequences:
            raise IndexError(
                f"sequence indices {list(indices)} are not all in [0, {self.num_sequences})"
            )
        return make_batch(
            [get_documents(*self._rows[i]) for i in places.tolist()],
            self.seq_len,
            self.pad_token_id,
        )


def pack_examples(part: ExampleSet, seq_len: int, *, packing: bool) -> list[np.ndarray]:
    """Return the examples in each row, as numbers into `part.selected`; without `packing`, one to a
    row.
    """
    if packing:
        return pack_best_fit(part.lengths.sum(1), seq_len)
    return list(np.arange(len(part.selected)).reshape(-1, 1))


def get_documents(part: ExampleSet, members: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, flags) of all documents of `members`, in order: of a pair first chosen, then
    rejected.
    """
    for member in members.tolist():
        for used in part.get_documents(member):
            yield part.examples.tokens[used], part.examples.flags[used]


def make_batch(
    rows: Sequence[Iterable[tuple[np.ndarray, np.ndarray]]], seq_len: int, pad_token_id: int
) -> Batch:
    """Return a batch of rows, each of documents (ids, flags) that fit into `seq_len` together.

    The label of a token is the next one of its document, where that is trained; the last token of a
    document has none.
    """
    shape = (len(rows), seq_len)
    tokens_BL = np.full(shape, pad_token_id, dtype=np.int64)
    labels_BL = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    positions_BL = np.zeros(shape, dtype=np.int64)
    document_ids_BL = np.full(shape, -1, dtype=np.int64)
    for row, documents in enumerate(rows):
        start = 0
        for document_id, (ids, flags) in enumerate(documents):
            stop = start + len(ids)
            tokens_BL[row, start:stop] = ids
            labels_BL[row, start : stop - 1] = np.where(
                flags[1:] & TRAINED, ids[1:].astype(np.int64), IGNORE_INDEX
            )
            positions_BL[row, start:stop] = np.arange(len(ids))
            document_ids_BL[row, start:stop] = document_id
            start = stop
    return Batch(
        *(
            torch.from_numpy(array)
            for array in (tokens_BL, labels_BL, positions_BL, document_ids_BL)
        )
    )


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Put items of `lengths` (n,) into bins of `capacity`, longest first, each into the fullest bin
    that has room (arXiv:2404.10830).

    Returns the items of each bin, int64, in the order in which they were put in. Items of one
    length go in the order of their indices.

    Raises:
        ValueError: a length is below 1 or above `capacity`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(
            f"lengths from {lengths.min()} to {lengths.max()} do not fit a capacity of {capacity}"
        )
    bins: list[list[int]] = []
    rooms: list[int] = []  # the distinct amounts of room left, ascending
    bins_with: defaultdict[int, list[int]] = defaultdict(list)
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        smallest = bisect_left(rooms, length)
        if smallest < len(rooms):
            room = rooms[smallest]
            chosen = bins_with[room].pop()
            if not bins_with[room]:
                del rooms[smallest]
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        if left := room - length:
            if not bins_with[left]:
                insort(rooms, left)
            bins_with[left].append(chosen)
    return [np.array(items) for items in bins]
