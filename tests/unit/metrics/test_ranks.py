import torch

from titanlite.metrics.point import describe_ranks, get_memory


def test_large_runs_are_summed_up_and_one_rank_has_no_lists():
    many = {"data_s": [1.0] * 129, "memory/host_peak_rss_gib": [1.0] * 128 + [3.0]}
    assert describe_ranks(many, 10) == ({"memory/host_peak_rss_gib": 3.0}, {}), (
        "no list of 129 numbers in every line"
    )
    one, two = ({name: column[-size:] for name, column in many.items()} for size in (1, 2))
    assert describe_ranks(one, 1) == ({"memory/host_peak_rss_gib": 3.0}, {})
    assert describe_ranks(two, 10)[1] == {
        "ranks/data_s": [0.1, 0.1],
        "ranks/memory_gib": [1.0, 3.0],
    }


def test_the_peak_of_the_memory_is_no_less_than_what_is_in_use():
    kept = []
    for _ in range(50):
        kept.append(torch.ones(37, 4099))
        memory = get_memory(torch.device("cpu"))
        assert 0 < memory["memory/host_rss_gib"] <= memory["memory/host_peak_rss_gib"]
