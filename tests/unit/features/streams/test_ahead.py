"""Blocks are made in order by a thread, as many as are wanted and no more."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import pytest

from titanlite.features.streams.stream import StreamAhead


@dataclass
class Made:
    start: int
    num_sequences: int

    @property
    def next_start(self) -> int:
        return self.start + 10


class Maker:
    """Blocks of 10 rows, with 4 sequences each unless `sizes` says otherwise; notes what it is asked for."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = {int(name.removeprefix("at_")): size for name, size in sizes.items()}
        self.begun = -1
        self.starts: list[int] = []
        self.goes_on = Event()
        self.goes_on.set()

    def __call__(self, start: int) -> Made:
        self.begun = start
        assert self.goes_on.wait(10)
        self.starts.append(start)
        if self.sizes.get(start, 0) < 0:
            raise ValueError(f"bad row {start}")
        return Made(start, self.sizes.get(start, 4))


def wait(ahead: StreamAhead) -> None:
    """Until the thread has nothing more to do."""
    while any(not future.done() for future in list(ahead._futures.values())):
        time.sleep(0.001)


def test_as_many_are_made_as_are_wanted_in_the_mean() -> None:
    maker = Maker(at_20=1, at_30=7)
    ahead = StreamAhead(maker)
    assert ahead.take(0, 0).start == 0
    wait(ahead)
    assert maker.starts == [0, 10]  # one in any case
    ahead.num_wanted = 10
    assert ahead.take(1, 10).start == 10
    wait(ahead)
    assert maker.starts == [0, 10, 20, 30, 40]  # 4 in the mean
    maker.goes_on.clear()
    assert [ahead.take(number, 10 * number).start for number in (2, 3, 4)] == [20, 30, 40]  # ready: nothing waits
    maker.goes_on.set()
    wait(ahead)
    assert maker.starts[5:] == [50, 60, 70] and ahead.most_blocks == 4  # of 3 sequences in the mean after block 2


def test_blocks_without_sequences_are_not_read_over_for_ever() -> None:
    maker = Maker(**{f"at_{start}": 0 for start in range(0, 50, 10)})
    ahead = StreamAhead(maker)
    ahead.num_wanted = 8
    for number in range(3):
        assert ahead.take(number, 10 * number).start == 10 * number
        wait(ahead)
        assert maker.starts == [*range(0, 10 * number + 11, 10)]  # one at a time


def test_an_error_is_kept_for_the_block_that_has_it() -> None:
    maker = Maker(at_20=-1)
    ahead = StreamAhead(maker)
    ahead.num_wanted = 40
    assert ahead.take(0, 0).start == 0
    wait(ahead)
    assert maker.starts == [0, 10, 20]
    assert ahead.take(1, 10).start == 10
    for _ in range(2):
        with pytest.raises(ValueError, match="bad row 20"):
            ahead.take(2, 20)
    assert maker.starts == [0, 10, 20]
    maker.sizes.clear()
    assert ahead.take(1, 10).start == 10  # a run that goes back begins anew
    wait(ahead)
    assert maker.starts[3:6] == [10, 20, 30]


def test_a_run_that_goes_elsewhere_leaves_no_second_chain() -> None:
    maker = Maker()
    ahead = StreamAhead(maker)
    ahead.num_wanted = 8
    ahead.take(0, 0)
    wait(ahead)
    maker.goes_on.clear()
    ahead.take(1, 10)
    while maker.begun < 30:
        time.sleep(0.001)
    ahead.num_wanted = 20
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(ahead.take, 7, 70)
        while 7 not in ahead._futures:
            time.sleep(0.001)
        maker.goes_on.set()
        assert taken.result(10).start == 70
    wait(ahead)
    assert maker.starts == [0, 10, 20, 30, 70, 80, 90, 100, 110, 120]
    assert set(ahead._futures) == {8, 9, 10, 11, 12}
