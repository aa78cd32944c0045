"""The order of forwards and backwards on each stage of a pipeline: 1F1B."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.parallelism import Degrees
from titanlite.features.pipeline import MOST_SENT
from titanlite.train_step import order_turns


class Stage:
    """Runs its turns in order, one in each tick, if the turn's input has arrived and its earlier
    messages have been received.
    """

    def __init__(self, stages, degrees, num_micro_batches, ahead):
        self.stages, self.number, self.degrees = stages, len(stages), degrees
        self.turns = [*order_turns(num_micro_batches, ahead)]
        self.place = self.open = self.most_open = 0
        self.received = {"forward": 0, "backward": 0}
        self.sent = {"forward": deque(), "backward": deque()}
        self.num_sent = {"forward": 0, "backward": 0}
        stages.append(self)

    def ends(self, phase):
        """Return whether a turn begins with a message, and whether it ends with one."""
        is_first, is_last = self.number == 0, self.number == self.degrees.pp - 1
        return (not is_first, not is_last) if phase == "forward" else (not is_last, not is_first)

    def can_run(self):
        if self.place == len(self.turns):
            return False
        phase, _ = self.turns[self.place]
        step = 1 if phase == "forward" else -1
        source, target = (self.stages[(self.number + to) % self.degrees.pp] for to in (-step, step))
        receives, sends = self.ends(phase)
        if receives and source.num_sent[phase] <= self.received[phase]:
            return False
        kept = self.sent[phase]
        return not (sends and len(kept) >= MOST_SENT and kept[0] >= target.received[phase])

    def run(self):
        phase, _ = turn = self.turns[self.place]
        receives, sends = self.ends(phase)
        self.received[phase] += receives
        if sends:
            self.sent[phase].append(self.num_sent[phase])
            if len(self.sent[phase]) > MOST_SENT:
                self.sent[phase].popleft()
            self.num_sent[phase] += 1
        self.place += 1
        self.open += 1 if phase == "forward" else -1
        self.most_open = max(self.most_open, self.open)
        return turn


@given(pp=st.integers(1, 8), num=st.integers(1, 40))
def test_no_stage_waits_for_ever_and_none_waits_more_than_it_must(pp, num):
    """Each tick runs one forward or backward per stage; a message that is sent in one tick can be
    used in the next.

    A step takes n + p - 1 forwards and as many backwards. A rank is therefore idle in (p - 1) / (n
    + p - 1) of it, and `turns_ahead` says how many turns are open. The order alone identifies
    messages, so each received message must be of the same micro-batch.
    """
    degrees = Degrees(pp=pp)
    stages = []
    for _ in range(pp):
        Stage(stages, degrees, num, degrees.turns_ahead(len(stages)))
    messages = {}  # (receiving stage, phase) -> micro-batches
    ticks = 0
    while running := [stage for stage in stages if stage.can_run()]:
        ticks += 1
        for stage, (phase, micro_batch) in [(stage, stage.run()) for stage in running]:
            receives, sends = stage.ends(phase)
            if receives:
                assert messages[stage.number, phase].popleft() == micro_batch
            if sends:
                target = stage.number + (1 if phase == "forward" else -1)
                messages.setdefault((target, phase), deque()).append(micro_batch)
    assert all(stage.place == len(stage.turns) for stage in stages), "stages wait for each other"
    assert ticks == 2 * (num + pp - 1)
    assert degrees.waiting(num) == pytest.approx(1 - 2 * num / ticks)
    assert [stage.most_open for stage in stages] == [
        min(degrees.turns_ahead(number) + 1, num) for number in range(pp)
    ]
    for stage in stages:
        for phase in ("forward", "backward"):
            assert [turn[1] for turn in stage.turns if turn[0] == phase] == [*range(num)], (
                "in order"
            )
