"""What a log step knows of the steps since the last one."""

import math

import pytest

from titanlite.metrics.point import find_largest


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
