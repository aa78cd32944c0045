"""The order of sequences: a permutation for each (seed, epoch), computed place by place."""

import tracemalloc

import numpy as np
import pytest

from titanlite.data.dataset import ShuffledSequences, permute_places


@pytest.mark.parametrize("size", [1, 2, 3, 17, 65])
def test_every_sequence_has_one_place(size):
    for seed, epoch in ((0, 0), (-1, 3), (42, 1)):
        found = permute_places(seed, epoch, size, np.arange(size))
        assert np.array_equal(np.sort(found), np.arange(size))
    assert size < 64 or not np.array_equal(found, permute_places(42, 2, size, np.arange(size))), (
        "by epoch"
    )
    assert size < 64 or not np.array_equal(found, permute_places(43, 1, size, np.arange(size))), (
        "by seed"
    )


def test_the_keyed_order_is_pinned():
    """A run resumed with another version must see the same data; these numbers may never change."""
    assert permute_places(42, 0, 244_000_000, np.arange(5)).tolist() == [
        32589046,
        197097650,
        78742379,
        38612506,
        136733213,
    ]


def test_many_sequences_take_no_memory():
    data = ShuffledSequences()
    data.num_train_sequences = 244_000_000
    tracemalloc.start()
    found = data.get_train_indices(3, 243_999_990, 244_000_010)  # over the end of an epoch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len({*found.tolist()}) == 20 and found.max() < 244_000_000
    assert peak < 1 << 20
