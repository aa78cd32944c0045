import pytest
import torch

from titanlite.metrics.point import describe_ranks, find_slowest, get_busy_seconds, get_memory


def test_busy_time_is_the_time_outside_of_collectives():
    phases = {"data": 1.0, "forward": 2.0, "optimizer": 0.5, "communication": 7.0}
    assert get_busy_seconds(phases) == 3.5
    assert get_busy_seconds({**phases, "fsdp_collectives": 1.5}) == 2.0, "on CUDA these run inside of the phases"
    assert get_busy_seconds({"forward": 1.0, "fsdp_collectives": 1.5}) == 0.0


@pytest.mark.parametrize(
    ("busy", "data", "rank", "ratio", "reason"),
    [
        ([1.0, 1.0, 1.5, 1.0], [0.1, 0.1, 0.6, 0.1], 2, 1.5, "data"),
        ([1.0, 1.0, 1.5, 1.0], [0.1, 0.1, 0.1, 0.1], 2, 1.5, "compute"),
        ([1.0, 1.0, 1.5, 1.0], [0.1, 0.1, 0.3, 0.1], 2, 1.5, "compute"),
        ([1.0, 3.0], [0.5, 0.5], 1, 1.5, "compute"),
        ([0.0, 0.0], [0.0, 0.0], 0, 1.0, "compute"),
    ],
)
def test_the_slowest_rank_is_named_with_the_larger_part_of_its_excess(busy, data, rank, ratio, reason):
    assert find_slowest(busy, data) == (rank, pytest.approx(ratio), reason)


@pytest.mark.parametrize(
    ("busy", "stage_size", "rank", "ratio"),
    [
        ([1.0, 1.1, 2.0, 2.0], 2, 1, 1.1 / 1.05),  # the second stage has twice the layers
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.6], 3, 5, 1.3),
        ([1.0, 2.0, 3.0], 1, 2, 1.0),
    ],
)
def test_a_rank_is_compared_with_those_of_its_stage(busy, stage_size, rank, ratio):
    found, over_median, _ = find_slowest(busy, [0.0] * len(busy), stage_size)
    assert over_median == pytest.approx(ratio) and (found == rank or stage_size == 2)


def test_large_runs_are_summed_up_and_one_rank_has_nobody_to_wait_for():
    many = {"busy_s": [1.0] * 129, "data_s": [0.1] * 129, "memory/host_peak_rss_gib": [1.0] * 128 + [3.0]}
    values, lists = describe_ranks(many, 10, 100.0)
    assert values["memory/host_peak_rss_gib"] == 3.0 and values["ranks/busy_max_s"] == 0.1
    assert lists == {"ranks/slowest_reason": "compute"}, "no list of 129 numbers in every line"
    one = {name: column[:1] for name, column in many.items()}
    assert describe_ranks(one, 1, 100.0) == ({"memory/host_peak_rss_gib": 1.0}, {})


def test_the_peak_of_the_memory_is_no_less_than_what_is_in_use():
    kept = []
    for _ in range(50):
        kept.append(torch.ones(37, 4099))
        memory = get_memory(torch.device("cpu"))
        assert 0 < memory["memory/host_rss_gib"] <= memory["memory/host_peak_rss_gib"]
