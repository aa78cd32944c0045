"""Results: what is best, when patience ends, and what survives a resume."""

import json
import math

import pytest

from titanlite.config.schema import ValidationSection
from titanlite.metrics.point import Results


def make(saved=None, *, patience=0, min_delta=0.0, save_best="none"):
    validation = ValidationSection(
        enable=True, early_stopping_patience=patience, early_stopping_min_delta=min_delta
    )
    return Results(validation, save_best, saved)


def test_lower_losses_and_higher_scores_are_better():
    results = make(save_best="validation")
    assert [
        results.add_validation(i + 1, loss) for i, loss in enumerate([3.0, 2.5, 2.5, 2.7, 2.4])
    ] == [*(True, True, False, False, True)]
    assert (results.validation.best, results.validation.best_step) == (2.4, 5)
    assert not results.add_evaluation(5, "exact_match", 1.0), "save_best asks for the loss"
    results = make(save_best="evaluation")
    assert [results.add_evaluation(i + 1, "f", s) for i, s in enumerate([0.1, 0.1, 0.3, 0.2])] == [
        *(True, False, True, False)
    ]
    assert not results.add_validation(9, 0.1)


def test_what_was_found_before_training_is_first_but_never_best():
    results = make(save_best="evaluation")
    assert not results.add_evaluation(0, "f", 0.9), "there is no checkpoint of step 0"
    assert results.add_evaluation(5, "f", 0.1)
    series = results.evaluation
    assert (series.first, series.last, series.last_step, series.best, series.best_step) == (
        0.9,
        0.1,
        5,
        0.1,
        5,
    )


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
    assert results.describe() == (
        "the validation loss was best (1.7600) at step 7, but in 3 validations it was never 0.1 "
        "(validation.early_stopping_min_delta) below 1.8500"
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_no_number_is_no_improvement(loss):
    results = make(patience=2, save_best="validation")
    results.add_validation(1, 2.0)
    assert not results.add_validation(2, loss)
    assert (results.validation.best, results.validation.stale) == (2.0, 1)


def test_state_goes_through_json_and_on():
    results = make(patience=3, save_best="validation")
    for step, loss in enumerate([2.0, 1.5, 1.6], start=1):
        results.add_validation(step, loss)
    resumed = make(json.loads(json.dumps(results.state())), patience=3, save_best="validation")
    assert resumed.state() == results.state() and "evaluation" not in results.state()
    for run in (results, resumed):
        assert not run.add_validation(4, 1.7)
        assert not run.out_of_patience
        assert not run.add_validation(5, 1.55)
        assert run.out_of_patience


def test_another_scorer_starts_anew():
    results = make(save_best="evaluation")
    results.add_evaluation(1, "exact_match", 0.9)
    assert results.add_evaluation(2, "bleu", 0.1)
    assert (results.evaluation.name, results.evaluation.first, results.evaluation.best_step) == (
        "bleu",
        0.1,
        2,
    )
