"""The numbers that a reader wants first, and the words that say how a run ended."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from titanlite.features.report.read import Run, Series

_RECENT = 0.1
_STARTS, _ENDS = ("start", "resume", "restart"), ("end", "stop", "error")


class Number(NamedTuple):
    """One headline number.

    Attributes:
        label: what it is.
        text: its value with unit.
        detail: a short remark, or empty.
    """

    label: str
    text: str
    detail: str = ""


def get_headline(run: Run) -> list[Number]:
    """The headline numbers that this run has, in order."""
    train = run.scalars["loss/train"]
    total = run.config.get("training.steps")
    found = [Number("Steps", f"{train.steps[-1]:,}", f"of {total:,}" if isinstance(total, int) else "")]
    recent = [value for value in train.values[-max(1, int(_RECENT * len(train.values))) :] if math.isfinite(value)]
    if recent:
        detail = "" if len(recent) == 1 else f"mean of the last {len(recent)} points"
        found.append(Number("Training loss", f"{sum(recent) / len(recent):.4f}", detail))
    found += _results(run)
    found += _speed(run)
    memory = [name for name in ("memory/max_reserved_gib", "memory/host_peak_rss_gib") if _finite(run, name)]
    if memory:
        kind = "reserved on the fullest GPU" if "reserved" in memory[0] else "of the fullest rank on the host"
        found.append(Number("Peak memory", f"{max(_finite(run, memory[0])):.2f} GiB", kind))
    seconds = sum(_step_seconds(run))
    if seconds:
        found.append(Number("Time in steps", format_duration(seconds), _whole_time(run)))
    return found


def _results(run: Run) -> list[Number]:
    found = []
    if "loss/validation" in run.scalars:
        series = run.scalars["loss/validation"]
        found.append(Number("Validation loss", f"{series.last:.4f}", _best(series, min)))
    for name, series in run.scalars.items():
        if name.startswith("eval/") and name not in ("eval/ended", "eval/seconds"):
            label = name.removeprefix("eval/").replace("_", " ")
            found.append(Number(f"Evaluation: {label}", f"{series.last:.4f}", _best(series, max)))
    return found


def _best(series: Series, choose: Callable[..., tuple[float, int] | None]) -> str:
    """Value and step that `choose`, min or max, takes of those that are finite; empty if none is."""
    points = ((value, step) for value, step in zip(series.values, series.steps, strict=True) if math.isfinite(value))
    best = choose(points, default=None)
    return "" if best is None else f"best {best[0]:.4f} at step {best[1]:,}"


def _speed(run: Run) -> list[Number]:
    found = []
    rates = _finite(run, "throughput/tokens_per_s")
    if rates:
        per_rank = median(rates) / max(int(run.environment.get("world_size", 1)), 1)
        found.append(
            Number("Tokens per second", format_count(median(rates)), f"median; {format_count(per_rank)} per rank")
        )
    shares = _finite(run, "throughput/mfu")
    if shares:
        found.append(Number("MFU", f"{100 * median(shares):.1f} %", "median"))
    elif rates := _finite(run, "throughput/tflops_per_gpu"):
        found.append(Number("Model FLOP/s", _format_flops(median(rates) * 1e12), "median, per rank"))
    return found


def _finite(run: Run, name: str) -> list[float]:
    series = run.scalars.get(name)
    return [] if series is None else [value for value in series.values if math.isfinite(value)]


def _step_seconds(run: Run) -> list[float]:
    """Seconds between the points: steps since the last one times the time of a step."""
    series = run.scalars.get("time/step_s")
    if series is None:
        return []
    steps = [0, *series.steps]
    return [(steps[i + 1] - steps[i]) * value for i, value in enumerate(series.values) if math.isfinite(value)]


def _whole_time(run: Run) -> str:
    whole = run.end - run.begin
    return f"{format_duration(whole)} from first to last point" if whole > 0 else ""


def describe_end(run: Run) -> str:
    """How the run ended, or that it has not."""
    step = run.scalars["loss/train"].steps[-1]
    ends = [event for event in run.events if event.get("kind") in _ENDS + _STARTS]
    last = ends[-1] if ends else {}
    text = str(last.get("text", ""))
    if last.get("kind") == "error":
        return f"Ended with an error at step {last.get('step', step)}: {text}."
    if last.get("kind") in _ENDS:
        return f"{text[:1].upper()}{text[1:]}."
    if not run.events:
        return f"Last point at step {step:,}."
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.end))
    return f"No end recorded: it is running, or it was killed. Last point at step {step:,}, {when}."


def compare_headlines(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Headline numbers side by side: (labels, one list of texts per run, with a dash where a run has none)."""
    headlines = [{number.label: number.text for number in get_headline(run)} for run in runs]
    labels = list(dict.fromkeys(label for headline in headlines for label in headline))
    return labels, [[headline.get(label, "-") for label in labels] for headline in headlines]


def format_duration(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 4 min`, `3 d 2 h`."""
    whole = round(seconds)
    for unit, size, smaller, step in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // step
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def format_count(value: float) -> str:
    """With three or four digits that count: `12,345`, `1.23 M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def format_bytes(value: float) -> str:
    """`1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError


def _format_flops(rate: float) -> str:
    for unit, size in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if rate >= size:
            return f"{rate / size:.1f} {unit}"
    return f"{rate / 1e6:.1f} MFLOP/s"
