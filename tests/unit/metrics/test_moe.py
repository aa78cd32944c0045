import torch

from titanlite.metrics.moe import expert_load_image


def cell(image, layer: int, expert: int, size: int = 24):
    return image[layer * size + size // 2, expert * size + size // 2].astype(int)


def luminance(rgb) -> float:
    return float(rgb @ [0.2126, 0.7152, 0.0722])


def test_image_has_one_block_of_pixels_per_layer_and_expert():
    image = expert_load_image(torch.ones(3, 8, dtype=torch.int64))
    assert image.shape == (3 * 24, 8 * 24, 3)
    assert str(image.dtype) == "uint8"


def test_large_models_stay_small_pictures():
    assert expert_load_image(torch.ones(94, 512)).shape == (94 * 10, 512 * 2, 3)


def test_a_hotter_expert_is_brighter_and_a_dead_one_black():
    counts = torch.full((2, 8), 100)
    counts[1] = torch.tensor([0, 10, 50, 100, 150, 200, 300, 90])
    image = expert_load_image(counts)
    row = [luminance(cell(image, 1, expert)) for expert in range(7)]
    assert row == sorted(row)
    assert len(set(row)) == 7
    assert tuple(cell(image, 1, 0)) == (0, 0, 0)


def test_balanced_load_is_the_middle_colour_whatever_the_counts():
    for count in (1, 7, 10**9):
        image = expert_load_image(torch.full((1, 4), count))
        assert tuple(cell(image, 0, 2)) == (33, 144, 141)


def test_a_layer_without_tokens_is_black_and_nothing_divides_by_zero():
    assert expert_load_image(torch.zeros(2, 4)).max() == 0
