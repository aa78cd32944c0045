"""Regions, what they have in common, their parts and runs, against numbered elements."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.materialize import Region, region_of
from titanlite.materialize.layout import write_rows


@st.composite
def shape_and_region(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    lengths = tuple(
        draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)
    )
    return shape, Region(starts, lengths)


@st.composite
def two_regions(draw):
    shape, first = draw(shape_and_region())
    # as shards and experts are
    kinds = [draw(st.sampled_from(["whole", "one", "any"])) for _ in shape]
    starts = tuple(
        0 if kind == "whole" else draw(st.integers(0, n - 1))
        for kind, n in zip(kinds, shape, strict=True)
    )
    lengths = tuple(
        {"whole": n, "one": 1}.get(kind) or draw(st.integers(0, n - start))
        for kind, n, start in zip(kinds, shape, starts, strict=True)
    )
    return shape, first, Region(starts, lengths)


def numbers_in(shape, region):
    """Numbers of a region's elements in a tensor of `shape`, in order."""
    return np.arange(math.prod(shape)).reshape(shape)[region.slices].ravel().tolist()


def listed(runs):
    return [first + i for first, length in runs for i in range(length)]


@settings(max_examples=300)
@given(case=shape_and_region())
def test_runs_are_the_elements_and_rows_of_the_region(case):
    shape, region = case
    assert listed(region.runs(shape)) == numbers_in(shape, region)
    if len(shape) < 2:
        assert listed(region.row_runs(shape)) == numbers_in(shape, region)
    else:
        rows = Region(region.starts[:-1], region.lengths[:-1])
        assert listed(region.row_runs(shape)) == numbers_in(shape[:-1], rows)


@settings(max_examples=300)
@given(case=two_regions())
def test_overlap_and_where_it_is_in_each(case):
    shape, first, second = case
    common = sorted(set(numbers_in(shape, first)) & set(numbers_in(shape, second)))
    both = first.overlap(second)
    if both is None:
        assert not common
        return
    assert numbers_in(shape, both) == common
    for region in (first, second):
        numbers = np.array(numbers_in(shape, region))
        assert numbers[listed(both.within(region).runs(region.lengths))].tolist() == common


@settings(max_examples=300)
@given(case=shape_and_region(), elements=st.integers(0, 40))
def test_slabs_follow_one_another_and_keep_to_the_limit(case, elements):
    shape, region = case
    slabs = list(region.slabs(elements))
    assert [number for slab in slabs for number in numbers_in(shape, slab)] == numbers_in(
        shape, region
    )
    assert all(slab.numel <= max(elements, 1) for slab in slabs)


@pytest.mark.parametrize(
    ("region", "shape", "expected"),
    [
        # a matrix that is all there: one run, however many rows
        (((0, 0), (7, 5)), (7, 5), [(0, 35)]),
        (((0, 2), (3, 2)), (3, 5), [(2, 2), (7, 2), (12, 2)]),  # columns: a run per row
        (((1, 5, 0), (2, 2, 5)), (9, 8, 5), [(65, 10), (105, 10)]),
        (((), ()), (), [(0, 1)]),
    ],
)
def test_runs_are_as_long_as_they_can_be(region, shape, expected):
    assert list(Region(*region).runs(shape)) == expected


def test_whole_rows_of_a_matrix_are_one_run():
    assert list(Region((2, 0), (3, 5)).row_runs((9, 5))) == [(2, 3)]


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 4)])
def test_plain_tensor_is_whole(shape):
    region = region_of(torch.empty(shape, device="meta"))
    assert region == Region((0,) * len(shape), shape)
    assert region.numel == math.prod(shape)


def test_encoded_rows_are_written_where_their_values_belong():
    held = torch.zeros(3, 4, 2, dtype=torch.uint8)  # rows of two bytes
    box = Region((2, 5, 0), (2, 2, 8))
    rows = torch.arange(1, 9, dtype=torch.uint8).view(4, 2)
    write_rows(rows, held, box, outer=Region((1, 4, 0), (3, 4, 8)))
    expected = torch.zeros_like(held)
    expected[1:3, 1:3] = rows.view(2, 2, 2)
    assert torch.equal(held, expected)
