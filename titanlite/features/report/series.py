"""Numbers for plots: smoothed, thinned out with their extremes kept, and with as many digits as a plot can show."""

import itertools
import math
from collections.abc import Sequence

POINTS = 800
"""Most points of a line: two for each pixel of a plot on a phone."""


def smooth(values: Sequence[float], share: float = 0.03, least: int = 8) -> list[float]:
    """Mean of two exponential moving averages, one from each end, so that a slope is not shifted to either side.

    Each is over about `share` of all values, `least` at least. nan is left out.
    """
    weight = 2.0 / max(float(least), share * len(values))
    there, back = _average_so_far(values, weight), _average_so_far(values[::-1], weight)[::-1]
    return [b if math.isnan(a) else a if math.isnan(b) else (a + b) / 2 for a, b in zip(there, back, strict=True)]


def _average_so_far(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average, unbiased at the start."""
    total = norm = 0.0
    result = []
    for value in values:
        if not math.isnan(value):
            total += weight * (value - total)
            norm += weight * (1.0 - norm)
        result.append(total / norm if norm else math.nan)
    return result


def thin(steps: Sequence[int], values: Sequence[float], most: int = POINTS) -> tuple[list[int], list[float]]:
    """At most `most` points, the least and the greatest of each stretch, so that no spike is lost.

    Values that are not finite stay as nan, one per stretch: a plot has a gap there.
    """
    if len(steps) <= most:
        return list(steps), list(values)
    stretches = most // 4
    kept: list[int] = []
    for stretch in range(stretches):
        start, stop = stretch * len(steps) // stretches, (stretch + 1) * len(steps) // stretches
        finite = [i for i in range(start, stop) if not math.isnan(values[i])]
        found = {start} if stretch == 0 else set()
        if finite:
            found |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < stop - start:
            found.add(next(i for i in range(start, stop) if math.isnan(values[i])))
        kept += sorted(found)
    if kept[-1] != len(steps) - 1:
        kept.append(len(steps) - 1)
    return [steps[i] for i in kept], [values[i] for i in kept]


def average(
    steps: Sequence[int], columns: Sequence[Sequence[float]], most: int = POINTS // 2
) -> tuple[list[int], list[list[float]]]:
    """Columns over the same steps, averaged over stretches of equal length: what lies on top of each other stays so."""
    if len(steps) <= most:
        return list(steps), [list(column) for column in columns]
    bounds = [i * len(steps) // most for i in range(most + 1)]
    spans = list(itertools.pairwise(bounds))
    return [steps[stop - 1] for _, stop in spans], [
        [sum(column[start:stop]) / (stop - start) for start, stop in spans] for column in columns
    ]


def round_to(value: float, digits: int = 5) -> float | int | None:
    """`value` with so many significant digits, None if it is not finite: JSON has no nan."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
