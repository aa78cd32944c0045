"""The order of forwards and backwards on each stage of a pipeline: 1F1B, and interleaved where stages have chunks."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.parallelism import Degrees
from titanlite.features.pipeline import MOST_SENT, order_forwards, order_turns


def text_of(num_micro_batches: int, degrees: Degrees, stage: int) -> str:
    """As `f0 b0`; with chunks `f0.1`, the second one of micro-batch 0."""
    chunk = ".{}" if degrees.chunks > 1 else ""
    turns = order_turns(num_micro_batches, degrees, stage)
    return " ".join(f"{turn.phase[0]}{turn.micro_batch}{chunk.format(turn.chunk)}" for turn in turns)


def test_without_stages_behind_each_backward_follows_its_forward():
    assert text_of(3, Degrees(), 0) == text_of(3, Degrees(pp=4), 3) == "f0 b0 f1 b1 f2 b2"


def test_the_first_of_three_stages():
    assert text_of(5, Degrees(pp=3), 0) == "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4"


def test_two_stages_of_two_chunks():
    """Figure 4 of arXiv:2104.04473, with 2 devices."""
    two = Degrees(pp=2, chunks=2)
    first = "f0.0 f1.0 f0.1 f1.1 f2.0 b0.1 f3.0 b1.1 f2.1 b0.0 f3.1 b1.0 b2.1 b3.1 b2.0 b3.0"
    last = "f0.0 f1.0 f0.1 b0.1 f1.1 b1.1 f2.0 b0.0 f3.0 b1.0 f2.1 b2.1 f3.1 b3.1 b2.0 b3.0"
    assert (text_of(4, two, 0), text_of(4, two, 1)) == (first, last)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_forwards_are_turns_without_backwards(chunks):
    """Also of as many micro-batches as a step may not have, which a validation may."""
    degrees = Degrees(pp=4, chunks=chunks)
    assert sorted(order_forwards(6, degrees)) == [(number, chunk) for number in range(6) for chunk in range(chunks)]
    for stage in range(4):
        turns = [turn[1:] for turn in order_turns(8, degrees, stage) if turn.phase == "forward"]
        assert turns == order_forwards(8, degrees)


class Stage:
    """Runs turn after turn, one in each tick, if what it needs has come and what it sent has been taken."""

    def __init__(
        self, stages: list["Stage"], degrees: Degrees, num_micro_batches: int, most_sent: int = MOST_SENT
    ) -> None:
        self.stages, self.number, self.degrees, self.most_sent = stages, len(stages), degrees, most_sent
        self.turns = [*order_turns(num_micro_batches, degrees, self.number)]
        self.place = self.open = self.most_open = 0
        self.received: dict[str, int] = {"forward": 0, "backward": 0}
        self.sent: dict[str, deque[int]] = {"forward": deque(), "backward": deque()}
        self.num_sent = {"forward": 0, "backward": 0}
        stages.append(self)

    def ends(self, phase: str, chunk: int) -> tuple[bool, bool]:
        """Whether a turn begins, and whether it ends, with a message."""
        degrees, last = self.degrees, self.degrees.pp - 1
        is_first, is_last = (self.number, chunk) == (0, 0), (self.number, chunk) == (last, degrees.chunks - 1)
        return (not is_first, not is_last) if phase == "forward" else (not is_last, not is_first)

    def can_run(self) -> bool:
        if self.place == len(self.turns):
            return False
        phase, _, chunk = self.turns[self.place]
        step = 1 if phase == "forward" else -1
        source, target = (self.stages[(self.number + to) % self.degrees.pp] for to in (-step, step))
        receives, sends = self.ends(phase, chunk)
        if receives and source.num_sent[phase] <= self.received[phase]:
            return False
        kept = self.sent[phase]
        return not (sends and len(kept) >= self.most_sent and kept[0] >= target.received[phase])

    def run(self) -> tuple[str, int, int]:
        phase, _, chunk = turn = self.turns[self.place]
        receives, sends = self.ends(phase, chunk)
        self.received[phase] += receives
        if sends:
            self.sent[phase].append(self.num_sent[phase])
            if len(self.sent[phase]) > self.most_sent:
                self.sent[phase].popleft()
            self.num_sent[phase] += 1
        self.place += 1
        self.open += 1 if phase == "forward" else -1
        self.most_open = max(self.most_open, self.open)
        return turn


@given(pp=st.integers(1, 8), chunks=st.integers(1, 4), times=st.integers(1, 4), rest=st.integers(0, 7))
def test_no_stage_waits_for_ever_and_none_waits_more_than_it_must(pp, chunks, times, rest):
    """Run in ticks, a forward or a backward of a chunk each: what is sent in one can be used in the next.

    A step then takes v n + p - 1 forwards and as many backwards, so that a rank stands still in (p - 1) / (v n + p - 1)
    of it, and as many turns are open as `turns_ahead` says. Messages are told apart by their order alone: what is
    received must be that of the same micro-batch and chunk of the model.
    """
    chunks = 1 if pp == 1 else chunks
    degrees, num = Degrees(pp=pp, chunks=chunks), pp * times + (rest % pp if chunks == 1 else 0)
    stages: list[Stage] = []
    for _ in range(pp):
        Stage(stages, degrees, num)
    messages: dict[tuple[int, str], deque[tuple[int, int]]] = {}  # to a stage -> (micro-batch, part of the model)
    ticks = 0
    while running := [stage for stage in stages if stage.can_run()]:
        ticks += 1
        for stage, (phase, micro_batch, chunk) in [(stage, stage.run()) for stage in running]:
            part, step = chunk * pp + stage.number, 1 if phase == "forward" else -1
            receives, sends = stage.ends(phase, chunk)
            if receives:
                assert messages[stage.number, phase].popleft() == (micro_batch, part)
            if sends:
                queue = messages.setdefault(((stage.number + step) % pp, phase), deque())
                queue.append((micro_batch, part + step))
    assert all(stage.place == len(stage.turns) for stage in stages), "stages wait for each other"
    assert ticks == 2 * (chunks * num + pp - 1)
    assert degrees.waiting(num) == pytest.approx(1 - 2 * chunks * num / ticks)
    assert [stage.most_open for stage in stages] == [
        min(degrees.turns_ahead(number) + 1, chunks * num) for number in range(pp)
    ]
    for stage in stages:
        assert sorted(stage.turns) == sorted(
            (phase, number, chunk)
            for phase in ("forward", "backward")
            for number in range(num)
            for chunk in range(chunks)
        )
        for chunk in range(chunks):
            for phase in ("forward", "backward"):
                numbers = [turn.micro_batch for turn in stage.turns if (turn.phase, turn.chunk) == (phase, chunk)]
                assert numbers == [*range(num)], "every chunk goes through the micro-batches in order"


def test_stages_that_keep_one_tensor_of_what_they_sent_wait_for_each_other():
    """So the simulation above can fail."""
    stages: list[Stage] = []
    for _ in range(2):
        Stage(stages, Degrees(pp=2, chunks=2), 4, most_sent=1)
    while running := [stage for stage in stages if stage.can_run()]:
        for stage in running:
            stage.run()
    assert all(stage.place < len(stage.turns) for stage in stages)
