"""The CPU benchmark of training steps: ratios within a turn, losses that must agree, ranks that fail."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))  # where the scripts find one another


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    before = dict(os.environ)  # the script sets what it wants of torch and transformers
    import moe_cpu

    yield moe_cpu
    os.environ.clear()
    os.environ.update(before)


def of_ranks(bench: Any, cpu_s: list[float], losses: list[float]) -> list[list[Any]]:
    """Steps of two ranks that share the CPU seconds."""
    return [
        [bench.Step(loss, seconds / 4, seconds / 4, seconds) for _ in range(2)]
        for seconds, loss in zip(cpu_s, losses, strict=True)
    ]


def test_ratios_are_taken_within_a_turn(bench):
    """The machine is three times slower for half of the steps: medians of each way alone would say 1.0 or 6.0."""
    losses = [5.0 - step for step in range(6)]
    results = {
        "titanlite": of_ranks(bench, [90, 90, 1, 3, 3, 1], losses),
        "fsdp2": of_ranks(bench, [1, 1, 2, 6, 6.3, 1.9], losses),
    }
    table = bench.step_table(results, "2 ranks", sequences=3)
    title, _, head, _, mine, other = table.splitlines()
    assert title == "2 ranks"
    assert [cell.strip() for cell in head.strip("|").split("|")][3:6] == ["tok/CPU s", "speed-up", "middle half"]
    cells = [cell.strip() for cell in other.strip("|").split("|")]
    # 2 ranks * 3 * 512 tokens in a median of (2, 6, 6.3, 1.9) CPU s, half of which is system time.
    assert cells == ["fsdp2", "4.00", "2.00", "768", "2.00", "1.92 - 2.08", "4.00"]
    assert " 1.00 " in mine


def test_losses_must_agree_and_fall(bench):
    good = of_ranks(bench, [1, 1], [9.0, 8.0])
    bench.compare_losses({"titanlite": good, "fsdp2": of_ranks(bench, [1, 1], [9.0, 8.0004])})
    with pytest.raises(bench.Mismatch, match=r"loss 8.000000 of titanlite in step 2 is not the 8.002000 of fsdp2"):
        bench.compare_losses({"titanlite": good, "fsdp2": of_ranks(bench, [1, 1], [9.0, 8.002])})
    with pytest.raises(bench.Mismatch, match="does not fall"):
        bench.compare_losses({"fsdp2": of_ranks(bench, [1, 1], [9.0, 9.0])})


def test_ranks_take_orders(bench):
    def build():
        base = torch.tensor([100 * dist.get_rank()])

        def add(number: int) -> int:
            dist.all_reduce(base)
            return int(base) + number

        return add

    with bench.Team(2, build) as team:
        assert team.do(1) == [101, 101]
        assert team.do(2) == [202, 202]
    assert bench.run_alone(lambda: os.environ["WORLD_SIZE"]) == "1"


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("die", RuntimeError, "rank 1 died"),
        ("raise", RuntimeError, "ZeroDivisionError"),
        ("disagree", "Mismatch", "not equal"),
    ],
)
def test_a_rank_that_fails_ends_the_run(bench, how, kind, message):
    def build():
        def fail(number: int) -> float:
            if dist.get_rank() == 0:
                return 0.0
            if how == "die":
                os._exit(3)
            if how == "raise":
                return 1 / 0
            raise bench.Mismatch("not equal")

        return fail

    error = getattr(bench, kind) if isinstance(kind, str) else kind
    with pytest.raises(error, match=message), bench.Team(2, build) as team:
        team.do(0)
