"""The order of forwards and backwards on each stage of a pipeline: 1F1B."""

from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.parallelism import Degrees
from titanlite.features.pipeline import MOST_SENT
from titanlite.train_step import order_turns


@given(pp=st.integers(1, 8), num=st.integers(1, 40))
def test_no_stage_waits_for_ever_and_none_waits_more_than_it_must(pp, num):
    """Each tick runs one forward or backward per stage; a message that is sent in one tick can be
    used in the next.

    A step takes n + p - 1 forwards and as many backwards. A rank is therefore idle in (p - 1) / (n
    + p - 1) of it, and `turns_ahead` says how many turns are open. The order alone identifies
    messages, so each received message must be of the same micro-batch.
    """
    degrees = Degrees(pp=pp)
    stages = [deque(order_turns(num, degrees.turns_ahead(stage))) for stage in range(pp)]
    for turns in stages:
        for phase in ("forward", "backward"):
            assert [turn[1] for turn in turns if turn[0] == phase] == [*range(num)], "in order"
    messages = defaultdict(deque)  # (receiving stage, phase) -> micro-batches

    def neighbours(stage, phase):
        """Return the stages that a turn receives from and sends to; -1 and pp are none."""
        return (stage - 1, stage + 1) if phase == "forward" else (stage + 1, stage - 1)

    def can_run(stage):
        if not stages[stage]:
            return False
        phase, _ = stages[stage][0]
        source, target = neighbours(stage, phase)
        has_input = source in (-1, pp) or messages[stage, phase]
        return has_input and len(messages[target, phase]) < MOST_SENT

    ticks, is_open, most_open = 0, [0] * pp, [0] * pp
    while running := [stage for stage in range(pp) if can_run(stage)]:
        ticks += 1
        for stage in running:
            phase, micro_batch = stages[stage].popleft()
            source, target = neighbours(stage, phase)
            if source not in (-1, pp):
                assert messages[stage, phase].popleft() == micro_batch
            if target not in (-1, pp):
                messages[target, phase].append(micro_batch)
            is_open[stage] += 1 if phase == "forward" else -1
            most_open[stage] = max(most_open[stage], is_open[stage])
    assert not any(stages), "stages wait for each other"
    assert ticks == 2 * (num + pp - 1)
    assert degrees.waiting(num) == pytest.approx(1 - 2 * num / ticks)
    assert most_open == [min(degrees.turns_ahead(stage) + 1, num) for stage in range(pp)]
