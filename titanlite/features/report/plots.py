"""The plots of a report as Bokeh figures: which lines, over which steps, on which scale.

Colours of axes and grids are CSS variables of the page, so that plots follow the browser's light or dark theme.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import bokeh.models
import numpy as np
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.themes import Theme

from titanlite.features.report.read import Run, Series, is_count

models: Any = bokeh.models  # its type stubs miss half of its arguments
_COLORS = ("#3f7fc4", "#e0762b", "#3f9d63", "#9a63c4", "#d4526f", "#1f98a4", "#a3871c", "#7a8592")
_GREY, _TEXT = "#9aa1a8", "#767d85"  # legible on white and on black, where no CSS variable reaches
_NO_BOX = dict.fromkeys(("background_fill_color", "border_line_color", "major_tick_line_color"))
_NO_LINES = dict.fromkeys(("axis_line_color", "minor_tick_line_color", "major_tick_line_color"))
_LABEL = {"axis_label_text_font_style": "normal", "axis_label_text_font_size": "12px", "axis_label_standoff": 4}
_LEGEND = {"location": "left", "padding": 4, "margin": 0, "spacing": 14, "glyph_width": 14, "label_text_color": _TEXT}
_ATTRIBUTES = {
    "Plot": dict.fromkeys(("background_fill_color", "border_fill_color", "outline_line_color")),
    "Axis": {**_NO_LINES, **_LABEL},
    "Legend": {"background_fill_color": None, "border_line_color": None, "click_policy": "hide", **_LEGEND},
    "ColorBar": {**_NO_BOX, "major_label_text_color": _TEXT, "width": 8},
}
THEME = Theme(json={"attrs": _ATTRIBUTES})

_PHASES = ("data", "forward", "backward", "optimizer", "other", "communication")
_MARKED = ("resume", "restart", "skip", "spike", "error")
_FORMATS = {"tokens/s": "{0,0} tokens/s", "s": "{0.[0000]} s", "GiB": "{0.00} GiB"}
_POINTS = 800  # most points of a line: two for each pixel of a plot on a phone
_SMOOTH_FROM = 40
_MOST_CELLS, _MOST_MARKS = 250_000, 500
_PLOTTED = ("lr", "grad_norm", "loss/train", "loss/validation", "rewards", "logps", "throughput", "data", "time")
_PLOTTED += ("memory", "ranks", "eval", "moe")  # metrics, and first parts of names


class Line(NamedTuple):
    name: str
    steps: Sequence[int]
    values: Any
    color: int
    style: str = ""  # or "faint" (the raw values of a smoothed line), or "points"


@dataclass
class Plot:
    title: str
    figure: Any
    note: str = ""
    frames: Sequence[int] = ()  # steps between which a slider chooses, in the figure's filter named "frame"


@np.errstate(all="ignore")  # a stranger's values may be too large for a sum of them
def build_plots(run: Run) -> dict[str, Plot]:
    """Return the plots of the run by name; none without data."""
    plots = _Plots(run)
    add, names = plots.add, list(run.scalars)
    nats = "nats per pair" if "rewards/margin" in names else "nats per token"
    add("loss", "Loss", plots.loss(), nats, marks=True)
    rewards = {name: f"rewards/{name}" for name in ("chosen", "rejected", "margin")}
    add("rewards", "Rewards of DPO", rewards, "reward", note="Margin: chosen minus rejected.")
    add("accuracy", "Accuracy of DPO", "rewards/accuracy", "% of pairs", low=0.0, factor=100.0)
    logps = {name: f"logps/{name}" for name in ("chosen", "rejected")}
    add("logps", "Log-probability of an answer", logps, "nats")
    add("validation", "Validation loss by source", _below("loss/validation/", names), nats)
    add("evaluation", "Evaluation", _below("eval/", names, "eval/seconds"), "score")
    add("lr", "Learning rate", "lr", low=0.0)
    norms = [*plots.lines("grad_norm"), *plots.largest("grad_norm_max", "grad_norm", 1)]
    add("grad_norm", "Gradient norm", norms, "norm", log=True, note="Before clipping.", marks=True)
    add("grad_groups", "Gradient norm by group", _below("grad_norm/", names), "norm", log=True)
    others = {name: name.rpartition("/")[0] or name for name in names if not name.endswith("_step")}
    others = {n: of for n, of in others.items() if n.removesuffix("_max") not in _PLOTTED and of not in _PLOTTED}
    for index, prefix in enumerate(sorted(set(others.values()))):
        group = {name.rpartition("/")[2].replace("_", " "): name for name, of in others.items() if of == prefix}
        add(f"other_{index}", prefix if len(group) > 1 else next(iter(group.values())), group)
    add("throughput", "Throughput", "throughput/tokens_per_s", "tokens/s", low=0.0)
    add("mfu", "Model FLOPs utilization", "throughput/mfu", "% of peak", low=0.0, factor=100.0)
    note = "Tokens per second do not count padding; FLOP/s and MFU do, because it is computed."
    add("padding", "Padding", "data/padding", "% of tokens", low=0.0, factor=100.0, note=note, zeros=False)
    plots.add_time()
    busy = {"slowest rank": "ranks/busy_max_s", "median rank": "ranks/busy_median_s"}
    note = "Time outside of collectives. Where the slowest is far above the median, the other ranks wait for it."
    add("busy", "Busy time per step, all ranks", busy, "s", low=0.0, note=note)
    plots.add_ranks()
    memory = {label.removesuffix(" gib"): name for label, name in _below("memory/", names).items()}
    add("memory", "Memory of the fullest rank", memory, "GiB", low=0.0)
    plots.add_expert_load()
    return plots.found


def _below(prefix: str, names: Sequence[str], without: str = "") -> dict[str, str]:
    """Return the metrics that begin with `prefix`, by the rest of their names."""
    found = [name for name in names if name.startswith(prefix) and name != without]
    return {name.removeprefix(prefix).replace("_", " "): name for name in found}


class _Plots:
    """The plots made so far; those over steps share an x axis, so that a zoom of one moves all."""

    def __init__(self, run: Run) -> None:
        self.run, self.found = run, dict[str, Plot]()
        steps = [series.steps for series in run.scalars.values()]
        first, last = min(s[0] for s in steps), max(s[-1] for s in steps)
        pad = 0.02 * (last - first) or 1
        self.steps = models.Range1d(first - pad, last + pad)

    def lines(self, metrics: str | Mapping[str, str], factor: float = 1.0) -> list[Line]:
        """Lines by label; that of one metric is its name."""
        if isinstance(metrics, str):
            metrics = {metrics.rpartition("/")[2].replace("_", " "): metrics}
        lines = []
        for color, (label, name) in enumerate(metrics.items()):
            if found := self.run.scalars.get(name):
                style = "points" if name.startswith(("loss/validation", "eval/")) else ""
                lines.append(Line(label, found.steps, factor * np.asarray(found.values), color, style))
        return lines

    def loss(self) -> list[Line]:
        steps, values = self.run.scalars["loss/train"].steps, self.run.scalars["loss/train"].values
        smoothed = len(steps) >= _SMOOTH_FROM
        lines = [Line("train", steps, values, 0, "faint" if smoothed else "")]
        if smoothed:
            lines.append(Line("train, smoothed", steps, smooth(values), 0))
        if held_out := self.run.scalars.get("loss/validation"):
            lines.append(Line("validation", held_out.steps, held_out.values, 1, "points"))
        return lines + self.largest("loss/train_max", "loss/train", 2)

    def largest(self, largest: str, metric: str, color: int) -> list[Line]:
        """Return a line of the largest values of a step between points, of a run with several steps per point."""
        series = self.run.scalars.get(largest)
        if series is None or series.values == self.run.scalars[metric].values:
            return []
        return [Line("largest of a step", series.steps, series.values, color)]

    def add(
        self,
        name: str,
        title: str,
        what: str | Mapping[str, str] | list[Line],
        unit: str = "",
        *,
        factor: float = 1.0,
        log: bool = False,
        low: float | None = None,
        note: str = "",
        marks: bool = False,
        zeros: bool = True,
    ) -> None:
        """Add a plot of metrics or lines, on a log scale if `log` and values differ by more than a factor of three.

        Lines over the same steps share a tooltip. `low` is the end of the y axis, `marks` draws the run's
        events, `zeros` keeps a plot of zeros alone.
        """
        lines = what if isinstance(what, list) else self.lines(what, factor)
        finite = np.concatenate([np.zeros(0), *(np.asarray(line.values, dtype=float) for line in lines)])
        finite = finite[np.isfinite(finite)]
        if not (finite.size and (zeros or finite.any())):
            return
        log = log and 0 < 3 * finite.min() < finite.max()
        plot = self._figure(self.steps, "step", unit, "log" if log else "linear")
        if log:
            ratio = finite.max() / finite.min()
            digits = (1, 2, 3, 5, 7) if ratio < 30 else (1, 3) if ratio < 1000 else (1,)
            plot.yaxis.ticker = models.FixedTicker(
                ticks=[digit * 10.0**power for power in range(-12, 13) for digit in digits]
            )
        if low is not None and finite.min() >= low:
            plot.y_range.start = low
        groups: dict[bytes, list[Line]] = {}
        for line in lines:
            groups.setdefault(np.asarray(line.steps, dtype=float).tobytes(), []).append(line)
        items = []
        for index, group in enumerate(groups.values()):
            kept = thin([line.values for line in group])
            data = {f"y{i}": np.asarray(line.values, dtype=np.float32)[kept] for i, line in enumerate(group)}
            source = models.ColumnDataSource({"step": np.asarray(group[0].steps, dtype=float)[kept], **data})
            for i, line in enumerate(group):
                style = {"line_alpha": 0.35} if line.style == "faint" else {"line_width": 1.8}
                color = _COLORS[line.color % len(_COLORS)]
                glyphs = [plot.line("step", f"y{i}", source=source, line_color=color, name=line.name, **style)]
                if line.style == "points" or len(kept) == 1:
                    glyphs.append(plot.scatter("step", f"y{i}", source=source, color=color, size=6))
                if line.style != "faint":
                    items.append(models.LegendItem(label={"value": line.name}, renderers=glyphs))
            rows = {line.name: f"@y{i}{_FORMATS.get(unit, '')}" for i, line in enumerate(group)}
            mode, side = "mouse" if group[0].style == "points" else "vline", "left" if index % 2 else "right"
            _hover(plot, {"step": "@step{0,0}", **rows}, plot.renderers[-1], mode, side)
        _add_legend(plot, items)
        if marks:
            self._mark_events(plot)
        self.found[name] = Plot(title, plot, note)

    def _mark_events(self, plot: Any) -> None:
        marked = [e for e in self.run.events if e.get("kind") in _MARKED and is_count(e.get("step"))]
        if marked := marked[-_MOST_MARKS:]:
            texts = [f"{event['kind']}: {event.get('text', '')}" for event in marked]
            source = models.ColumnDataSource({"step": [float(event["step"]) for event in marked], "text": texts})
            spans = plot.vspan("step", source=source, line_color=_GREY, line_dash="dashed", line_width=1.5)
            _hover(plot, {"step": "@step{0,0}", "event": "@text"}, spans, "mouse")

    def add_time(self) -> None:
        """Phases of a step on top of each other; nothing for a run of an older version that has not all of them."""
        series = [self.run.scalars.get(f"time/{phase}_s", Series()) for phase in _PHASES]
        steps = np.asarray(series[0].steps)
        if not steps.size or any(len(found.values) != len(steps) for found in series):
            return
        # Means over equal stretches keep the stacked order of phases.
        starts = np.unique(np.linspace(0, len(steps), min(len(steps), _POINTS // 2), endpoint=False).astype(int))
        counts = np.diff([*starts, len(steps)])
        parts = [np.maximum(np.add.reduceat(np.nan_to_num(found.values), starts) / counts, 0) for found in series]
        note = "Rank 0. Communication is the time in which the rank stood still for collectives."
        plot = self._figure(self.steps, "step", "s")
        self.found["time"] = Plot("Time of a step", plot, note)
        _stack(plot, "step", steps[starts + counts - 1], dict(zip(_PHASES, parts, strict=True)), plot.varea_stack)

    def add_ranks(self) -> None:
        """Mean busy time of each rank over the last quarter of the points."""
        busy, data = (_recent_mean(self.run.lists.get(f"ranks/{part}_s", Series())) for part in ("busy", "data"))
        if not len(busy) or len(busy) != len(data):
            return
        slowest, median = int(busy.argmax()), float(np.sort(busy)[len(busy) // 2])
        ratio = busy[slowest] / median if median else 1.0
        note = f"Mean over the last quarter of the run. Slowest: rank {slowest}, {ratio:.2f} x the median."
        plot = self._figure(models.Range1d(-0.5, len(busy) - 0.5), "rank", "s")
        self.found["ranks"] = Plot("Busy time per step, by rank", plot, note)
        parts = {"data": data, "compute": np.maximum(busy - data, 0)}
        _stack(plot, "rank", np.arange(len(busy)), parts, plot.vbar_stack, width=0.7, line_color=None)

    def add_expert_load(self) -> None:
        """Load of every expert in percent of the mean of its layer, at some steps; 0 means not one token."""
        loads = self.run.loads
        shape = [len(row) for row in loads[-1][1]] if loads else []
        loads = [load for load in loads if [len(row) for row in load[1]] == shape]
        if len(set(shape)) != 1:
            return
        most = min(len(loads), max(2, _MOST_CELLS // sum(shape)))
        loads = [loads[i] for i in np.linspace(0, len(loads) - 1, most).astype(int)]
        counts = [np.asarray(rows, dtype=float) for _, rows in loads]
        shares = [100 * count / np.maximum(count.mean(axis=1, keepdims=True), 1e-9) for count in counts]
        frames = [np.ceil(np.clip(share, 0, 60_000)).astype(np.uint16) for share in shares]
        # The scale begins at 1 %, so that 0 alone is grey; all below a quarter has the first colour.
        parts = np.clip((np.log2(400 ** np.linspace(0, 1, 256) / 100) + 2) / 4, 0, 1)
        palette = [Viridis256[int(255 * part)] for part in parts]
        mapper = models.LogColorMapper(palette, low=1, high=400, low_color=_GREY)
        plot = self._figure(models.Range1d(-0.5, shape[0] - 0.5), "expert", "layer", rows=len(shape))
        note = "In percent of the mean of the layer; grey: no token."
        self.found["expert_load"] = Plot("Load of every expert", plot, note, [step for step, _ in loads])
        self._draw_cells(plot, frames, mapper)

    def _draw_cells(self, plot: Any, images: Sequence[np.ndarray], mapper: Any) -> None:
        """Draw the last image: a row per layer, the first on top, and a column per expert."""
        (rows, width), first = images[0].shape, self.run.first_layer
        gaps = len(self.run.layers) == rows
        if gaps:  # rows count from 0, and the axis has the numbers of their layers
            first, plot.yaxis.major_label_overrides = 0, dict(enumerate(map(str, self.run.layers)))
        source = models.ColumnDataSource({"image": list(images)})
        view = models.CDSView(filter=models.IndexFilter([len(images) - 1], name="frame"))
        place = {"x": -0.5, "dw": width, "y": first - 0.5, "dh": rows}
        cells = plot.image("image", source=source, color_mapper=mapper, view=view, **place)
        plot.y_range, plot.grid.visible = models.Range1d(first + rows - 0.5, first - 0.5), False
        plot.yaxis.ticker = models.BasicTicker(min_interval=1, desired_num_ticks=min(rows, 8))
        layer = {} if gaps else {"layer": "$y{0}"}
        _hover(plot, {"expert": "$x{0,0}", **layer, "load": "@image{0} % of the mean"}, cells, "mouse")
        ticks, form = models.FixedTicker(ticks=[25, 50, 100, 200, 400]), models.NumeralTickFormatter(format="0")
        bar = models.ColorBar(color_mapper=mapper, ticker=ticks, formatter=form, display_low=25, display_high=400)
        plot.add_layout(bar, "right")

    def _figure(self, x_range: Any, x: str, y: str, scale: str = "linear", rows: int = 0) -> Any:
        """Return an empty figure, with as much height as `rows` rows of cells need, if there are some."""
        height = rows * max(4, min(22, 300 // rows)) if rows else 190
        zoom = models.BoxZoomTool(dimensions="auto")
        tools = [zoom, models.PanTool(), models.WheelZoomTool(), models.ResetTool(), models.SaveTool()]
        place = {"x_range": x_range, "x_axis_label": x, "y_axis_label": y, "y_axis_type": scale, "tools": tools}
        plot = figure(frame_height=height, sizing_mode="stretch_width", toolbar_location="above", **place)
        plot.toolbar.active_drag, plot.toolbar.logo, plot.toolbar.autohide, plot.toolbar_inner = zoom, None, True, True
        plot.xgrid.visible = False
        whole = models.NumeralTickFormatter(format="0,0")
        plain = models.BasicTickFormatter(power_limit_low=-5, power_limit_high=6)
        plot.xaxis.ticker, plot.xaxis.formatter = models.BasicTicker(min_interval=1), whole
        plot.yaxis.formatter = whole if y == "tokens/s" else plain
        return plot


def _hover(plot: Any, rows: Mapping[str, str], drawn: Any, mode: str, side: str = "horizontal") -> None:
    tooltips = list(rows.items())
    plot.add_tools(models.HoverTool(tooltips=tooltips, renderers=[drawn], mode=mode, attachment=side, visible=False))


def _add_legend(plot: Any, items: Sequence[Any]) -> None:
    if len(items) > 1:
        columns = 42 // (4 + max(len(item.label["value"]) for item in items))  # as many as fit on a phone
        plot.add_layout(models.Legend(items=list(items), orientation="horizontal", ncols=max(1, columns)), "below")


def _stack(plot: Any, x: str, at: Any, parts: Mapping[str, Any], draw: Callable[..., list[Any]], **how: Any) -> None:
    """Draw seconds on top of each other; the tooltip has their sum, too."""
    source = models.ColumnDataSource({x: at, **parts, "all": sum(parts.values())})
    drawn = draw(list(parts), x=x, source=source, color=_COLORS[: len(parts)], fill_alpha=0.85, **how)
    _add_legend(plot, [models.LegendItem(label={"value": n}, renderers=[r]) for n, r in zip(parts, drawn, strict=True)])
    plot.y_range.start = 0
    top = plot.line(x, "all", source=source, line_alpha=0)
    seconds = {name: f"@{name}{_FORMATS['s']}" for name in (*reversed(list(parts)), "all")}
    _hover(plot, {x: f"@{x}{{0,0}}", **seconds}, top, "vline")


def thin(columns: Sequence[Any]) -> np.ndarray:
    """Return indices of about `_POINTS` points at most: both ends, and the extremes of each column in each stretch.

    So no spike is lost. Of non-finite values one per stretch stays: a line has a gap there.
    """
    length = len(columns[0])
    if length <= _POINTS:
        return np.arange(length)
    kept = {0, length - 1}
    for column in columns:
        for stretch in np.array_split(np.arange(length), _POINTS // (3 * len(columns))):
            values = np.asarray(column, dtype=float)[stretch]
            known = np.isfinite(values)
            lowest, highest = np.where(known, values, np.inf).argmin(), np.where(known, values, -np.inf).argmax()
            kept |= {stretch[lowest], stretch[highest], stretch[known.argmin()]}
    return np.array(sorted(kept))


def smooth(values: Sequence[float]) -> np.ndarray:
    """Return the mean over the neighbours of each value, 1.5 % of all values to each side; nan is left out.

    The window shrinks to 4 to each side where the values end, so that a slope is not shifted.
    """
    array, index = np.asarray(values, dtype=float), np.arange(len(values))
    reach = np.clip(np.minimum(index, index[::-1]), 4, max(4, int(0.015 * len(array))))
    start, stop = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(array))
    known = np.isfinite(array)
    sums, counts = (np.append(0.0, np.cumsum(x)) for x in (np.where(known, array, 0.0), known))
    number = counts[stop] - counts[start]
    return (sums[stop] - sums[start]) / np.where(number > 0, number, np.nan)


def _recent_mean(series: Series) -> np.ndarray:
    rows = series.values[-max(1, len(series.values) // 4) :]
    rows = [row for row in rows if len(row) == len(rows[-1])]  # resumed on another number of ranks
    return np.nan_to_num(np.mean(rows, axis=0)) if rows else np.zeros(0)
