"""Console output of a run: a line for each log step, and a progress bar if the terminal can
redraw.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from titanlite.base.process import Console as EscapingConsole
from titanlite.base.process import raw_output

_MUCH_PADDING = 0.1
_SHOWN = (
    ("loss", "loss/train", 4),
    ("accuracy", "rewards/accuracy", 2),
    ("margin", "rewards/margin", 3),
)
_MEMORY = {"memory/max_reserved_gib": "mem", "memory/host_peak_rss_gib": "host mem"}
_WIDEST_BAR = 24
_REDRAW_S = 0.1
_PACE_S = 3600.0  # the latest seconds, from whose pace the remaining time is estimated


def format_rate(flops_per_s: float) -> str:
    """Return a rate with the unit that keeps it readable: `412.3 TFLOP/s`, `35.1 GFLOP/s`."""
    scale, unit = next(
        (pair for pair in ((1e12, "T"), (1e9, "G")) if flops_per_s >= pair[0]), (1e6, "M")
    )
    return f"{flops_per_s / scale:.1f} {unit}FLOP/s"


def format_line(
    step: int,
    num_steps: int,
    values: Mapping[str, Any],
    most_load: float = 0.0,
) -> str:
    """Return the values of one log step, keyed by metric name, as one aligned line; absent values
    are skipped.

    Of the lists of values per MoE layer, the line shows only the worst load; `most_load` is the
    largest possible load (0: unknown). The line shows the padding if there is much of it, because
    FLOP/s and MFU count padding and tokens/s do not.
    """
    width = len(str(num_steps))
    parts = [
        f"step {step:>{max(width, 5)}}/{num_steps}",
        f"loss {values['loss/train']:7.4f}",
        *(
            f"{label} {values[name]:.{digits}f}"
            for label, name, digits in _SHOWN[1:]
            if name in values
        ),
        f"grad norm {values['grad_norm']:5.2f}",
        f"lr {values['lr']:.1e}",
        f"{values['throughput/tokens_per_s']:>9,.0f} tok/s",
        format_rate(values["throughput/tflops_per_gpu"] * 1e12),
    ]
    if "throughput/mfu" in values:
        parts.append(f"MFU {values['throughput/mfu']:4.1%}")
    if (share := values.get("data/padding", 0.0)) >= _MUCH_PADDING:
        parts.append(f"padding {share:.0%}")
    parts += [
        f"{label} {values[name]:.2f} GiB" for name, label in _MEMORY.items() if name in values
    ]
    if ratios := values.get("moe/load_max_over_mean"):
        bound = f" of at most {most_load:.2f}" if most_load else ""
        parts.append(f"expert load max/mean {max(ratios):.2f}{bound}")
    return "  ".join(parts)


def can_show_bar() -> bool:
    """Return True if standard output is a terminal that can redraw a line (not TERM=dumb)."""
    return sys.stdout.isatty() and Console(file=raw_output()).is_interactive


class ProgressBar:
    """A rich progress bar on the last line of the terminal; the package's log lines scroll above
    it.

    It is drawn only when `show` is called: forked data workers could inherit a refresh thread in
    the middle of drawing. `start_step` steps were done before this process started;
    `steps_per_epoch` is 0 if it is not known.
    """

    def __init__(
        self,
        num_steps: int,
        start_step: int = 0,
        steps_per_epoch: float = 0.0,
        console: Console | None = None,
    ) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(_WIDEST_BAR),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            # Let the terminal wrap lines, not rich, so that lines above the bar are the same as in
            # a pipe.
            console=console or Console(file=raw_output(), soft_wrap=True),
            auto_refresh=False,
            transient=True,
            speed_estimate_period=_PACE_S,
        )
        self._drawn_s = time.monotonic()
        self._values: Mapping[str, float] = {}
        self._task = self._progress.add_task("", total=num_steps, completed=start_step)

    def __enter__(self) -> Self:
        self._streams = sys.stdout, sys.stderr
        self._progress.start()  # replaces the streams by its own, which understand escapes
        sys.stdout, sys.stderr = (
            EscapingConsole(stream, lossy=True) for stream in (sys.stdout, sys.stderr)
        )  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        sys.stdout, sys.stderr = self._streams

    def show(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Redraw the bar after `step`. `values` are those of a log step, keyed by metric name; None
        keeps the latest.
        """
        now = time.monotonic()
        redraw = values is not None or now - self._drawn_s >= _REDRAW_S
        if redraw:
            self._drawn_s = now
        self._values = values or self._values
        parts = [f"epoch {step / self._steps_per_epoch:.2f}"] if self._steps_per_epoch else []
        parts += [
            f"{label} {self._values[name]:.{digits}f}"
            for label, name, digits in _SHOWN
            if name in self._values
        ]
        if self._values:
            parts.append(f"{self._values['throughput/tokens_per_s']:,.0f} tok/s")
        self._progress.update(
            self._task, completed=step, description="  ".join(parts), refresh=redraw
        )
