import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from titanlite.features.sft.dataset import pack_best_fit


def pack_one_by_one(lengths, capacity):
    """The room left in each bin after best-fit decreasing, straight from its definition; sorted."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.lists(st.integers(1, 24), max_size=50))
def test_every_item_is_in_exactly_one_bin_as_best_fit_says(lengths):
    bins = pack_best_fit(np.array(lengths, dtype=np.int64), 24)
    assert sorted(item for items in bins for item in items.tolist()) == list(range(len(lengths)))
    rooms = [24 - sum(lengths[item] for item in items.tolist()) for items in bins]
    assert all(len(items) for items in bins)
    assert sorted(rooms) == pack_one_by_one(lengths, 24)
    again = pack_best_fit(np.array(lengths, dtype=np.int64), 24)
    assert [items.tolist() for items in again] == [items.tolist() for items in bins]


def test_hundred_thousand_items_are_packed_densely():
    """0.3 s on a quiet core; the quadratic way would take minutes."""
    lengths = np.random.default_rng(0).integers(1, 2049, 100_000)
    bins = pack_best_fit(lengths, 2048)
    assert lengths.sum() / (len(bins) * 2048) > 0.99
