"""Blocks of a stream, made by a thread before they are asked for.

A block begins with the row behind the one before it, so one thread makes them, in order. How many are ready is counted
in sequences, for these are what a step takes, and blocks of equally many rows have more or fewer of them.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, Protocol, TypeVar


class Block(Protocol):
    """What is known of a block when it is made: how many sequences it has, and the first row of the next one."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def next_start(self) -> int: ...


B = TypeVar("B", bound=Block)


@dataclass
class _Chain(Generic[B]):
    """Blocks that follow each other.

    Attributes:
        following: (number, first row) of the block to make next; None while one is made, and for good after an error.
        futures: the blocks that were begun and not taken, by number.
        num_ready: sequences in those of them that are made.
        ends_empty: the newest block that is made has no sequences.
    """

    following: tuple[int, int] | None
    futures: dict[int, Future[B]] = field(default_factory=dict)
    num_ready: int = 0
    ends_empty: bool = False


class StreamAhead(Generic[B]):
    """Makes blocks until `num_wanted` sequences are ready, and goes on when some are taken.

    So no more than `num_wanted` sequences and one block are held. Behind a block without sequences it waits until that
    is taken, or it would read for ever where no row can be used.

    Attributes:
        num_wanted: sequences that are to be ready, at least 1; may be changed at any time.
        most_blocks: the most blocks that were begun and not taken at a time.
    """

    def __init__(self, make: Callable[[int], B]) -> None:
        """`make` gives the block that begins with a row. It is called by one thread."""
        self.num_wanted = 1
        self.most_blocks = 1
        self._make = make
        self._chain: _Chain[B] = _Chain(None)
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "titanlite-stream")

    def take(self, number: int, start: int) -> B:
        """Block `number`, whose first row is `start`, as soon as it is made; those before it are dropped.

        What `make` raised for it is raised here, as often as it is asked for, and nothing is made behind it.
        """
        with self._lock:
            if number not in self._chain.futures:
                for future in self._chain.futures.values():
                    future.cancel()
                self._chain = _Chain((number, start))
                self._submit(self._chain)
            chain = self._chain
            future = chain.futures[number]
        block = future.result()
        with self._lock:
            for earlier in [earlier for earlier in chain.futures if earlier <= number]:
                chain.num_ready -= chain.futures.pop(earlier).result().num_sequences
            self._submit(chain)
        return block

    def _submit(self, chain: _Chain[B]) -> None:
        """Have the following block made if there are too few. The lock is held."""
        if chain is not self._chain or chain.following is None or (chain.ends_empty and chain.futures):
            return
        if chain.num_ready < self.num_wanted:
            number, start = chain.following
            chain.futures[number] = self._thread.submit(self._run, chain, number, start)
            chain.following = None
            self.most_blocks = max(self.most_blocks, len(chain.futures))

    def _run(self, chain: _Chain[B], number: int, start: int) -> B:
        block = self._make(start)
        # RuntimeError: Python is ending, and takes no more work.
        with self._lock, suppress(RuntimeError):
            chain.num_ready += block.num_sequences
            chain.ends_empty = not block.num_sequences
            chain.following = (number + 1, block.next_start)
            self._submit(chain)
        return block
