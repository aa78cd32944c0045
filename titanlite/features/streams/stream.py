"""Examples tokenized on the fly, for datasets that are too large to tokenize before the first step.

Rows are read in blocks of `data.streaming_block_rows`. Each block is packed separately, best-fit,
and its sequences are shuffled by (seed, block). So with any world size, sample n depends only on
the rows, the settings and the seed. A run can resume at any sample. It needs only two facts about
each earlier block, which are in the cache folder: where its rows end, and how many sequences it
has. If these are missing (on a different machine, without a shared cache), the blocks are tokenized
again.

Every rank makes every block, because the number of its sequences is known only after packing. A
thread makes the next block while the run trains on the current one.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titanlite.base.errors import DataError
from titanlite.base.files import replace_file
from titanlite.base.log import logger
from titanlite.config.data import DataSection
from titanlite.config.schema import JobConfig
from titanlite.data.corpus import get_cache_folder
from titanlite.data.dataset import permute_places
from titanlite.data.loader import resolve_tokenizer_path
from titanlite.data.tokenizer import HFTokenizer, count_ids
from titanlite.features.sft.build import (
    build_held_out,
    get_chat_warnings,
    get_padding,
    load_example_tokenizer,
)
from titanlite.features.sft.dataset import (
    ExampleSequences,
    ExampleSet,
    fit_examples,
    pack_examples,
)
from titanlite.features.sft.encode import ExampleEncoder
from titanlite.features.sft.examples import describe_counts, encode_rows, make_encoder, make_key
from titanlite.features.sft.rows import Row, Rows, open_rows
from titanlite.features.sft.unread import describe_unread

_FORMAT_VERSION = 4  # raise it if blocks or their packing change


class _Block(NamedTuple):
    """The examples of some rows, their sequences, and the place after which the next block begins,
    as in `Row`; 0 after the last block of a pass.
    """

    content: ExampleSet
    sequences: list[np.ndarray]
    end: int


class StreamDataset(ExampleSequences):
    """Training sequences from a stream; held-out ones, if any, from a tokenized set.

    Sequence indices below `num_validation_sequences` are held out; training sample n has the index
    `num_validation_sequences` + n. After the last row the stream begins again with the first row,
    with a different order inside each block.

    Raises:
        DataError, while reading: as in `build_examples` and `fit_examples`, or no row of a whole
            pass can be used.
    """

    def __init__(
        self,
        data: DataSection,
        rows: Rows,
        tokenizer: HFTokenizer,
        held_out: ExampleSet | None,
        seq_len: int,
        seed: int,
    ) -> None:
        self.data = data
        self.rows = rows
        self.tokenizer = tokenizer
        self.held_out = held_out
        self.seq_len = seq_len
        self.pad_token_id = get_padding(tokenizer)
        self.seed = seed
        # as configured: the result of 'auto' is not known before the first row, and is not pairs
        self.form = data.format
        self.vocab_size = count_ids(tokenizer)
        self.num_train_sequences = None
        self._held_out_rows = (
            [] if held_out is None else pack_examples(held_out, seq_len, packing=data.packing)
        )
        self.num_validation_sequences = len(self._held_out_rows)
        self.left_out: Counter[str] = Counter()
        self.chat_counts: Counter[str] = Counter()  # see Examples.counts
        self.stop_token_ids = set(() if held_out is None else held_out.examples.stop_token_ids)
        packing = (_FORMAT_VERSION, data.too_long, data.packing, data.streaming_block_rows, seq_len)
        identity = rows.identity
        digest = make_key(data, tokenizer, (*packing, *identity))
        # A digest of rows and settings, as readable text.
        self.fingerprint = (
            f"a stream of {', '.join(identity[:4])} (digest {digest[:8]}), sequences of {seq_len}"
        )
        # A file that was written again may have different rows in the same number of bytes.
        times = [file.stat().st_mtime_ns for file in rows.source.files]
        key = make_key(data, tokenizer, (*packing, *identity, rows.names, times))
        self._ends_file = get_cache_folder(data) / "streams" / f"{key}.json"
        # for each block, in order, the place of its end and the number of sequences up to it
        self._ends = _load_ends(self._ends_file)
        self._encoder: ExampleEncoder | None = None
        self._readers: dict[int, Iterator[Row]] = {}  # at most one, by the place where it is
        self._reported: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "titanlite-stream")
        # A micro-batch may need two blocks, and one more is made in advance.
        self._begin = lru_cache(maxsize=3)(self._submit)

    @property
    def examples_per_sequence(self) -> float:
        """Mean number of examples (or pairs) in a sequence, in the first block that has any; this
        reads that block.
        """
        count = len(self.get_members(self.num_validation_sequences)[0].selected)
        return count / next(total for _, total in self._ends if total)

    def get_train_indices(self, seed: int, start: int, stop: int) -> np.ndarray:
        """Return training samples [start, stop) in the order of the stream, which `self.seed`
        shuffles.
        """
        return self.num_validation_sequences + np.arange(start, stop, dtype=np.int64)

    def get_validation_indices(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.int64) % self.num_validation_sequences

    def get_members(self, index: int) -> tuple[ExampleSet, np.ndarray]:
        if index < self.num_validation_sequences:
            assert self.held_out is not None
            return self.held_out, self._held_out_rows[index]
        sample = index - self.num_validation_sequences
        while self._count_until(len(self._ends)) <= sample:
            self._get_block(len(self._ends))
        number = bisect_right(self._ends, sample, key=lambda end: end[1])
        block = self._get_block(number)
        place = np.array([sample - self._count_until(number)])
        (shuffled,) = permute_places(self.seed, number, len(block.sequences), place)
        return block.content, block.sequences[shuffled]

    def _count_until(self, number: int) -> int:
        """Count the sequences before block `number`."""
        return self._ends[number - 1][1] if number else 0

    def _get_block(self, number: int) -> _Block:
        block = self._begin(self._ends[number - 1][0] if number else 0).result()
        self._begin(block.end)  # starts to make the next block
        if number in self._reported:
            return block
        self._reported.add(number)
        # only now, because a block that is made in advance may never be used
        self._report(block.content)
        total = self._count_until(number) + len(block.sequences)
        if number == len(self._ends):
            self._add(block.end, total)
        elif total != self._ends[number][1]:
            raise DataError(
                f"data: block {number + 1} of the stream has {len(block.sequences)} sequences, but "
                f"had a different number before. Remove {self._ends_file} if the rows have changed."
            )
        return block

    def _submit(self, place: int) -> Future[_Block]:
        return self._thread.submit(self._make_block, place)

    def _add(self, end: int, total: int) -> None:
        self._ends.append((end, total))
        if not end and not total:
            raise DataError(
                f"data: no row of {self.rows.names[0]} can be used; left out: "
                f"{describe_counts(self.left_out)}. Look at the rows."
            )
        try:
            self._ends_file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._ends_file, json.dumps(self._ends))
        except OSError as error:
            raise DataError(
                f"data: cannot write {self._ends_file}: {error}. Set data.cache_folder to a "
                "writable folder."
            ) from None

    def _make_block(self, place: int) -> _Block:
        """Read, render, tokenize and pack the block at `place`; a short or empty block is the last
        one of a pass.
        """
        reader = self._readers.pop(place, None) or self.rows.iterate_from(place)
        self._readers.clear()
        data = self.data
        batch = list(islice(reader, data.streaming_block_rows))
        end = 0
        if len(batch) == data.streaming_block_rows:
            end = batch[-1].place
            self._readers[end] = reader
        if self._encoder is None or self._encoder.form is None:
            self._encoder = make_encoder(data, self.tokenizer, batch)
            if self._encoder.form == "preference" and self.form == "auto":
                raise DataError(
                    'data: the stream has preference pairs. Set data.format = "preference".'
                )
        examples = encode_rows(data, self._encoder, batch, self.rows.names)
        content = fit_examples(examples, self.seq_len, data.too_long, may_be_empty=True)
        return _Block(content, pack_examples(content, self.seq_len, packing=data.packing), end)

    def _report(self, content: ExampleSet) -> None:
        """Count the rows that a block omits, log each reason once, and add the end tokens of its
        answers.
        """
        examples = content.examples
        self.stop_token_ids.update(examples.stop_token_ids)
        new = {what: n for what, n in examples.counts.items() if what not in self.chat_counts}
        for warning in get_chat_warnings(new):
            logger.warning("data: %s, counted from here on", warning)
        if unread := describe_unread(new):
            logger.info("data: %s, counted from here on", unread)
        for what in content.left_out:
            if what in self.left_out:
                continue
            first = f"; the first: {examples.firsts[what]}" if what in examples.firsts else ""
            logger.warning("data: %s, counted from here on%s", what, first)
        self.chat_counts.update(examples.counts)
        self.left_out += content.left_out


def _load_ends(file: Path) -> list[tuple[int, int]]:
    try:
        return [(int(end), int(total)) for end, total in json.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError):
        return []


def build_stream(job: JobConfig) -> tuple[HFTokenizer, StreamDataset]:
    """Build the tokenizer and the dataset of `data.streaming`."""
    return build_stream_dataset(
        resolve_tokenizer_path(job), job.training.seq_len, job.training.seed
    )


def build_stream_dataset(
    data: DataSection,
    seq_len: int,
    seed: int,
    where: str = "data",
    tokenizer: HFTokenizer | None = None,
) -> tuple[HFTokenizer, StreamDataset]:
    """Return the tokenizer, which is loaded unless given, and the stream of `data.path`; `where`
    names the section in the log.
    """
    tokenizer = load_example_tokenizer(data) if tokenizer is None else tokenizer
    rows = open_rows(data, streaming=True)
    held_out = build_held_out(data, seq_len, tokenizer) if data.validation_path else None
    dataset = StreamDataset(data, rows, tokenizer, held_out, seq_len, seed)
    logger.info("%s: %s; %d held out", where, dataset.fingerprint, dataset.num_validation_sequences)
    return tokenizer, dataset
