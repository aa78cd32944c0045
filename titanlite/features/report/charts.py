"""The plots of a report, as data for `page.js`: which lines, over which steps, on which scale."""

import base64
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from titanlite.features.report.read import Run, Series
from titanlite.features.report.series import average, round_to, smooth, thin

_PHASES = ("data", "forward", "backward", "optimizer", "other", "communication")
_SMOOTH_FROM = 40
_MOST_CELLS = 300_000
_MOST_COLUMNS = 240
_LOG2_RANGE = 4.0


@dataclass
class Chart:
    """One plot.

    Attributes:
        name: identifies it in the page.
        title: what it shows; `unit` of its values, which may be empty.
        kind: "line", "stack" (areas on top of each other), "bars" (one per rank, in parts), "heat", "experts".
        log: a logarithmic value axis.
        zero: the value axis begins at zero.
        series: the lines, each with name, x and y.
        note: a sentence below the title.
        extra: what only this kind needs.
    """

    name: str
    title: str
    unit: str = ""
    kind: Literal["line", "stack", "bars", "heat", "experts"] = "line"
    log: bool = False
    zero: bool = False
    series: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def has_data(self) -> bool:
        return bool(self.extra) or any(any(y is not None for y in line["y"]) for line in self.series)


def build_charts(runs: Sequence[Run]) -> list[Chart]:
    """The plots of the first run, with lines of the others where runs compare. Those without data are left out."""
    first = runs[0]
    charts = [
        _with_largest(runs, _loss(runs), "loss/train_max", "loss/train", color=2),
        _compared(runs, "lr", "lr", "Learning rate", zero=True),
        _with_largest(
            runs,
            _compared(runs, "grad_norm", "grad_norm", "Gradient norm", log=True, note="Before clipping."),
            "grad_norm_max",
            "grad_norm",
            color=1,
        ),
        _lines(first, "grad_groups", "Gradient norm by group", _prefixed(first, "grad_norm/"), log=True),
        _compared(runs, "throughput", "throughput/tokens_per_s", "Throughput", unit="tokens/s", zero=True),
        _compared(runs, "mfu", "throughput/mfu", "Model FLOPs utilization", unit="%", zero=True, factor=100.0),
        _padding(runs),
        _time_split(first),
        _lines(
            first,
            "busy",
            "Busy time per step, of all ranks",
            {"slowest rank": "ranks/busy_max_s", "median rank": "ranks/busy_median_s"},
            unit="s",
            zero=True,
            note="Time outside of collectives. Where the slowest lies far above the median, the others wait for it.",
        ),
        _rank_bars(first),
        _lines(
            first,
            "memory",
            "Memory of the fullest rank",
            {name.removeprefix("memory/").removesuffix("_gib").replace("_", " "): name for name in _memory(first)},
            unit="GiB",
            zero=True,
        ),
        _expert_map(first),
        _layer_map(first),
        _over_layers(first, "entropy", "Entropy of the expert load", "moe/load_entropy", {"lowest layer": min}),
        _over_layers(
            first,
            "bias",
            "Range of the selection bias over all layers",
            "moe/expert_bias_min",
            {"smallest": min},
            {"largest": (max, "moe/expert_bias_max")},
        ),
        _over_layers(
            first,
            "lost_rows",
            "Rows that the dispatcher lost or brought twice",
            "moe/dropped_rows",
            {"dropped": sum},
            {"duplicated": (sum, "moe/duplicated_rows")},
        ),
        _lines(first, "validation", "Validation loss by source", _prefixed(first, "loss/validation/")),
        _lines(first, "evaluation", "Evaluation", _prefixed(first, "eval/", without=("eval/seconds",))),
        *_others(first),
    ]
    return [chart for chart in charts if chart.has_data]


def _line(name: str, steps: Sequence[int], values: Sequence[float], style: str = "", color: int | None = None):
    x, y = thin(steps, values)
    line: dict[str, Any] = {"name": name, "x": x, "y": [round_to(value) for value in y]}
    if style:
        line["style"] = style
    if color is not None:
        line["color"] = color
    return line


def _loss(runs: Sequence[Run]) -> Chart:
    chart = Chart("loss", "Loss")
    for color, run in enumerate(runs):
        label = f"{run.name}: " if len(runs) > 1 else ""
        train = run.scalars["loss/train"]
        color = 2 * color
        if len(train.steps) >= _SMOOTH_FROM:
            chart.series.append(_line(f"{label}train", train.steps, train.values, "faint", color))
            chart.series.append(_line(f"{label}train, smoothed", train.steps, smooth(train.values), "", color))
        else:
            chart.series.append(_line(f"{label}train", train.steps, train.values, "", color))
        if "loss/validation" in run.scalars:
            held_out = run.scalars["loss/validation"]
            chart.series.append(_line(f"{label}validation", held_out.steps, held_out.values, "points", color + 1))
    return chart


def _compared(runs: Sequence[Run], name: str, metric: str, title: str, factor: float = 1.0, **options: Any) -> Chart:
    chart = Chart(name, title, **options)
    for color, run in enumerate(runs):
        if metric in run.scalars:
            series = run.scalars[metric]
            values = series.values if factor == 1.0 else [factor * value for value in series.values]
            chart.series.append(_line(run.name if len(runs) > 1 else title, series.steps, values, color=2 * color))
    return chart


def _padding(runs: Sequence[Run]) -> Chart:
    note = "Of the tokens in rows. FLOP/s and MFU count it, for it is computed; tokens per second do not."
    chart = _compared(runs, "padding", "data/padding", "Padding", factor=100.0, unit="%", zero=True, note=note)
    if not any(any(line["y"]) for line in chart.series):
        chart.series = []  # all rows are full
    return chart


def _with_largest(runs: Sequence[Run], chart: Chart, largest: str, metric: str, color: int) -> Chart:
    """`chart`, of one run with the largest value of a step since the last point, where points are of several steps."""
    if len(runs) == 1 and largest in runs[0].scalars:
        series = runs[0].scalars[largest]
        if series.values != runs[0].scalars[metric].values:
            chart.series.append(_line("largest of a step", series.steps, series.values, color=color))
    return chart


def _lines(run: Run, name: str, title: str, metrics: Mapping[str, str], **options: Any) -> Chart:
    chart = Chart(name, title, **options)
    for label, metric in metrics.items():
        if metric in run.scalars:
            series = run.scalars[metric]
            style = "points" if len(series.steps) < _SMOOTH_FROM and name in ("evaluation", "validation") else ""
            chart.series.append(_line(label, series.steps, series.values, style))
    return chart


def _prefixed(run: Run, prefix: str, without: Iterable[str] = ()) -> dict[str, str]:
    names = [name for name in run.scalars if name.startswith(prefix) and name not in without]
    return {name.removeprefix(prefix).replace("_", " "): name for name in names}


def _memory(run: Run) -> list[str]:
    return [name for name in run.scalars if name.startswith("memory/")]


def _time_split(run: Run) -> Chart:
    """Phases of rank 0; nothing for a run of an older version that has not all of them."""
    names = [f"time/{phase}_s" for phase in _PHASES]
    chart = Chart(
        "time",
        "Time of a step",
        "s",
        "stack",
        zero=True,
        note="Of rank 0. Communication is the time that the rank stood still for collectives.",
    )
    if all(name in run.scalars for name in names):
        steps = run.scalars[names[0]].steps
        x, columns = average(steps, [run.scalars[name].values for name in names])
        for phase, column in zip(_PHASES, columns, strict=True):
            chart.series.append({"name": phase, "x": x, "y": [round_to(max(value, 0.0)) for value in column]})
    return chart


def _rank_bars(run: Run) -> Chart:
    """Mean busy time of each rank over the last quarter of the points."""
    chart = Chart("ranks", "Busy time per step, by rank", "s", "bars", zero=True)
    if "ranks/busy_s" not in run.lists or "ranks/data_s" not in run.lists:
        return chart
    busy, data = _recent_mean(run.lists["ranks/busy_s"]), _recent_mean(run.lists["ranks/data_s"])
    if len(busy) != len(data):
        return chart
    ranks = list(range(len(busy)))
    compute = [max(b - d, 0.0) for b, d in zip(busy, data, strict=True)]
    chart.series = [
        {"name": "data", "x": ranks, "y": [round_to(value) for value in data]},
        {"name": "compute", "x": ranks, "y": [round_to(value) for value in compute]},
    ]
    slowest = max(ranks, key=lambda rank: busy[rank])
    median = sorted(busy)[len(busy) // 2]
    ratio = busy[slowest] / median if median else 1.0
    chart.note = f"Mean over the last quarter of the run. Slowest: rank {slowest}, {ratio:.2f} x the median."
    return chart


def _recent_mean(series: Series) -> list[float]:
    rows = series.values[-max(1, len(series.values) // 4) :]
    rows = [row for row in rows if len(row) == len(rows[-1])]  # resumed on another number of ranks
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _layer_map(run: Run) -> Chart:
    """Load max/mean of every MoE layer over time."""
    chart = Chart("layer_load", "Busiest expert of each layer over the mean, over time", kind="heat")
    series = run.lists.get("moe/load_max_over_mean")
    if series is None or not series.values:
        return chart
    width = len(series.last)
    rows = [(step, row) for step, row in zip(series.steps, series.values, strict=True) if len(row) == width]
    stretches = min(len(rows), _MOST_COLUMNS)
    columns, steps = [], []
    for i in range(stretches):
        span = rows[i * len(rows) // stretches : (i + 1) * len(rows) // stretches]
        columns.append([max(row[layer] for _, row in span) for layer in range(width)])  # the worst of the stretch
        steps.append(span[-1][0])
    chart.extra = {
        "columns": width and stretches,
        "rows": width,
        "first_row": run.first_layer,
        "layers": run.layers,
        "steps": steps,
        "values": [[round_to(column[layer], 3) for column in columns] for layer in range(width)],
    }
    chart.note = "Rows are layers. 1 is balanced; the busiest expert decides how long its layer takes."
    return chart


def _expert_map(run: Run) -> Chart:
    """Load of every expert over the mean of its layer, at some steps. One byte per cell; 0: no token at all."""
    chart = Chart("expert_load", "Load of every expert over the mean of its layer", kind="experts")
    shape = [len(row) for row in run.loads[-1][1]] if run.loads else []
    loads = [load for load in run.loads if [len(row) for row in load[1]] == shape]
    if not loads or not shape or len(set(shape)) != 1:
        return chart
    most = max(2, _MOST_CELLS // (len(shape) * shape[0]))
    if len(loads) > most:
        loads = [loads[i * (len(loads) - 1) // (most - 1)] for i in range(most)]
    frames = []
    for step, rows in loads:
        cells = array("B", [cell for row in rows for cell in _encode(row)])
        frames.append({"step": step, "cells": base64.b64encode(cells.tobytes()).decode()})
    chart.note = "Rows are layers, columns experts."
    chart.extra = {
        "columns": shape[0],
        "rows": len(shape),
        "first_row": run.first_layer,
        "layers": run.layers,
        "range": _LOG2_RANGE,
        "frames": frames,
    }
    return chart


def _encode(row: Sequence[int]) -> list[int]:
    """1 to 255 for log2(load / mean) from -4 to 4; 0 for no token."""
    mean = sum(row) / len(row)
    if not mean:
        return [0] * len(row)
    return [
        0
        if not count
        else 1 + round((min(max(math.log2(count / mean), -_LOG2_RANGE), _LOG2_RANGE) / _LOG2_RANGE + 1) / 2 * 254)
        for count in row
    ]


def _over_layers(
    run: Run,
    name: str,
    title: str,
    metric: str,
    reduced: Mapping[str, Callable[[Sequence[float]], float]],
    others: Mapping[str, tuple[Callable[[Sequence[float]], float], str]] | None = None,
) -> Chart:
    """One line per reduction of the values of all layers."""
    chart = Chart(name, title)
    wanted = {label: (function, metric) for label, function in reduced.items()} | dict(others or {})
    for label, (function, of) in wanted.items():
        if of in run.lists:
            series = run.lists[of]
            chart.series.append(_line(label, series.steps, [function(row) for row in series.values]))
    if name == "lost_rows" and all(not any(line["y"]) for line in chart.series):
        chart.series = []  # none, as it should be; the page says so in words
    if name == "bias" and all(not any(line["y"]) for line in chart.series):
        chart.series = []  # not trained
    return chart


def _others(run: Run) -> list[Chart]:
    """Metrics that no plot above has, such as those of an objective, one plot per first part of their names."""
    shown = ("loss/train", "loss/validation", "grad_norm", "lr")
    shown += tuple(f"{name}{suffix}" for name in ("loss/train_max", "grad_norm_max") for suffix in ("", "_step"))
    known = ("grad_norm/", "throughput/", "data/", "time/", "memory/", "ranks/", "eval/", "moe/", "loss/validation/")
    groups: dict[str, dict[str, str]] = {}
    for name in run.scalars:
        if name not in shown and not name.startswith(known):
            prefix, _, rest = name.rpartition("/")
            groups.setdefault(prefix or name, {})[rest] = name
    return [
        _lines(run, f"other_{index}", prefix if len(metrics) > 1 else next(iter(metrics.values())), metrics)
        for index, (prefix, metrics) in enumerate(sorted(groups.items()))
    ]
