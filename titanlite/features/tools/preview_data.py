"""`python -m titanlite data --config FILE`: show the data of a run, token by token, before it
trains.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np

from titanlite.assemble import build_data, check_data, fit_vocabulary, refuse
from titanlite.base.errors import DataError
from titanlite.base.log import logger
from titanlite.base.process import escape_controls, raw_output, read_variable
from titanlite.base.text import Parser, command, format_count
from titanlite.checkpoint.start import look_for_start
from titanlite.config import load_config
from titanlite.data.dataset import PackedDataset, SequenceDataset, TrainDataset, get_sources
from titanlite.data.loader import TrainLoader
from titanlite.data.tokenizer import count_ids
from titanlite.features.images import ImageDataset
from titanlite.features.sft import build as report
from titanlite.features.sft.chat import TRAINED
from titanlite.features.sft.chat_template import with_chat_date
from titanlite.features.sft.dataset import ExampleDataset, ExampleSet
from titanlite.features.sft.examples import sum_counts
from titanlite.features.sft.unread import UNREAD, describe_unread
from titanlite.features.streams.mixture import MixtureDataset, naming_source
from titanlite.features.streams.stream import StreamDataset
from titanlite.preflight import check_all

_CANDIDATES = 64  # samples to choose from
_COLOR = ("\x1b[1;32m", "\x1b[0m")
_PLAIN = ("[[", "]]")


@dataclass(frozen=True)
class ShownDocument:
    """The part of a document that a sequence holds."""

    place: str  # its file and row, or range of tokens; control characters are escaped
    side: str  # "chosen" or "rejected" of a pair, otherwise ""
    ids: list[int]
    trained: list[bool]  # for each token, True if it is a label
    num_tokens: int  # tokens that the model reads: all, or all but a last one that is only a label

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


def get_shown_documents(dataset: TrainDataset, index: int) -> list[ShownDocument]:
    """Return the documents of sequence `index`, in order, without padding; for a corpus, the whole
    sequence is one.

    The first call for a corpus reads all of its tokens; a stream is read as far as needed.

    Raises:
        DataError: this kind of dataset cannot be shown; or an error of the dataset while it is
            read.
    """
    if isinstance(dataset, MixtureDataset):
        name, part, place = dataset.locate(index)
        with naming_source(name):
            return [
                replace(found, place=f"{name}: {found.place}")
                for found in get_shown_documents(part, place)
            ]
    if isinstance(dataset, PackedDataset):
        return [_get_from_corpus(dataset, index)]
    if isinstance(dataset, ExampleDataset | StreamDataset):
        return list(_get_from_examples(*dataset.get_members(index)))
    if isinstance(dataset, ImageDataset):
        row, ids, trained = dataset.get_document(index)
        images = ", ".join(str(path) for path in row.images)
        where = escape_controls(f"{row.place}, with {images}")
        return [ShownDocument(where, "", ids, [False, *trained[1:]], len(ids))]
    raise DataError(f"data: the documents of {type(dataset).__name__} cannot be shown.")


def _get_from_corpus(dataset: PackedDataset, index: int) -> ShownDocument:
    """Return the whole sequence. All tokens after its first one are trained, and so is the label of
    its last one.
    """
    corpus = dataset.tokenized
    start = index * dataset.seq_len
    stop = start + dataset.seq_len
    trained = ~np.isin(np.arange(start, stop + 1) - 1, corpus.ends)
    trained[0] = False  # like the first token of a document, it follows nothing
    document = int(np.searchsorted(corpus.ends, start)) + 1
    place = (
        f"tokens {start} to {stop} of {len(corpus.tokens)}, beginning in document {document} of "
        f"{len(corpus.ends)}"
    )
    ids = corpus.tokens[start : stop + 1].tolist()
    return ShownDocument(place, "", ids, trained.tolist(), dataset.seq_len)


def _get_from_examples(part: ExampleSet, members: np.ndarray) -> Iterator[ShownDocument]:
    sides = ("chosen", "rejected") if part.examples.form == "preference" else ("",)
    for member in members.tolist():
        place = escape_controls(part.examples.describe_place(int(part.selected[member])))
        starts = part.starts[member].tolist()
        for side, used, start in zip(sides, part.get_documents(member), starts, strict=True):
            tokens = part.examples.tokens[used]
            ids = tokens["id"].tolist()
            trained = ((tokens["flags"] & TRAINED) != 0).tolist()
            trained[0] = False  # the first token is never a label
            beginning = f", from token {start} on" if start else ""
            yield ShownDocument(place + beginning, side, ids, trained, len(ids))


@dataclass(frozen=True)
class Painter:
    """Decoder of tokens that highlights consecutive trained ones.

    It uses colours, or `[[ ]]` without `color`. Documents longer than `max_tokens` (0: no limit)
    are shortened to their first and last tokens, `max_tokens` in total.
    """

    tokenizer: Any
    color: bool
    max_tokens: int

    def __call__(self, ids: list[int], trained: list[bool]) -> str:
        num_hidden = len(ids) - self.max_tokens if self.max_tokens else 0
        if num_hidden <= 0:
            return self._paint(ids, trained)
        stop = len(ids) - self.max_tokens // 4
        start = stop - num_hidden
        hidden = f"    ... {num_hidden} tokens, {sum(trained[start:stop])} of them trained ..."
        begin = self._paint(ids[:start], trained[:start])
        end = self._paint(ids[stop:], trained[stop:])
        return f"{begin}\n{hidden}\n{end}".rstrip("\n")

    def _paint(self, ids: list[int], trained: list[bool]) -> str:
        opening, closing = _COLOR if self.color else _PLAIN
        text = ""
        for is_trained, run in groupby(zip(ids, trained, strict=True), key=itemgetter(1)):
            decoded = self.tokenizer.decode([token for token, _ in run])
            part = escape_controls(str(decoded))
            text += f"{opening}{part}{closing}" if is_trained else part
        return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the report; exit code 0, or 2 after one clear error."""
    parser = Parser(
        "data",
        "Show what a run would train on: decoded samples with the trained tokens coloured (in [[ "
        "]] where the output is not a terminal), lengths, packing, and what is left out and why. "
        "Overrides as for training: --data.skip_to_sample=N shows the data order from its "
        "sequence N on.",
    )
    add = parser.add_argument
    add("--samples", type=int, default=3, help="examples to print with their text (default: 3)")
    add("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    add(
        "--tokens",
        type=int,
        default=0,
        metavar="N",
        help="most tokens of a text, its first and last ones (0: all)",
    )
    known, rest = parser.parse_known_args(argv)
    color = sys.stdout.isatty() and not read_variable("NO_COLOR")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the report has everything in order
    try:
        job = load_config(rest)
        checked = check_all(job, (known.world_size,), weights=False)
        start = look_for_start(job.checkpoint, checked.job.job.dump_folder)
        job = with_chat_date(checked.job, start)
        tokenizer, loader = build_data(job, 0, checked.degrees.dp, start)
        num_ids = count_ids(tokenizer)
        job, sizes = fit_vocabulary(job, checked.model_config, num_ids, checked.degrees.tp, start)
        dataset = loader.dataset
        refuse(check_data(job, sizes, dataset.form, dataset.vocab_size, num_ids))
        loader.start_from(0, 0, job.data.skip_to_sample)
        painter = Painter(tokenizer, color=color, max_tokens=known.tokens)
        _show_data(loader, painter, known.samples)
    finally:
        logger.setLevel(level)


def _show_data(loader: TrainLoader, show: Painter, num_samples: int) -> None:
    dataset = loader.dataset
    sources = get_sources(dataset)
    for source in sources:
        if source.name:
            print(f"{source.name}: {source.share:.2%} of the sequences")
        _show_source(source.dataset)
    size = loader.global_batch_size
    total = dataset.num_train_sequences
    epoch = "" if total is None else f"{total / size:.1f} to an epoch, "
    ranks = format_count(loader.dp_degree, "data rank")
    print(f"  steps      {epoch}of {format_count(size, 'sequence')} each, on {ranks}")
    # printed first, because a stream may need long for its first sample
    print(f"  order      {loader.fingerprint}", flush=True)
    _show_samples(loader, show, num_samples)
    for source in sources:
        if isinstance(stream := source.dataset, StreamDataset):
            of = f" of {source.name}" if source.name else ""
            lines = [*_list_remarks(stream.chat_counts), describe_unread(stream.chat_counts)]
            lines += [f"left out: {count} {what}" for what, count in stream.left_out.items()]
            for line in filter(None, lines):
                print(f"\n  so far{of}: {escape_controls(line)}")


def _list_remarks(counts: Mapping[str, int]) -> list[str]:
    """List the remarks about chats with their counts, except the columns that are not read."""
    return [f"{count:,} {what}" for what, count in counts.items() if not what.startswith(UNREAD)]


def _show_source(dataset: SequenceDataset) -> None:
    if isinstance(dataset, ExampleDataset):
        _show_examples(dataset)
        return
    if isinstance(dataset, PackedDataset):
        tokens = dataset.tokenized
        print(f"  text       {tokens.describe()}, {len(tokens.tokens):,} tokens, all trained")
        if warning := tokens.get_warning():
            print(f"  warning    {warning}")
    else:
        print(f"  data       {dataset.fingerprint}")
    total = "" if dataset.num_train_sequences is None else f"{dataset.num_train_sequences:,} "
    print(
        f"  sequences  {total}of {dataset.seq_len} tokens, {dataset.num_validation_sequences:,} "
        "held out"
    )


def _show_examples(dataset: ExampleDataset) -> None:
    sources = [source.examples for source in dataset.sources]
    names = ", ".join(dict.fromkeys(name for source in sources for name in source.names[:4]))
    lengths = dataset.train.lengths.sum(1)
    print(f"  rows       {sum(source.num_rows for source in sources):,} from {names}")
    print(
        f"  lengths    min {lengths.min()}, median {int(np.median(lengths))}, max {lengths.max()} "
        "tokens"
    )
    described = escape_controls(report.describe(dataset))
    print("  data       " + described.replace("; ", "\n             "))
    for i, remark in enumerate(_list_remarks(sum_counts(source.counts for source in sources))):
        print(f"  {'' if i else 'chats':10} {escape_controls(remark)}")
    for source in sources:
        for what in source.left_out:
            print(f"               {escape_controls(source.firsts[what])}")
    for warning in report.get_warnings(dataset):
        print(f"  warning    {escape_controls(warning)}")


def _show_samples(loader: TrainLoader, show: Painter, num_samples: int) -> None:
    """Print documents with which a run begins, in their order: the shortest, the longest and some
    between, if there are many.
    """
    in_order = loader.samples_before(0) > 0 or loader.dataset.num_train_sequences is None
    found = list(
        islice(_get_samples(loader), num_samples if in_order else max(num_samples, _CANDIDATES))
    )
    by_length = sorted(
        range(len(found)), key=lambda i: sum(document.num_tokens for document in found[i])
    )
    count = min(num_samples, len(found))
    picked = sorted(by_length[i * (len(found) - 1) // max(count - 1, 1)] for i in range(count))
    for number, i in enumerate(picked, 1):
        for document in found[i]:
            side = f" ({document.side})" if document.side else ""
            counts = f"{document.num_tokens} tokens, {document.num_trained} trained"
            print(f"\nsample {number}{side}: {document.place}, {counts}")
            print(show(document.ids, document.trained), file=raw_output())  # colored and escaped


def _get_samples(loader: TrainLoader) -> Iterator[list[ShownDocument]]:
    """Yield the documents of an epoch in their order, chosen and rejected ones together."""
    sample = loader.samples_before(0)
    for number in range(sample, sample + (loader.dataset.num_train_sequences or sys.maxsize)):
        (index,) = loader.dataset.get_train_indices(loader.seed, number, number + 1).tolist()
        documents = get_shown_documents(loader.dataset, index)
        if loader.mixture:
            # otherwise all documents would be from the source of the first sequence
            documents = documents[: 1 + (documents[0].side != "")]
        size = 1 + any(document.side for document in documents)
        yield from (documents[i : i + size] for i in range(0, len(documents), size))
