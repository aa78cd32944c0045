"""What a run shows on the console: one plain line per log step, or a progress bar on a terminal."""

import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from titanlite.base.log import Console as EscapingConsole
from titanlite.base.log import logger, raw_output

_SLOW_RANK = 1.3
_MUCH_PADDING = 0.1


def format_rate(flops_per_s: float) -> str:
    """Write a rate with the unit that keeps it readable: `412.3 TFLOP/s`, `35.1 GFLOP/s`."""
    for unit, scale in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if flops_per_s >= scale:
            return f"{flops_per_s / scale:.1f} {unit}"
    return f"{flops_per_s / 1e6:.1f} MFLOP/s"


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
        f"grad norm {values['grad_norm']:5.2f}",
        f"lr {values['lr']:.1e}",
        f"{values['throughput/tokens_per_s']:>9,.0f} tok/s",
        format_rate(values["throughput/tflops_per_gpu"] * 1e12),
    ]
    if "throughput/mfu" in values:
        parts.append(f"MFU {values['throughput/mfu']:4.1%}")
    if (share := values.get("data/padding", 0.0)) >= _MUCH_PADDING:
        parts.append(f"padding {share:.0%}")
    for name in ("memory/max_reserved_gib", "memory/host_peak_rss_gib"):
        if name in values:
            parts.append(f"mem {values[name]:.2f} GiB")
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
    """

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=16),
            TextColumn("{task.description}"),
            console=console or Console(file=raw_output()),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("starting ...", total=num_steps)
        self._handler_streams: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def __enter__(self) -> Self:
        stdout = sys.stdout
        self._streams = sys.stdout, sys.stderr
        self._progress.start()
        sys.stdout, sys.stderr = (EscapingConsole(stream, goes_on=True) for stream in (sys.stdout, sys.stderr))  # type: ignore[assignment]
        # The bar replaces sys.stdout by a proxy that prints above it; handlers made earlier hold the old stream.
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stdout:
                self._handler_streams.append((handler, stdout))
                handler.setStream(sys.stdout)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for handler, stream in self._handler_streams:
            handler.setStream(stream)
        self._handler_streams.clear()
        self._progress.stop()
        sys.stdout, sys.stderr = self._streams

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Redraw the bar with the values of one log step, keyed by metric name."""
        remaining_s = (self._num_steps - step) * values["time/step_s"]
        parts = [
            f"loss {values['loss/train']:.4f}",
            f"lr {values['lr']:.1e}",
            f"grad norm {values['grad_norm']:.2f}",
            f"{values['throughput/tokens_per_s']:,.0f} tok/s",
        ]
        if "throughput/mfu" in values:
            parts.append(f"MFU {values['throughput/mfu']:.0%}")
        parts.append(str(timedelta(seconds=round(remaining_s))))
        self._progress.update(self._task, completed=step, description=" ".join(parts), refresh=True)
