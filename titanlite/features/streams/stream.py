"""Examples tokenized on the fly, for datasets that are too large to tokenize before the first step.

Rows are taken in blocks of `data.streaming_block_rows`. A block is packed by itself, best-fit, and
its sequences are shuffled by (seed, block). So sample n is a function of the rows, the settings and
the seed, on any world size, and a run resumes at any sample: the sequences of earlier blocks need
only be counted. The counts are kept in the cache folder, and a resumed run skips the rows before
its block without rendering or tokenizing them, those of JSON lines and Parquet without parsing
them. Where the counts are missing (another machine, without a shared cache), the blocks are
tokenized again.

Every rank makes every block, because the number of its sequences is known only after packing. The
next block is made in a thread while the present one is trained on.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titanlite.base.errors import DataError
from titanlite.base.log import logger
from titanlite.config.data import DataSection
from titanlite.config.schema import JobConfig
from titanlite.data.corpus import get_cache_folder, write_atomic
from titanlite.data.dataset import Batch, get_permutation
from titanlite.data.loader import resolve_tokenizer_path
from titanlite.data.tokenizer import count_ids
from titanlite.features.sft.build import (
    build_held_out,
    get_chat_warnings,
    get_padding,
    load_example_tokenizer,
)
from titanlite.features.sft.dataset import (
    ExampleSet,
    fit_examples,
    get_documents,
    make_batch,
    pack_examples,
)
from titanlite.features.sft.encode import ExampleEncoder
from titanlite.features.sft.examples import (
    EncodedBlock,
    encode_block,
    make_encoder,
    make_key,
    refuse_rows,
)
from titanlite.features.sft.rows import Row, Rows, open_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FORMAT_VERSION = 3  # raise it if blocks or their packing change

# blocks are small, and there may be several streams
_get_order = lru_cache(maxsize=16)(get_permutation)


@dataclass(frozen=True)
class _Block:
    """Sequences made of the rows from `start` on, in the order of training.

    Attributes:
        left_out: how much of its rows was not used, by reason.
        problems: (reason, place and what is wrong) of each row that cannot be used.
        next_start: the first row of the next block.
    """

    start: int
    num_rows: int
    content: ExampleSet | None
    sequences: list[np.ndarray]
    left_out: Counter[str]
    problems: list[tuple[str, str]]
    next_start: int

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)


class StreamDataset:
    """Training sequences from a stream; held-out ones, if any, from a tokenized set.

    Sequence indices below `num_validation_sequences` are held out; training sample n is
    `num_validation_sequences` + n. After the last row the stream begins again with the first, in
    another order inside each block.

    Raises:
        DataError: while reading: as `build_examples` and `fit_examples`; no row of a whole pass can
            be used.
    """

    def __init__(
        self,
        data: DataSection,
        rows: Rows,
        tokenizer: "PreTrainedTokenizerFast",
        held_out: ExampleSet | None,
        seq_len: int,
        pad_token_id: int,
        seed: int,
    ) -> None:
        self.data = data
        self.rows = rows
        self.tokenizer = tokenizer
        self.held_out = held_out
        self.seq_len = seq_len
        self.pad_token_id = pad_token_id
        self.seed = seed
        self.vocab_size = count_ids(tokenizer)
        self.num_train_sequences = None
        self._held_out_rows = (
            [] if held_out is None else pack_examples(held_out, seq_len, packing=data.packing)
        )
        self.num_validation_sequences = len(self._held_out_rows)
        self.left_out: Counter[str] = Counter()
        self.chat_counts: Counter[str] = Counter()  # as in ExampleHeader.counts
        self.stop_token_ids = set(
            () if held_out is None else held_out.examples.header.stop_token_ids
        )
        packing = (_FORMAT_VERSION, data.too_long, data.packing, data.streaming_block_rows, seq_len)
        self._key = make_key(data, tokenizer, (*packing, rows.names, rows.get_stamp()))
        identity = rows.get_identity()
        digest = make_key(data, tokenizer, (*packing, *identity))[:8]
        # A digest of rows and settings, in words.
        self.fingerprint = (
            f"a stream of {', '.join(identity[:4])} (digest {digest}), sequences of {seq_len}"
        )
        self._counts_file = get_cache_folder(data) / "streams" / f"{self._key}.json"
        # (first row, rows, sequences) of each block, in order
        self._known = _load_counts(self._counts_file)
        self._ends = np.cumsum([block[2] for block in self._known], dtype=np.int64).tolist()
        self._encoder: ExampleEncoder | None = None
        self._reader: tuple[int, Iterator[Row]] | None = None
        self._blocks: dict[int, _Block] = {}
        self._thread = ThreadPoolExecutor(1, "titanlite-stream")
        # the block that is made next, by its first row
        self._ahead: tuple[int, Future[_Block]] | None = None

    @property
    def form(self) -> str:
        """Form as configured: what 'auto' finds is not known before the first row, and must not be
        pairs.
        """
        return self.data.format

    @property
    def examples_per_sequence(self) -> float:
        """Examples, or pairs, in a sequence, in the mean of the first block that has any, which
        this reads.
        """
        count = len(self.get_members(self.num_validation_sequences)[0].selected)
        return count / next(size for _, _, size in self._known if size)

    def get_train_indices(self, seed: int, start: int, stop: int) -> np.ndarray:
        """Return training samples [start, stop) in the order of the stream."""
        if seed != self.seed:
            raise ValueError(f"the stream is shuffled with seed {self.seed}, not {seed}")
        return self.num_validation_sequences + np.arange(start, stop, dtype=np.int64)

    def get_validation_indices(self, start: int, stop: int) -> np.ndarray:
        if not self.num_validation_sequences:
            raise DataError("data: streaming holds no rows out. Set data.validation_path.")
        return np.arange(start, stop, dtype=np.int64) % self.num_validation_sequences

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        rows = [
            get_documents(*self.get_members(index))
            for index in np.asarray(indices, dtype=np.int64).tolist()
        ]
        return make_batch(rows, self.seq_len, self.pad_token_id)

    def get_members(self, index: int) -> tuple[ExampleSet, np.ndarray]:
        if index < self.num_validation_sequences:
            assert self.held_out is not None
            return self.held_out, self._held_out_rows[index]
        sample = index - self.num_validation_sequences
        while not self._ends or self._ends[-1] <= sample:
            self._get_block(len(self._known))
        number = int(np.searchsorted(self._ends, sample, side="right"))
        block = self._get_block(number)
        assert block.content is not None
        place = sample - (self._ends[number - 1] if number else 0)
        order = _get_order(self.seed, number, block.num_sequences)
        return block.content, block.sequences[order[place]]

    def _get_block(self, number: int) -> _Block:
        if number not in self._blocks:
            before = self._known[number - 1] if number else (0, 0, 0)
            block = self._take_block(self._get_next_start(before[0], before[1]))
            self._report(block)  # only now: a block that is made ahead may never be used
            if number == len(self._known):
                self._add(block)
            elif block.num_sequences != self._known[number][2]:
                raise DataError(
                    f"data: the rows from {block.start + 1} on give {block.num_sequences} "
                    f"sequences, but gave {self._known[number][2]} before. Remove "
                    f"{self._counts_file} if the rows have changed."
                )
            # Micro-batches may straddle two blocks; what is older is not asked for again but by a
            # run that goes back.
            self._blocks = {n: kept for n, kept in self._blocks.items() if n == number - 1} | {
                number: block
            }
        return self._blocks[number]

    def _take_block(self, start: int) -> _Block:
        """Return the block from row `start` on, and begin to make the block after it."""
        begun = self._ahead
        if begun is None or begun[0] != start:
            begun = (start, self._thread.submit(self._make_block, start))
        block = begun[1].result()
        self._ahead = (block.next_start, self._thread.submit(self._make_block, block.next_start))
        return block

    def _get_next_start(self, start: int, num_rows: int) -> int:
        """Return the first row of the block after that of `num_rows` rows from `start`: a short one
        ends a pass.
        """
        return start + num_rows if num_rows == self.data.streaming_block_rows else 0

    def _add(self, block: _Block) -> None:
        self._known.append((block.start, block.num_rows, block.num_sequences))
        self._ends.append((self._ends[-1] if self._ends else 0) + block.num_sequences)
        ended = block.num_rows < self.data.streaming_block_rows
        if ended and not any(sequences for _, _, sequences in self._known):
            what = (
                "; ".join(f"{count} {reason}" for reason, count in self.left_out.items())
                or "there is none"
            )
            raise DataError(
                f"data: no row of {self.rows.names[0]} can be used ({what}). Look at the rows."
            )
        try:
            self._counts_file.parent.mkdir(parents=True, exist_ok=True)
            with write_atomic(self._counts_file) as file:
                file.write(json.dumps(self._known).encode())
        except OSError as error:
            raise DataError(
                f"data: cannot write {self._counts_file}: {error}. Set data.cache_folder to a "
                "writable folder."
            ) from None

    def _make_block(self, start: int) -> _Block:
        """Read, render, tokenize and pack the block from row `start` on; an empty one stands for
        the end of a pass.
        """
        if self._reader is None or self._reader[0] != start:
            self._reader = (start, self.rows.iterate_from(start))
        (_, reader), self._reader = self._reader, None  # one that raises has ended
        batch = list(islice(reader, self.data.streaming_block_rows))
        self._reader = (start + len(batch), reader)
        if self._encoder is None:
            self._encoder = make_encoder(self.data, self.tokenizer, batch)
            if (
                self.form == "auto"
                and self._encoder is not None
                and self._encoder.form == "preference"
            ):
                raise DataError(
                    'data: the stream has preference pairs. Say so with data.format = "preference".'
                )
        left_out: Counter[str] = Counter()
        encoded = encode_block(self._encoder, batch, self.rows.names)
        content = self._collect(encoded, left_out)
        sequences = (
            []
            if content is None
            else pack_examples(content, self.seq_len, packing=self.data.packing)
        )
        following = self._get_next_start(start, len(batch))
        return _Block(start, len(batch), content, sequences, left_out, encoded.problems, following)

    def _collect(self, block: EncodedBlock, left_out: Counter[str]) -> ExampleSet | None:
        """Return the examples of a block that fit, or None; the others are counted in
        `left_out`.
        """
        left_out.update(f"rows skipped: {reason}" for reason, _ in block.problems)
        if self.data.bad_rows == "error" and block.problems:
            refuse_rows([text for _, text in block.problems])
        if block.examples is None:
            return None
        fitting = fit_examples(block.examples, self.seq_len, self.data.too_long, may_be_empty=True)
        left_out.update(
            {f"examples dropped: {reason}": count for reason, count in fitting.dropped.items()}
        )
        if fitting.num_cut:
            left_out[f"examples cut: to {self.seq_len} tokens"] = fitting.num_cut
        return fitting if len(fitting.selected) else None

    def _report(self, block: _Block) -> None:
        """Count what a block leaves out, and keep the tokens that end its answers; each reason is
        logged once.
        """
        if block.content is not None:
            header = block.content.examples.header
            self.stop_token_ids.update(header.stop_token_ids)
            for what in header.counts.keys() - self.chat_counts.keys():
                for warning in get_chat_warnings({what: header.counts[what]}):
                    logger.warning("data: %s, counted from here on", warning)
            self.chat_counts.update(header.counts)
        firsts = {
            f"rows skipped: {reason}": f"; the first: {text}"
            for reason, text in reversed(block.problems)
        }
        for name in block.left_out:
            if name not in self.left_out and self.data.bad_rows != "error":
                logger.warning("data: %s, counted from here on%s", name, firsts.get(name, ""))
        self.left_out += block.left_out


def _load_counts(file: Path) -> list[tuple[int, int, int]]:
    try:
        return [
            (int(start), int(rows), int(sequences))
            for start, rows, sequences in json.loads(file.read_bytes())
        ]
    except (OSError, ValueError, TypeError):
        return []


def build_stream(job: JobConfig) -> tuple["PreTrainedTokenizerFast", StreamDataset]:
    """Build the tokenizer and the dataset of `data.streaming`."""
    return build_stream_dataset(
        resolve_tokenizer_path(job), job.training.seq_len, job.training.seed
    )


def build_stream_dataset(
    data: DataSection,
    seq_len: int,
    seed: int,
    where: str = "data",
    tokenizer: "PreTrainedTokenizerFast | None" = None,
) -> tuple["PreTrainedTokenizerFast", StreamDataset]:
    """Return the tokenizer, loaded unless given, and the stream of `data.path`; `where` is the
    section, for the log.
    """
    tokenizer = load_example_tokenizer(data) if tokenizer is None else tokenizer
    rows = open_rows(data, streaming=True)
    held_out = build_held_out(data, seq_len, tokenizer) if data.validation_path else None
    dataset = StreamDataset(data, rows, tokenizer, held_out, seq_len, get_padding(tokenizer), seed)
    logger.info("%s: %s; %d held out", where, dataset.fingerprint, dataset.num_validation_sequences)
    return tokenizer, dataset
