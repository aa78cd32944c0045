"""The order of forwards and backwards on each stage of a pipeline: 1F1B."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from titanlite.distributed import order_turns


def test_without_stages_behind_each_backward_follows_its_forward():
    assert [*order_turns(3, 0)] == [(turn, number) for number in range(3) for turn in ("forward", "backward")]


def test_the_first_of_three_stages():
    text = " ".join(f"{turn[0]}{number}" for turn, number in order_turns(5, 2))
    assert text == "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4"


@given(num_stages=st.integers(1, 8), num_micro_batches=st.integers(1, 20))
def test_no_stage_waits_for_ever_and_none_waits_more_than_it_must(num_stages, num_micro_batches):
    """Run in ticks, a forward or a backward each: what is sent in one can be used in the next.

    A step then takes n + p - 1 forwards and as many backwards, so that a rank stands still in (p - 1) / (n + p - 1) of
    it, and p - stage micro-batches are open at most.
    """
    turns = [[*order_turns(num_micro_batches, num_stages - 1 - stage)] for stage in range(num_stages)]
    done: dict[tuple[int, str, int], int] = {}
    place, most_open = [0] * num_stages, [0] * num_stages
    for tick in count():
        if all(at == len(of_stage) for at, of_stage in zip(place, turns, strict=True)):
            break
        assert tick < 4 * (num_micro_batches + num_stages), "stages wait for each other"
        now = {}
        for stage, of_stage in enumerate(turns):
            if place[stage] == len(of_stage):
                continue
            turn, number = of_stage[place[stage]]
            source = stage - 1 if turn == "forward" else stage + 1
            if source in (-1, num_stages) or (source, turn, number) in done:
                now[stage, turn, number] = tick
                place[stage] += 1
        done |= now
        for stage in range(num_stages):
            opened = sum(at == stage for at, turn, _ in done if turn == "forward")
            closed = sum(at == stage for at, turn, _ in done if turn == "backward")
            most_open[stage] = max(most_open[stage], opened - closed)
    assert max(done.values()) + 1 == 2 * (num_micro_batches + num_stages - 1)
    assert most_open == [min(num_stages - stage, num_micro_batches) for stage in range(num_stages)]
    for stage in range(num_stages):
        for turn in ("forward", "backward"):
            numbers = [number for at, kind, number in done if (at, kind) == (stage, turn)]
            assert numbers == [*range(num_micro_batches)], "every stage goes through the micro-batches in order"
