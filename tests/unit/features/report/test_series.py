import math

import pytest

from titanlite.features.report.series import average, round_to, smooth, thin


def test_thinning_keeps_ends_and_spikes():
    steps = list(range(100_000))
    values = [1.0] * len(steps)
    values[0], values[77_777], values[12_345], values[-1] = 5.0, 99.0, -99.0, 7.0
    x, y = thin(steps, values)
    assert len(x) <= 800 and x == sorted(set(x))
    points = dict(zip(x, y, strict=True))
    assert points.items() >= {0: 5.0, 77_777: 99.0, 12_345: -99.0, 99_999: 7.0}.items()
    assert thin(steps[:800], values[:800]) == (steps[:800], values[:800])


def test_thinning_keeps_a_gap_where_values_are_not_finite():
    values = [1.0] * 10_000
    values[5_000] = math.nan
    x, y = thin(range(10_000), values)
    assert [step for step, value in zip(x, y, strict=True) if math.isnan(value)] == [5_000]
    x, y = thin(range(10_000), [math.nan] * 10_000)
    assert len(x) <= 800 and all(map(math.isnan, y))


def test_averages_lie_on_top_of_each_other_as_the_values_do():
    x, (a, b) = average(range(10_000), [[1.0] * 10_000, [float(i % 2) for i in range(10_000)]])
    assert len(x) == 400 and x[-1] == 9_999
    assert set(a) == {1.0} and b == pytest.approx([0.5] * 400, abs=0.03)


def test_smoothing_does_not_shift_a_slope_and_leaves_nan_out():
    line = [float(i) for i in range(200)]
    smoothed = smooth(line)
    assert smoothed[50:150] == pytest.approx(line[50:150], abs=0.1)
    assert smooth([3.0] * 20) == pytest.approx([3.0] * 20)
    noisy = [1.0, math.nan, 1.0]
    assert smooth(noisy) == pytest.approx([1.0] * 3)
    assert all(map(math.isnan, smooth([math.nan])))


def test_numbers_have_few_digits():
    assert [round_to(x) for x in (1 / 3, 123456.789, 2.0, 0.0, 1e-7 / 3)] == [0.33333, 123460, 2, 0, 3.3333e-08]
    assert round_to(math.nan) is None and round_to(math.inf) is None
