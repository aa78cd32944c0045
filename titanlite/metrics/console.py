"""Console output of a run: a line per log step, and progress bars where the terminal can redraw."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
)

from titanlite.base.process import Console as EscapingConsole
from titanlite.base.process import raw_output

_MUCH_PADDING = 0.1
_SHOWN = (("loss", "loss/train", 4), ("accuracy", "rewards/accuracy", 2), ("margin", "rewards/margin", 3))
_NARROWEST_BAR, _WIDEST_BAR, _REDRAW_S = 2, 24, 0.1


def format_rate(flops_per_s: float) -> str:
    """Write a rate with the unit that keeps it readable: `412.3 TFLOP/s`, `35.1 GFLOP/s`."""
    scale, unit = next((pair for pair in ((1e12, "T"), (1e9, "G")) if flops_per_s >= pair[0]), (1e6, "M"))
    return f"{flops_per_s / scale:.1f} {unit}FLOP/s"


def format_line(
    step: int,
    num_steps: int,
    values: Mapping[str, float],
    layers: Mapping[str, Sequence[float]] | None = None,
    most_load: float = 0.0,
) -> str:
    """Write the values of one log step, keyed by metric name, as one aligned line; absent values are skipped.

    Of the values per MoE layer, `layers`, it shows the worst load, which is at most `most_load` (0:
    unknown). Padding is shown if there is much of it: FLOP/s and MFU count it, tokens/s do not.
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
        bound = f" of at most {most_load:.2f}" if most_load else ""
        parts.append(f"expert load max/mean {max(ratios):.2f}{bound}")
    return "  ".join(parts)


def can_show_bar() -> bool:
    """Return whether standard output is a terminal that can redraw a line (not TERM=dumb)."""
    return sys.stdout.isatty() and Console(file=raw_output()).is_interactive


class ProgressBar:
    """A rich progress bar on the last line of the terminal; the package's log lines scroll above it.

    It is drawn only when `show` is called: no refresh thread, which forked data workers could inherit mid-draw.
    `start_step` steps were done before this process started; `steps_per_epoch` is 0 where that is not known.
    """

    def __init__(
        self, num_steps: int, start_step: int = 0, steps_per_epoch: float = 0.0, console: Console | None = None
    ) -> None:
        self._num_steps, self._steps_per_epoch = num_steps, steps_per_epoch
        # Wrapped by the terminal, not by rich: lines above the bar are those that a pipe gets.
        self._console = console or Console(file=raw_output(), soft_wrap=True)
        self._column = BarColumn(_WIDEST_BAR)
        self._progress = Progress(
            *(TextColumn("step {task.completed:.0f}/{task.total:.0f}"), self._column, TextColumn("{task.description}")),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._start_s = self._drawn_s = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._values: Mapping[str, float] = {}
        self._task = self._progress.add_task(self._describe(start_step), total=num_steps, completed=start_step)

    def __enter__(self) -> Self:
        self._streams = sys.stdout, sys.stderr
        self._progress.start()  # puts its own streams in place, which understand escapes
        sys.stdout, sys.stderr = (EscapingConsole(stream, lossy=True) for stream in (sys.stdout, sys.stderr))  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        sys.stdout, sys.stderr = self._streams

    def show(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Redraw the bar after `step`, with the `values` of a log step, keyed by metric name, or the latest ones."""
        now = time.monotonic()
        self._first = self._first or (step, now)  # the first step compiles and warms up: no measure of the pace
        if values is None and now - self._drawn_s < _REDRAW_S:
            return
        self._values, self._drawn_s = values or self._values, now
        self._progress.update(self._task, completed=step, description=self._describe(step), refresh=True)

    def _describe(self, step: int) -> str:
        """Return what stands after the bar; the least important parts are left out where the terminal is narrow."""
        values, now = self._values, time.monotonic()
        parts = {"epoch": f"epoch {step / self._steps_per_epoch:.2f}"} if self._steps_per_epoch else {}
        parts |= {label: f"{label} {values[name]:.{digits}f}" for label, name, digits in _SHOWN if name in values}
        if values:
            parts["speed"] = f"{values['throughput/tokens_per_s']:,.0f} tok/s"
        parts["elapsed"] = f"elapsed {_clock(now - self._start_s)}"
        first_step, first_s = self._first or (step, now)
        if step > first_step:
            parts["left"] = f"left {_clock((self._num_steps - step) * (now - first_s) / (step - first_step))}"
        room = self._console.width - len(f"step {step}/{self._num_steps}") - 3
        for dispensable in ("", "epoch", "margin", "elapsed", "accuracy", "speed", "loss"):
            parts.pop(dispensable, "")
            text = "  ".join(parts.values())
            if room - len(text) >= _NARROWEST_BAR:
                break
        self._column.bar_width = min(max(room - len(text), _NARROWEST_BAR), _WIDEST_BAR)
        return text


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")  # 07:30, 1:05:00
