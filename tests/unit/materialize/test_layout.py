"""Regions and their runs of rows against numpy indexing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.materialize import Region, region_of


@st.composite
def shape_and_region(draw, min_dims=0, max_dims=4, max_size=6):
    shape = tuple(draw(st.lists(st.integers(1, max_size), min_size=min_dims, max_size=max_dims)))
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    lengths = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True))
    return shape, Region(starts, lengths)


@settings(max_examples=300)
@given(case=shape_and_region())
def test_row_runs_are_the_rows_of_the_region(case):
    shape, region = case
    if len(shape) < 2:
        runs = list(region.row_runs(shape))
        assert runs == ([(region.starts[0], region.lengths[0])] if shape else [(0, 1)])
        return
    # Number the rows of the (rows, last dim) view, cut the region out of them, and read the numbers in order.
    numbers = np.arange(math.prod(shape[:-1])).reshape(shape[:-1])
    expected = numbers[region.slices[:-1]].flatten().tolist()
    listed = [row + i for row, count in region.row_runs(shape) for i in range(count)]
    assert listed == expected


@given(case=shape_and_region())
def test_slices_and_numel(case):
    shape, region = case
    part = np.zeros(shape)[region.slices]
    assert part.shape == region.lengths
    assert part.size == region.numel


def test_whole_rows_of_a_matrix_are_one_run():
    assert list(Region((2, 0), (3, 5)).row_runs((9, 5))) == [(2, 3)]


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 4)])
def test_plain_tensor_is_whole(shape):
    region = region_of(torch.empty(shape, device="meta"))
    assert region == Region((0,) * len(shape), shape)
    assert region.numel == math.prod(shape)
