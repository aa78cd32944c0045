"""Recipes: the same bits on any layout, statistics, streams by seed and name, dtypes, zero rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.materialize import (
    Constant,
    Normal,
    Ones,
    Region,
    Uniform,
    Zeros,
)

RECIPES = [
    Normal(std=0.02),
    Normal(mean=1.5, std=2.0, zero_row=1),
    Uniform(low=-0.3, high=0.1),
]


def fill(recipe, shape, region=None, seed=0, name="w", dtype=torch.float32):
    region = region or Region((0,) * len(shape), tuple(shape))
    local = torch.full(region.lengths, float("nan"), dtype=dtype)
    recipe.fill(local, region, tuple(shape), seed, name)
    return local


@st.composite
def cases(draw):
    """A shape of 1 to 4 dims, some beyond the 256 x 256 tile, and a region of it."""
    dims = draw(st.integers(1, 4))
    limits = {1: [1200], 2: [600, 600], 3: [5, 300, 300], 4: [3, 3, 40, 300]}[dims]
    shape = tuple(draw(st.integers(1, limit) | st.integers(limit // 2, limit)) for limit in limits)
    # Half of the starts lie at or beyond a tile's edge, where there is one; integers() alone
    # prefers small numbers.
    starts = tuple(
        draw(st.integers(0, size - 1) | st.integers(min(size - 1, 255), size - 1)) for size in shape
    )
    lengths = tuple(
        draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)
    )
    return shape, Region(starts, lengths)


@settings(max_examples=80)
@given(case=cases(), recipe=st.sampled_from(RECIPES), seed=st.integers(0, 2**40))
def test_a_region_holds_the_bits_of_the_whole(case, recipe, seed):
    shape, region = case
    whole = fill(recipe, shape, seed=seed)
    assert whole.isfinite().all()
    assert torch.equal(fill(recipe, shape, region, seed), whole[region.slices])


@pytest.mark.parametrize("shape", [(1_000_003,), (17, 300, 200)])
def test_statistics(shape):
    count = math.prod(shape)
    tolerance = 5 / math.sqrt(count)  # five standard errors of a mean of unit variance
    x = fill(Normal(mean=3.0, std=2.0), shape).double()
    assert abs(x.mean() - 3.0) < 2 * tolerance
    assert abs(x.std() - 2.0) < 2 * tolerance
    z = (x - 3.0) / 2.0
    assert abs(z.pow(3).mean()) < tolerance * math.sqrt(15)
    assert abs(z.pow(4).mean() - 3.0) < tolerance * math.sqrt(96)

    x = fill(Uniform(low=-1.0, high=3.0), shape).double()
    assert -1.0 <= x.min() < -0.999
    assert 2.999 < x.max() <= 3.0
    assert abs(x.mean() - 1.0) < 2 * tolerance
    assert abs(x.var() - 16 / 12) < 4 * tolerance


def test_tiles_are_independent_of_one_another():
    x = fill(Normal(), (512, 512)).view(2, 256, 2, 256).transpose(1, 2).reshape(4, -1).double()
    correlation = torch.corrcoef(x) - torch.eye(4)
    assert correlation.abs().max() < 5 / 256  # five standard errors over 65,536 pairs


@pytest.mark.parametrize("recipe", [*RECIPES, Normal()])
def test_streams_by_seed_and_name(recipe):
    first = fill(recipe, (40, 50))
    assert torch.equal(first, fill(recipe, (40, 50)))
    assert (first != fill(recipe, (40, 50), seed=1)).float().mean() > 0.9
    assert (first != fill(recipe, (40, 50), name="v")).float().mean() > 0.9
    assert first.unique().numel() > 1500


def test_known_values_stay():
    # A change here changes every model trained from a seed; it must not happen by accident.
    x = fill(Normal(), (2, 2), seed=42, name="model.embed_tokens.weight")
    expected = [-0.7677242159843445, -0.7084693908691406, 0.21022619307041168, 1.1915886402130127]
    assert x.flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("recipe", [*RECIPES, Constant(value=0.5)])
def test_other_dtypes_are_the_float32_values_rounded(recipe, dtype):
    assert torch.equal(fill(recipe, (30, 300), dtype=dtype), fill(recipe, (30, 300)).to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (3, 0), (0, 3)])
def test_small_and_empty(shape):
    x = fill(Normal(), shape)
    assert x.shape == shape
    assert x.isfinite().all()


def test_constants():
    assert torch.equal(fill(Zeros(), (2, 3)), torch.zeros(2, 3))
    assert torch.equal(fill(Ones(), (2, 3)), torch.ones(2, 3))
    assert fill(Constant(value=-7.0), (2,), dtype=torch.float32).tolist() == [-7.0, -7.0]
    integers = torch.ones(3, dtype=torch.int64)
    Zeros().fill(integers, Region((0,), (3,)), (3,), 0, "n")
    assert integers.tolist() == [0, 0, 0]
    assert fill(Constant(value=1.0, zero_row=0), (2, 2)).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("recipe", [Normal(zero_row=2), Uniform(low=1.0, high=2.0, zero_row=2)])
def test_a_zero_row(recipe):
    """In other regions, too: test_a_region_holds_the_bits_of_the_whole."""
    whole = fill(recipe, (5, 4))
    assert whole[2].count_nonzero() == 0
    assert (whole[[0, 1, 3, 4]] != 0).all()
    assert fill(recipe, (5, 4), Region((1, 0), (2, 4)))[1].count_nonzero() == 0, "its last row"
