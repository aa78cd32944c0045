"""Where a stored tensor and a shard overlap, against numbered elements; parts of segments."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.checkpoint.pieces import Segments, bytes_of, overlap
from titanlite.materialize import Region


@st.composite
def region_in(draw, shape):
    """A box of `shape`; often whole or of length 1 along a dim, as shards and experts are, and sometimes empty."""
    starts, lengths = [], []
    for size in shape:
        kind = draw(st.sampled_from(["whole", "one", "any", "any"]))
        start = 0 if kind == "whole" else draw(st.integers(0, size - 1))
        starts.append(start)
        lengths.append({"whole": size, "one": 1}.get(kind) or draw(st.integers(0, size - start)))
    return Region(tuple(starts), tuple(lengths))


@st.composite
def two_regions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    return shape, draw(region_in(shape)), draw(region_in(shape))


@st.composite
def some_segments(draw):
    length, gap = draw(st.integers(1, 12)), draw(st.integers(0, 3))
    count = draw(st.integers(1, 9))
    stored = np.arange(count) * (length + gap) + draw(st.integers(0, 5))
    return Segments(stored, np.arange(count) * (length + draw(st.integers(0, 2))), length)


def pairs(segments):
    """(stored element, local element) of every element, in order."""
    inside = np.arange(segments.length)
    return list(
        zip(
            (segments.stored[:, None] + inside).ravel().tolist(),
            (segments.local[:, None] + inside).ravel(),
            strict=True,
        )
    )


def brute_force(shape, stored, local):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    place = {number: i for i, number in enumerate(numbers[local.slices].ravel().tolist())}
    listed = numbers[stored.slices].ravel().tolist()
    return [(i, place[number]) for i, number in enumerate(listed) if number in place]


@settings(max_examples=500)
@given(case=two_regions())
def test_overlap_is_what_numbered_elements_say(case):
    shape, stored, local = case
    expected = brute_force(shape, stored, local)
    segments = overlap(stored, local)
    if not expected:
        assert segments is None
        return
    assert segments is not None
    assert pairs(segments) == expected
    assert segments.numel == len(expected)
    in_shard = [b for _, b in expected]
    assert segments.is_local_contiguous == (in_shard == list(range(in_shard[0], in_shard[0] + len(in_shard))))
    assert segments.stored.dtype == segments.local.dtype == np.int64


@pytest.mark.parametrize(
    ("stored", "local", "expected"),
    [
        # A matrix that is all there: one run, however many rows.
        (((0, 0), (7, 5)), ((0, 0), (7, 5)), ([0], [0], 35)),
        # Rows 2 to 4 of it.
        (((0, 0), (7, 5)), ((2, 0), (3, 5)), ([10], [0], 15)),
        # Columns: a run per row.
        (((0, 0), (3, 5)), ((0, 2), (3, 2)), ([2, 7, 12], [0, 2, 4], 2)),
        # The up_proj of expert 2, out of a shard with experts 1 to 3 and all of their rows.
        (((2, 4, 0), (1, 4, 5)), ((1, 0, 0), (3, 8, 5)), ([0], [60], 20)),
        # The same, for a shard that has rows 5 and 6 of every expert.
        (((2, 4, 0), (1, 4, 5)), ((0, 5, 0), (9, 2, 5)), ([5], [20], 10)),
        # A scalar.
        (((), ()), ((), ()), ([0], [0], 1)),
    ],
)
def test_runs_are_as_long_as_they_can_be(stored, local, expected):
    segments = overlap(Region(*stored), Region(*local))
    assert (segments.stored.tolist(), segments.local.tolist(), segments.length) == expected


@pytest.mark.parametrize(
    ("stored", "local"),
    [
        (((0, 0), (4, 4)), ((4, 0), (2, 4))),  # beside each other
        (((0, 0), (4, 4)), ((1, 2), (0, 2))),  # a rank that got nothing
        (((0, 0), (0, 4)), ((0, 0), (4, 4))),
        (((3,), (2,)), ((0,), (3,))),
    ],
)
def test_nothing_in_common(stored, local):
    assert overlap(Region(*stored), Region(*local)) is None


def test_offsets_beyond_32_bits():
    shape = (2**20, 2**17)  # 2**37 elements; nothing of that size is allocated
    segments = overlap(Region((0, 0), shape), Region((2**20 - 2, 5), (2, 3)))
    assert segments.stored.tolist() == [(2**20 - 2) * 2**17 + 5, (2**20 - 1) * 2**17 + 5]
    assert segments.local.tolist() == [0, 3]


@settings(max_examples=500)
@given(segments=some_segments(), max_elements=st.integers(1, 40), unit=st.integers(1, 9))
def test_split_covers_every_element_once_and_keeps_to_the_limits(segments, max_elements, unit):
    parts = list(segments.split(max_elements, unit))
    assert [pair for part in parts for pair in pairs(part)] == pairs(segments)
    assert all(0 < part.numel <= max(max_elements, unit) for part in parts)
    begins = set(segments.stored.tolist())
    for part in parts:
        for begin in set(part.stored.tolist()) - begins:  # inside a run: only at multiples of the unit
            assert (begin - max(b for b in begins if b < begin)) % unit == 0


def test_split_fills_parts_up_to_the_limit():
    segments = Segments(np.arange(10) * 5, np.arange(10) * 3, 3)
    assert [len(part.stored) for part in segments.split(9)] == [3, 3, 3, 1]
    assert [part.length for part in Segments(np.array([4]), np.array([0]), 10).split(7, unit=3)] == [6, 4]
    # A unit that is longer than the limit stays whole: a row of factors cannot be cut.
    assert [part.length for part in Segments(np.array([4]), np.array([0]), 10).split(2, unit=5)] == [5, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_bytes_of_is_the_memory_itself(dtype):
    flat = torch.zeros(5, dtype=dtype)
    memory = bytes_of(flat)
    assert len(memory) == 5 * dtype.itemsize
    memory[dtype.itemsize : 2 * dtype.itemsize] = torch.ones(1, dtype=dtype).view(torch.uint8).numpy().tobytes()
    assert flat.to(torch.float32).tolist() == [0, 1, 0, 0, 0]
    assert len(bytes_of(torch.empty(0, dtype=dtype))) == 0
