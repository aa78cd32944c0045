"""What a log step knows of the steps since the last one."""

import math

import pytest

from titanlite.metrics.point import StepPoint, find_largest


def test_the_largest_value_and_its_step():
    assert find_largest([2.0, 5.0, 3.0, 5.0], last_step=20) == (5.0, 18)
    assert find_largest([-1.0], last_step=1) == (-1.0, 1)
    with pytest.raises(ValueError):
        find_largest([], last_step=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_value_that_is_not_finite_is_the_largest_wherever_it_stands(bad, place):
    values = [9.0, 9.0, 9.0, 9.0]
    values[place] = bad
    found = find_largest(values, last_step=4)
    assert found.value is bad and found.step == place + 1
    assert find_largest([*values, math.nan], last_step=5).step == place + 1, "the first one"


def test_values_of_single_steps_are_there_where_they_were_measured():
    plain = StepPoint(8, 2.5, 0.9, 1e-3, tokens=8, seconds=4.0).values(4, 1, 1)
    assert not [name for name in plain if "max" in name]
    largest = {
        "loss/train_max": find_largest([2.0, 3.0], 8),
        "grad_norm_max": find_largest([0.5, math.nan], 8),
    }
    values = StepPoint(
        8, 2.5, 0.9, 1e-3, tokens=8, seconds=4.0, slowest_s=2.5, largest=largest
    ).values(4, 1, 1)
    added = {name: value for name, value in values.items() if name not in plain}
    assert added == pytest.approx(
        {"loss/train_max": 3.0, "grad_norm_max": math.nan, "time/step_max_s": 2.5}, nan_ok=True
    )
