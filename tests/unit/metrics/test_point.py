"""What a log step knows of the steps since the last one."""

import math

import pytest
import torch

from titanlite.metrics.point import StepPoint, draw_load, find_largest


def test_the_largest_value_and_its_step():
    assert find_largest([2.0, 5.0, 3.0, 5.0], last_step=20) == (5.0, 18)
    assert find_largest([-1.0], last_step=1) == (-1.0, 1)
    with pytest.raises(ValueError):
        find_largest([], last_step=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_value_that_is_not_finite_is_the_largest_wherever_it_stands(bad: float, place: int):
    values = [9.0, 9.0, 9.0, 9.0]
    values[place] = bad
    found = find_largest(values, last_step=4)
    assert found.value is bad and found.step == place + 1
    assert find_largest([*values, math.nan], last_step=5).step == place + 1, "the first one"


def test_values_of_single_steps_are_there_where_they_were_measured():
    plain = StepPoint(8, 2.5, 0.9, 1e-3, tokens=8, seconds=4.0).values(4, 1, 1)
    assert not [name for name in plain if "max" in name]
    largest = {"loss/train_max": find_largest([2.0, 3.0], 8), "grad_norm_max": find_largest([0.5, math.nan], 8)}
    values = StepPoint(8, 2.5, 0.9, 1e-3, tokens=8, seconds=4.0, slowest_s=2.5, largest=largest).values(4, 1, 1)
    added = {name: value for name, value in values.items() if name not in plain}
    assert added == pytest.approx(
        {"loss/train_max": 3.0, "grad_norm_max": math.nan, "time/step_max_s": 2.5}, nan_ok=True
    )


def test_a_hotter_expert_is_brighter_a_dead_one_black_and_an_even_load_the_middle_colour():
    counts = torch.full((2, 8), 100)
    counts[1] = torch.tensor([0, 10, 50, 100, 150, 200, 300, 90])
    image = draw_load(counts)
    assert image.shape == (2 * 24, 8 * 24, 3) and str(image.dtype) == "uint8"
    row = [float(image[30, 24 * expert + 1] @ [0.2126, 0.7152, 0.0722]) for expert in range(7)]
    assert row == sorted(row) and len(set(row)) == 7
    assert tuple(image[30, 0]) == (0, 0, 0)
    for count in (1, 7, 10**9):
        assert tuple(draw_load(torch.full((1, 4), count))[0, 0]) == (33, 144, 141)


def test_large_models_are_small_pictures_and_a_layer_without_tokens_is_black():
    assert draw_load(torch.ones(94, 512)).shape == (94 * 10, 512 * 2, 3)
    assert draw_load(torch.zeros(2, 4)).max() == 0
