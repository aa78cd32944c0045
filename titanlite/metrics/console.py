"""Console output of a run: one plain line per log step, and a progress bar on a terminal."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from titanlite.base.log import Console as EscapingConsole
from titanlite.base.log import raw_output

_SLOW_RANK = 1.3
_MUCH_PADDING = 0.1
_SHOWN = (("loss", "loss/train", 4), ("accuracy", "rewards/accuracy", 2), ("margin", "rewards/margin", 3))
_REDRAW_S, _BAR_WIDTH = 0.1, 45  # of the bar at least, with the numbers beside it
_PACE_S = 86_400.0  # over which the bar takes the mean of the pace


def format_rate(flops_per_s: float) -> str:
    """Write a rate with the unit that keeps it readable: `412.3 TFLOP/s`, `35.1 GFLOP/s`."""
    scale, unit = next((pair for pair in ((1e12, "T"), (1e9, "G")) if flops_per_s >= pair[0]), (1e6, "M"))
    return f"{flops_per_s / scale:.1f} {unit}FLOP/s"


def format_line(
    step: int,
    num_steps: int,
    values: Mapping[str, float],
    layers: Mapping[str, Sequence[float]] | None = None,
    slow_reason: str = "",
) -> str:
    """Write the values of one log step, keyed by metric name, as one aligned line; what is absent is left out.

    Of the values per MoE layer, `layers`, it shows the worst load. A rank that others wait for is named only if it is
    much slower than they are; `slow_reason` says why. Padding is shown if there is much of it: FLOP/s and MFU count it,
    tokens/s do not.
    """
    width = len(str(num_steps))
    parts = [
        f"step {step:>{max(width, 5)}}/{num_steps}",
        f"loss {values['loss/train']:7.4f}",
        *(f"{label} {values[name]:.{digits}f}" for label, name, digits in _SHOWN[1:] if name in values),
        f"grad norm {values['grad_norm']:5.2f}",
        f"lr {values['lr']:.1e}",
        f"{values['throughput/tokens_per_s']:>9,.0f} tok/s",
        format_rate(values["throughput/tflops_per_gpu"] * 1e12),
    ]
    if "throughput/mfu" in values:
        parts.append(f"MFU {values['throughput/mfu']:4.1%}")
    if (share := values.get("data/padding", 0.0)) >= _MUCH_PADDING:
        parts.append(f"padding {share:.0%}")
    memory = [values[name] for name in ("memory/max_reserved_gib", "memory/host_peak_rss_gib") if name in values]
    parts += [f"{label} {gib:.2f} GiB" for label, gib in zip(("mem", "host mem"), memory, strict=False)]
    layers = layers or {}
    if ratios := layers.get("moe/load_max_over_mean"):
        parts.append(f"expert load max/mean {max(ratios):.2f}")
    lost = sum(sum(layers.get(name, ())) for name in ("moe/dropped_rows", "moe/duplicated_rows"))
    if lost:
        parts.append(f"{lost:.0f} ROWS LOST OR TWICE")
    if (ratio := values.get("ranks/slowest_over_median", 1.0)) >= _SLOW_RANK:
        parts.append(f"rank {values['ranks/slowest']:.0f} slow ({slow_reason}, {ratio:.1f}x)")
    return "  ".join(parts)


def can_show_bar() -> bool:
    """Return whether standard output is a terminal that can redraw a line (not TERM=dumb)."""
    return sys.stdout.isatty() and Console(file=raw_output()).is_interactive


class ProgressBar:
    """A rich progress bar on the last line of the terminal; the package's log lines scroll above it.

    It is drawn only when `show` is called: no refresh thread, which forked data workers could inherit mid-draw.
    `start_step` steps were done before this process started.
    """

    def __init__(self, num_steps: int, start_step: int = 0, console: Console | None = None) -> None:
        # Wrapped by the terminal, not by rich: lines above the bar are those that a pipe gets.
        self._progress = Progress(
            *(TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(None)),
            *(TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.description}")),
            console=console or Console(file=raw_output(), soft_wrap=True),
            auto_refresh=False,
            transient=True,
            speed_estimate_period=_PACE_S,
        )
        self._drawn_s = time.monotonic()
        self._task = self._progress.add_task("", total=num_steps, completed=start_step)

    def __enter__(self) -> Self:
        self._streams = sys.stdout, sys.stderr
        self._progress.start()  # puts its own streams in place, which understand escapes
        sys.stdout, sys.stderr = (EscapingConsole(stream, goes_on=True) for stream in (sys.stdout, sys.stderr))  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        sys.stdout, sys.stderr = self._streams

    def show(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Redraw the bar after `step`, with the `values` of a log step, keyed by metric name, or the latest ones."""
        now, text = time.monotonic(), None
        if values is None and now - self._drawn_s < _REDRAW_S:
            return
        if values is not None:
            parts = [f"{label} {values[name]:.{digits}f}" for label, name, digits in _SHOWN if name in values]
            parts.insert(1, f"{values['throughput/tokens_per_s']:,.0f} tok/s")
            while len(text := "  ".join(parts)) > max(self._progress.console.width - _BAR_WIDTH, 0):
                parts.pop()
        self._drawn_s = now
        self._progress.update(self._task, completed=step, description=text, refresh=True)
