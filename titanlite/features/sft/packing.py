"""Best-fit-decreasing packing (arXiv:2404.10830): examples into rows of equal length, hardly any padding, none cut."""

from bisect import bisect_left, insort

import numpy as np


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Put items of `lengths` (n,) into bins of `capacity`, longest first, each into the fullest bin that has room.

    Returns the items of each bin, int64, in the order in which they were put in; every item is in exactly one bin.
    Deterministic: items of one length go in the order of their indices. Bins are looked up by the room that they
    have left, of which there are at most `capacity` values: O(n log capacity) comparisons.

    Raises:
        ValueError: a length is below 1 or above `capacity`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit a capacity of {capacity}")
    bins: list[list[np.ndarray]] = []
    rooms: list[int] = []  # the distinct amounts of room left, ascending
    bins_with: dict[int, list[int]] = {}
    order = np.argsort(-lengths, kind="stable")
    starts = np.flatnonzero(np.diff(lengths[order], prepend=-1))
    for items in np.split(order, starts[1:]) if order.size else []:
        length = int(lengths[items[0]])
        place = 0
        while place < len(items):
            smallest = bisect_left(rooms, length)
            if smallest < len(rooms):
                room = rooms[smallest]
                chosen = bins_with[room].pop()
                if not bins_with[room]:
                    del bins_with[room], rooms[smallest]
            else:
                room, chosen = capacity, len(bins)
                bins.append([])
            # A bin that takes one is the fullest with room for the next of the same length as well.
            count = min(room // length, len(items) - place)
            bins[chosen].append(items[place : place + count])
            place += count
            room -= count * length
            if room > 0:
                if room not in bins_with:
                    bins_with[room] = []
                    insort(rooms, room)
                bins_with[room].append(chosen)
    return [np.concatenate(parts) for parts in bins]
