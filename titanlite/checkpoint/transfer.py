"""How far reading or writing is: a bar on rank 0's terminal, one log line where there is none."""

import os
import sys
import threading
import time
from typing import Any, Self

from titanlite.base.log import logger, raw_output

_GB = 1e9


class Transfer:
    """Counts the bytes of one transfer of this rank; a context manager. Thread-safe.

    Shows a bar on rank 0 if standard output is a terminal and there is more than a moment's work.
    """

    def __init__(self, text: str, total_bytes: int) -> None:
        self._text, self._total = text, total_bytes
        self._lock = threading.Lock()
        self._bar: Any = None
        self.done_bytes = 0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        on_terminal = sys.stdout.isatty() and os.environ.get("RANK", "0") == "0"
        if on_terminal and self._total > 256 << 20:
            from rich import console, progress  # only where someone looks

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                transient=True,
                console=console.Console(file=raw_output()),
            )
            self._task = self._bar.add_task(self._text, total=self._total)
            self._bar.start()
        return self

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done_bytes += nbytes
            if self._bar is not None:
                self._bar.update(self._task, completed=self.done_bytes)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None and self._total:
            logger.info("checkpoint: %s: %s", self._text, rate(self.done_bytes, time.perf_counter() - self._start))


def rate(nbytes: int, seconds: float) -> str:
    """`0.98 GB in 0.8 s, 1.23 GB/s`."""
    amount = f"{nbytes / _GB:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
    return f"{amount} in {seconds:.1f} s, {nbytes / _GB / max(seconds, 1e-9):.2f} GB/s"
