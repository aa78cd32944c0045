"""Blocks of a stream's rows: tokenized ahead by a thread, in one process of a machine, and read by its others.

Each rank needs every block, for the length of a block is not known without. Tokenizing it in all of them would take the
CPUs of a machine with 8 GPUs 8 times.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import IO, Generic, Protocol, TypeVar
from zipfile import BadZipFile

import numpy as np

from titanlite.base.process import read_ranks_here
from titanlite.data.corpus import get_code_digest, load_or_make, stamp_files
from titanlite.features.sft.examples import CODE, EncodedBlock, TokenizedExamples, read_header

_ARRAYS = ("tokens", "flags", "offsets", "num_trained", "places")


def name_folder(key: str, files: Sequence[str]) -> str:
    """Name the folder of a stream's blocks: its key alone does not tell how they are made, nor enough of the files."""
    try:
        stamps = stamp_files([Path(file) for file in files])
    except OSError:
        stamps = []  # of the hub: the key has the revision
    return sha256(json.dumps([key, get_code_digest(*CODE, Path(__file__).parent), stamps]).encode()).hexdigest()[:32]


def share_block(folder: Path, start: int, make: Callable[[], EncodedBlock], *, keep: int) -> EncodedBlock:
    """`make()`, by the first of the processes of this machine that asks for the block from row `start` on in this
    folder.

    The others wait. A run of one process per machine makes its blocks itself, and so does each process where the folder
    cannot be written. Of all files in the folder the newest `keep` stay, for ranks that are not as far.
    """
    if read_ranks_here() == 1:
        return make()
    path = folder / f"{start}.npz"

    def save(block: EncodedBlock, file: IO[bytes]) -> None:
        _save(block, file)
        _remove_old(folder, keep - 1)

    return load_or_make(path, lambda: _load(path), make, save, lock=folder / "lock")


def _remove_old(folder: Path, keep: int) -> None:
    found = []
    for path in folder.glob("*.npz"):
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found, reverse=True)[keep:]:
        with suppress(OSError):
            path.unlink()


def _save(block: EncodedBlock, file: IO[bytes]) -> None:
    header = {"problems": block.problems, "header": block.examples and asdict(block.examples.header)}
    arrays = {name: getattr(block.examples, name) for name in _ARRAYS} if block.examples is not None else {}
    np.savez(file, json=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)


def _load(path: Path) -> EncodedBlock | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            content = json.loads(stored["json"].tobytes())
            problems = [(reason, text) for reason, text in content["problems"]]
            if content["header"] is None:
                return EncodedBlock(None, problems)
            header = read_header(content["header"])
            arrays = {name: stored[name] for name in _ARRAYS}
    except (OSError, BadZipFile, ValueError, KeyError, TypeError, EOFError):
        return None
    return EncodedBlock(TokenizedExamples(header=header, content="", **arrays), problems)


class Block(Protocol):
    """Facts about a block that are known once it is made: its number of sequences, the first row of the next one."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def next_start(self) -> int: ...


B = TypeVar("B", bound=Block)


class StreamAhead(Generic[B]):
    """Blocks made before they are asked for: each begins after the last row of the one before, so one thread makes all.

    Attributes:
        num_wanted: sequences that are to be ready; may be changed at any time. As many blocks are made ahead as have
            them in the mean of those that have any.
        most_blocks: the most blocks that were begun and not taken at a time.
    """

    def __init__(self, make: Callable[[int], B]) -> None:
        self.num_wanted = self.most_blocks = 1
        self._make = make
        self._futures: dict[int, Future[B]] = {}  # by the block's number
        self._num_taken = self._num_sequences = 0
        self._thread = ThreadPoolExecutor(1, "titanlite-stream")

    def take(self, number: int, start: int) -> B:
        """Block `number`, whose first row is `start`, as soon as it is made; those before it are dropped.

        What `make` raised for it is raised here, as often as it is asked for, and nothing is made after it.
        """
        if number not in self._futures:
            for future in self._futures.values():
                future.cancel()
            self._futures = {number: self._thread.submit(self._make, start)}
        newest = self._futures[number]
        block = newest.result()
        self._futures = {n: future for n, future in self._futures.items() if n > number}
        self._num_taken += block.num_sequences > 0
        self._num_sequences += block.num_sequences
        count = -(-self.num_wanted * self._num_taken // self._num_sequences) if self._num_sequences else 1
        for following in range(number + 1, number + 1 + count):
            if following not in self._futures:
                self._futures[following] = self._thread.submit(self._make_after, newest)
            newest = self._futures[following]
        self.most_blocks = max(self.most_blocks, len(self._futures))
        return block

    def _make_after(self, before: Future[B]) -> B:
        return self._make(before.result().next_start)  # done: the thread took it first
