"""Examples packed into rows. Each example, or piece of a long document, is in one row; a row holds
several if they fit.

Shape suffixes: B rows in a batch, L tokens per row.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import torch

from titanlite.base.errors import DataError
from titanlite.config.data import TooLong
from titanlite.data.dataset import (
    Batch,
    ShuffledSequences,
    get_num_held_out,
    permute_places,
)
from titanlite.features.sft.chat import TRAINED
from titanlite.features.sft.encode import count_trained
from titanlite.features.sft.examples import Examples, describe_counts
from titanlite.features.sft.forms import Form
from titanlite.features.sft.rows import refuse_rows
from titanlite.ops import IGNORE_INDEX

_HOLD_OUT_SEED = 0  # not training.seed: a new seed reorders the same training data


@dataclass(frozen=True)
class ExampleSet:
    """Examples that fit into a row, or pieces of them, with the used part of each document.

    Attributes:
        selected: (n,) int64, the used examples; one that was split occurs several times.
        starts, lengths: (n, D) int64, the used part of each of the D documents of an example.
        trained: (n, D) int64, tokens that count in the loss.
        left_out: number of skipped rows, and of dropped or cut examples, by reason.
    """

    examples: Examples
    selected: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    num_split: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def subset(self, which: np.ndarray) -> "ExampleSet":
        """Return the examples `which`, indices or a mask over `selected`; the counts of left-out
        rows stay with the original set.
        """
        return ExampleSet(
            self.examples,
            selected=self.selected[which],
            starts=self.starts[which],
            lengths=self.lengths[which],
            trained=self.trained[which],
        )

    def get_documents(self, member: int) -> Iterator[slice]:
        """Yield the used parts of the documents of example `member`, as slices of `tokens`."""
        places = self.examples.get_documents(int(self.selected[member]))
        starts = self.starts[member].tolist()
        lengths = self.lengths[member].tolist()
        for place, start, length in zip(places, starts, lengths, strict=True):
            yield slice(place.start + start, place.start + start + length)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_trained(self) -> int:
        """Number of tokens that count in the loss."""
        return int(self.trained.sum())


def fit_examples(
    examples: Examples, seq_len: int, too_long: TooLong, *, may_be_empty: bool = False
) -> ExampleSet:
    """Return the examples that fit into `seq_len` tokens, or can be made to fit.

    'cut' keeps the first tokens. In a pair, a side of at most half of `seq_len` keeps all its
    tokens, and the other side gets the rest; if both are longer, each gets half. A cut example
    without a trained token is dropped, and counted. 'split' is for documents of plain text: each
    becomes pieces of `seq_len` tokens and a shorter last one (arXiv:2404.10830). Here the last
    token of a piece is the first of the next, so that each token is predicted once, as in a whole
    document.

    Raises:
        DataError: an example is too long and `too_long` is 'error' (names the rows); no example is
            left and `may_be_empty` is off; or `too_long` is 'split' for a format other than 'text'.
    """
    form = examples.form
    size = examples.documents_per_example
    lengths = np.diff(examples.offsets).reshape(-1, size)
    trained = examples.num_trained.reshape(-1, size).copy()
    is_long = lengths.sum(1) > seq_len
    left_out = Counter(examples.left_out)
    if too_long == "split":
        if form not in ("text", None):
            raise DataError(
                "data: too_long = \"split\" is for documents of plain text (form 'text'), but the "
                f'examples are of form \'{form}\'. Set data.too_long to "cut" or "drop".'
            )
        return _split(examples, lengths[:, 0], seq_len, left_out)
    if too_long == "error" and is_long.any():
        _refuse_long(examples, lengths.sum(1), seq_len)
    is_left = ~is_long
    if too_long == "cut":
        lengths[is_long] = _cut_lengths(lengths[is_long], seq_len)
        for example, document in np.argwhere(is_long[:, None] & (trained > 0)).tolist():
            start = int(examples.offsets[example * size + document])
            stop = start + int(lengths[example, document])
            trained[example, document] = count_trained(examples.tokens[start:stop])
        is_left = (trained > 0).all(1) | ~is_long
        left_out[f"examples cut to {seq_len} tokens"] = int((is_long & is_left).sum())
    reason = (
        f"longer than {seq_len} tokens"
        if too_long == "drop"
        else f"no trained token among the first {seq_len}"
    )
    left_out[f"examples dropped ({reason})"] = int((~is_left).sum())
    left_out = +left_out  # removes zeros
    if not is_left.any() and not may_be_empty:
        raise DataError(
            f"data: none of {len(is_left)} examples fits into training.seq_len ({seq_len}): "
            f"{describe_counts(left_out)}. Raise training.seq_len."
        )
    selected = np.flatnonzero(is_left)
    starts = np.zeros_like(lengths[is_left])
    return ExampleSet(
        examples,
        selected=selected,
        starts=starts,
        lengths=lengths[is_left],
        trained=trained[is_left],
        left_out=left_out,
    )


def _refuse_long(examples: Examples, lengths: np.ndarray, seq_len: int) -> None:
    """Raise a DataError that names the examples that are too long; `lengths` (n,) are their numbers
    of tokens.
    """
    problems = [
        (int(examples.places[i]), f"{lengths[i]} tokens, but training.seq_len is {seq_len}.")
        for i in np.flatnonzero(lengths > seq_len).tolist()
    ]
    longest = f" to {lengths.max()}, the longest" if len(problems) > 1 else ""
    remedy = f'Raise training.seq_len{longest}, or set data.too_long to "cut" or "drop".'
    refuse_rows(examples.names, problems, remedy)


def _split(
    examples: Examples, lengths: np.ndarray, seq_len: int, left_out: Counter[str]
) -> ExampleSet:
    """Split documents of `lengths` (n,) into pieces of at most `seq_len` tokens that overlap by one
    token.
    """
    step = seq_len - 1
    num_pieces = np.maximum(-(-(lengths - 1) // step), 1)
    selected = np.repeat(np.arange(len(lengths)), num_pieces)
    numbers = np.arange(len(selected)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = numbers[:, None] * step
    pieces = np.minimum(lengths[selected, None] - starts, seq_len)
    return ExampleSet(
        examples,
        selected=selected,
        starts=starts,
        lengths=pieces,
        trained=pieces - 1,  # every token of a text except the first
        num_split=int(np.count_nonzero(num_pieces > 1)),
        left_out=left_out,
    )


def _cut_lengths(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    if lengths.shape[1] == 1:
        return np.full_like(lengths, seq_len)
    shorter = np.minimum(lengths.min(1), seq_len // 2)
    is_shorter = np.arange(2) == lengths.argmin(1)[:, None]
    return np.minimum(lengths, np.where(is_shorter, shorter[:, None], seq_len - shorter[:, None]))


def hold_out(whole: ExampleSet, share: float | None = None) -> tuple[ExampleSet, ExampleSet]:
    """Return (training set, held-out set). The choice of rows is random but fixed;
    `get_num_held_out` gives their number.

    Whole rows are held out, because the answers of one conversation share its text; not the last
    rows, because files are often sorted.

    Raises:
        DataError: rows are to be held out, and there are fewer than two.
    """
    places = whole.examples.places[whole.selected]
    rows, row_of = np.unique(places, return_inverse=True)
    if len(rows) < 2 and share != 0:
        raise DataError(
            f"data: {len(rows)} usable row(s), but 2 are needed, one to train on and one held out. "
            "Add rows, or set data.validation_path, or data.validation_share = 0."
        )
    is_held_out = np.zeros(len(rows), dtype=bool)
    count = get_num_held_out(len(rows), share)
    is_held_out[permute_places(_HOLD_OUT_SEED, 0, len(rows), np.arange(count))] = True
    return whole.subset(~is_held_out[row_of]), whole.subset(is_held_out[row_of])


class ExampleSequences:
    """Sequences of `seq_len` tokens, each made of the documents of some examples. Padding has the
    token `pad_token_id`, the label -100, the position 0 and the document id -1.
    """

    seq_len: int
    pad_token_id: int

    def get_members(self, index: int) -> tuple[ExampleSet, np.ndarray]:
        """Return the example set of sequence `index`, and its examples' numbers in order."""
        raise NotImplementedError

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the sequences `indices` (B,); of a pair, the chosen answer first, then the
        rejected one.

        The label of a token is the next token of its document, if that one is trained; the last
        token of a document has none.
        """
        shape = (len(indices), self.seq_len)
        tokens_BL = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels_BL = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        positions_BL = np.zeros(shape, dtype=np.int64)
        document_ids_BL = np.full(shape, -1, dtype=np.int64)
        for row, index in enumerate(indices):
            part, members = self.get_members(int(index))
            places = (place for member in members for place in part.get_documents(int(member)))
            start = 0
            for document_id, place in enumerate(places):
                tokens = part.examples.tokens[place]
                ids = tokens["id"].astype(np.int64)
                stop = start + len(ids)
                tokens_BL[row, start:stop] = ids
                is_trained = (tokens["flags"][1:] & TRAINED) != 0
                labels_BL[row, start : stop - 1] = np.where(is_trained, ids[1:], IGNORE_INDEX)
                positions_BL[row, start:stop] = np.arange(len(ids))
                document_ids_BL[row, start:stop] = document_id
                start = stop
        return Batch(
            tokens=torch.from_numpy(tokens_BL),
            labels=torch.from_numpy(labels_BL),
            positions=torch.from_numpy(positions_BL),
            document_ids=torch.from_numpy(document_ids_BL),
        )


class ExampleDataset(ExampleSequences, ShuffledSequences):
    """Training rows, then held-out rows, of `seq_len` tokens each.

    With `packing`, examples are packed best-fit-decreasing, which depends only on their lengths;
    without, each example has its own row. `sources` are the sets that `train` and `held_out` were
    taken from, including the counts of cut and dropped examples.
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
        rows = [
            [(part, members) for members in pack_examples(part, seq_len, packing=packing)]
            for part in (train, held_out)
        ]
        self._rows = rows[0] + rows[1]
        self.num_sequences = len(self._rows)
        self.num_train_sequences = len(rows[0])
        self.num_validation_sequences = len(rows[1])
        # an average; a pair counts once
        self.examples_per_sequence = len(train.selected) / self.num_train_sequences
        content = (
            str(packing).encode(),
            train.selected.tobytes(),
            train.lengths.tobytes(),
            train.examples.content.encode(),
        )
        digest = sha256(b"".join(content)).hexdigest()
        # a description by examples, tokens, a digest of their source, and their layout in rows
        self.fingerprint = (
            f"{len(train.selected)} examples of {train.num_tokens} tokens (digest {digest[:8]}), "
            f"sequences of {seq_len}"
        )

    @property
    def vocab_size(self) -> int:
        sizes = [part.examples.vocab_size for part in (self.train, self.held_out)]
        return max(*sizes, self.pad_token_id + 1)

    @property
    def stop_token_ids(self) -> set[int]:
        return {token for source in self.sources for token in source.examples.stop_token_ids}

    @property
    def form(self) -> Form:
        assert self.train.examples.form is not None
        return self.train.examples.form

    @property
    def packing_efficiency(self) -> float:
        """Fraction of the tokens in training rows that are not padding."""
        return self.train.num_tokens / (self.num_train_sequences * self.seq_len)

    def get_members(self, index: int) -> tuple[ExampleSet, np.ndarray]:
        return self._rows[index]


def pack_examples(part: ExampleSet, seq_len: int, *, packing: bool) -> list[np.ndarray]:
    """Return the examples in each row, as indices into `part.selected`; without `packing`, one per
    row.
    """
    if packing:
        return pack_best_fit(part.lengths.sum(1), seq_len)
    return list(np.arange(len(part.selected)).reshape(-1, 1))


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Put items of `lengths` (n,) into bins of `capacity`, longest first, each into the fullest bin
    with enough free space (arXiv:2404.10830).

    Returns the items of each bin, int64, in the order in which they were put in. Items of equal
    length are in the order of their indices. Each length is from 1 to `capacity`.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # the distinct amounts of free space, ascending
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
            room = capacity
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(item)
        if left := room - length:
            if not bins_with[left]:
                insort(rooms, left)
            bins_with[left].append(chosen)
    return [np.array(items) for items in bins]
