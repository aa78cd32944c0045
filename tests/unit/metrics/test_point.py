"""What a log step knows of the steps since the last one and of other ranks; results: what is best,
when patience ends, and what survives a resume.
"""

import math

import pytest
import torch

from titanlite.config.schema import ValidationSection
from titanlite.metrics.point import Results, describe_ranks, find_largest, get_memory


def test_the_largest_value_and_its_step():
    assert find_largest([2.0, 5.0, 3.0, 5.0], last_step=20) == (5.0, 18)
    assert find_largest([-1.0], last_step=1) == (-1.0, 1)
    with pytest.raises(ValueError):
        find_largest([], last_step=1)


@pytest.mark.parametrize(("bad", "place"), [(math.nan, 0), (math.inf, 1), (-math.inf, 3)])
def test_a_value_that_is_not_finite_is_the_largest_wherever_it_stands(bad, place):
    values = [9.0, 9.0, 9.0, 9.0]
    values[place] = bad
    found = find_largest(values, last_step=4)
    assert found.value is bad and found.step == place + 1
    assert find_largest([*values, math.nan], last_step=5).step == place + 1, "the first one"


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


# ---- results


def make(*, patience=0, min_delta=0.0, save_best="none"):
    validation = ValidationSection(
        enable=True, early_stopping_patience=patience, early_stopping_min_delta=min_delta
    )
    return Results(validation, save_best)


def test_lower_losses_and_higher_scores_are_better():
    results = make(save_best="validation")
    assert [
        results.add_validation(i + 1, loss) for i, loss in enumerate([3.0, 2.5, 2.5, math.nan, 2.4])
    ] == [True, True, False, False, True]
    assert (results.validation.best, results.validation.best_step) == (2.4, 5)
    assert not results.add_evaluation(5, "exact_match", 1.0), "save_best asks for the loss"
    results = make(save_best="evaluation")
    assert [results.add_evaluation(i + 1, "f", s) for i, s in enumerate([0.1, 0.1, 0.3, 0.2])] == [
        True,
        False,
        True,
        False,
    ]
    assert not results.add_validation(9, 0.1)


def test_what_was_found_before_training_is_first_but_never_best():
    results = make(save_best="evaluation")
    assert not results.add_evaluation(0, "f", 0.9), "there is no checkpoint of step 0"
    assert results.add_evaluation(5, "f", 0.1)
    assert (results.evaluation.first, results.evaluation.best) == (0.9, 0.1)


def test_patience():
    results = make(patience=2)
    seen = []
    for step, loss in enumerate([3.0, 2.0, 2.1, 1.9, 1.9, 2.0], start=1):
        results.add_validation(step, loss)
        seen.append(results.out_of_patience)
    assert seen == [False, False, False, False, False, True]
    assert "best (1.9000) at step 4 and has not improved in 2 validations" in results.describe()


def test_min_delta_counts_against_the_last_improvement_and_not_the_last_loss():
    results = make(patience=3, min_delta=0.1, save_best="validation")
    kept = [results.add_validation(i + 1, loss) for i, loss in enumerate([2.0, 1.95, 1.92, 1.85])]
    assert kept == [True] * 4, "the best checkpoint is the best, by however little"
    assert results.validation.stale == 0, "slow progress adds up: 1.85 is 0.15 below 2.0"
    for step, loss in enumerate([1.8, 1.78, 1.76], start=5):
        results.add_validation(step, loss)
    assert results.out_of_patience
