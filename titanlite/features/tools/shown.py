"""What is in a sequence, for people: its documents with their places, and text with marks around trained tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from titanlite.base.errors import DataError
from titanlite.data.dataset import PackedDataset, TrainDataset
from titanlite.features.images.rows import ImageDataset
from titanlite.features.sft.chat import END, TRAINED
from titanlite.features.sft.dataset import ExampleDataset, ExampleSet
from titanlite.features.sft.documents import DocumentRows
from titanlite.features.streams.mixture import MixtureDataset, naming_source
from titanlite.features.streams.stream import StreamDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_COLOR, _PLAIN = ("\x1b[1;32m", "\x1b[0m"), ("[[", "]]")
_END_COLOR = ("\x1b[1;33m", "\x1b[0m")


@dataclass(frozen=True)
class ShownDocument:
    """A document, as far as a sequence holds it.

    Attributes:
        place: file and line, row or token where it is from; control characters are escaped.
        side: "chosen" or "rejected" of a pair, else "".
        ids: its tokens.
        trained: for each of them, whether it is a label.
        num_tokens: how many of them the model reads; one less than there are where the last is a label only.
        ends: for each of them, whether it ends an answer; empty where that is not known.
    """

    place: str
    side: str
    ids: list[int]
    trained: list[bool]
    num_tokens: int
    ends: Sequence[bool] = ()

    @property
    def num_trained(self) -> int:
        """Labels of the sequence that are of this document."""
        return sum(self.trained)


def get_shown_documents(dataset: TrainDataset, index: int) -> list[ShownDocument]:
    """Return the documents of sequence `index`, in order, without padding.

    The first call for a corpus reads all of its tokens, a stream reads on as far as needed.

    Raises:
        DataError: there is no such view of this kind of dataset; as the dataset itself while it reads.
    """
    if isinstance(dataset, MixtureDataset):
        name, part, place = dataset.locate(index)
        with naming_source(name):
            return [replace(found, place=f"{name}: {found.place}") for found in get_shown_documents(part, place)]
    if isinstance(dataset, PackedDataset):
        return list(_get_from_corpus(dataset, index))
    if isinstance(dataset, ExampleDataset | StreamDataset):
        return list(_get_from_examples(*dataset.get_members(index)))
    if isinstance(dataset, ImageDataset):
        row, ids, trained = dataset.get_document(index)
        images = ", ".join(str(path) for path in row.images)
        return [ShownDocument(escape(f"{row.place}, with {images}"), "", ids, [False, *trained[1:]], len(ids))]
    raise DataError(f"data: the documents of {type(dataset).__name__} cannot be shown.")


def _get_from_corpus(dataset: PackedDataset, index: int) -> Iterator[ShownDocument]:
    """Parts of documents between the first token of the sequence and the label of its last one."""
    corpus, ends = dataset.tokenized, dataset.tokenized.ends
    position = index * dataset.seq_len
    last = position + dataset.seq_len  # a label only
    if isinstance(dataset, DocumentRows):
        position, last = dataset.bounds[index].tolist()
    are_documents = len(ends) == corpus.num_documents  # else the text itself has end-of-text tokens
    while position < last:
        number = int(np.searchsorted(ends, position))
        start = int(ends[number - 1]) + 1 if number else 0
        stop = min(int(ends[number]), last) + 1 if number < len(ends) else last + 1
        ids = corpus.tokens[position:stop].tolist()
        if are_documents:
            place = escape(corpus.describe_place(number)) + _from_token(position - start)
        else:
            place = f"tokens {position} to {position + len(ids) - 1} of {len(corpus.tokens)}"
        # The first one follows nothing in this sequence: where it goes on, it is a label of the one before.
        yield ShownDocument(place, "", ids, [False, *[True] * (len(ids) - 1)], min(len(ids), last - position))
        position += len(ids)


def _get_from_examples(part: ExampleSet, members: np.ndarray) -> Iterator[ShownDocument]:
    sides = ("chosen", "rejected") if part.examples.header.form == "preference" else ("",)
    for member in members.tolist():
        place = escape(part.examples.describe_place(int(part.selected[member])))
        starts = part.starts[member].tolist()
        for side, used, start in zip(sides, part.get_documents(member), starts, strict=True):
            ids = part.examples.tokens[used].tolist()
            trained = ((part.examples.flags[used] & TRAINED) != 0).tolist()
            trained[0] = False  # follows nothing, so it is no label
            ends = ((part.examples.flags[used] & END) != 0).tolist()
            yield ShownDocument(place + _from_token(start), side, ids, trained, len(ids), ends)


def _from_token(number: int) -> str:
    return f", from token {number} on" if number else ""


class Painter:
    """Decodes tokens, with marks around the runs of trained ones and a colour for the ends of answers.

    Each line is indented by four spaces.

    Args:
        tokenizer: of the tokens.
        color: mark by colour, and not by `[[ ]]`.
        max_tokens: of longer documents only the first and the last tokens are shown, so many in all; 0: no limit.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, color: bool, max_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.marks = _COLOR if color else _PLAIN

    def __call__(self, ids: list[int], trained: list[bool], ends: Sequence[bool] = ()) -> str:
        ends = ends if self.marks is _COLOR and ends else [False] * len(ids)
        num_hidden = len(ids) - self.max_tokens if self.max_tokens else 0
        if num_hidden <= 0:
            return self._paint(ids, trained, ends)
        stop = len(ids) - self.max_tokens // 4
        start = stop - num_hidden
        hidden = f"    ... {num_hidden} tokens, {sum(trained[start:stop])} of them trained ..."
        return "\n".join(
            [
                self._paint(ids[:start], trained[:start], ends[:start]),
                hidden,
                self._paint(ids[stop:], trained[stop:], ends[stop:]),
            ]
        ).rstrip("\n")

    def _paint(self, ids: list[int], trained: list[bool], ends: Sequence[bool]) -> str:
        if not ids:
            return ""
        kinds = list(zip(trained, ends, strict=True))
        cuts = [0, *(i for i in range(1, len(ids)) if kinds[i] != kinds[i - 1]), len(ids)]
        text = ""
        for start, stop in pairwise(cuts):
            part = escape(str(self.tokenizer.decode(ids[start:stop])))
            before, behind = _END_COLOR if ends[start] else self.marks
            text += f"{before}{part}{behind}" if trained[start] else part
        return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))


def escape(text: str) -> str:
    """Control characters spelled out: data must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
