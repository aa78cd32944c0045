"""How far reading or writing is: a bar on rank 0's terminal, one log line where there is none."""

import os
import sys
import threading
import time
from typing import Any, Self

from titanlite.base.log import logger, raw_output
from titanlite.base.tables import format_size


class Transfer:
    """Counts the bytes of one transfer of this rank; a context manager. Thread-safe.

    Shows a bar on rank 0's terminal if there is more than a moment's work. The line at the end is of the whole folder.
    """

    def __init__(self, text: str, total_bytes: int, folder_bytes: int) -> None:
        self._text, self._total, self._folder_bytes = text, total_bytes, folder_bytes
        self._lock = threading.Lock()
        self._bar: Any = None
        self.done_bytes = 0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        on_terminal = sys.stdout.isatty() and os.environ.get("RANK", "0") == "0"
        alone = raw_output() in (sys.stdout, getattr(sys.stdout, "raw_stream", None))  # no bar of the training
        if on_terminal and alone and self._total > 256 << 20:
            from rich import console, progress  # only where someone looks

            self._bar = progress.Progress(
                *(progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn()),
                *(progress.TransferSpeedColumn(), progress.TimeRemainingColumn()),
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
            seconds = time.perf_counter() - self._start
            logger.info("checkpoint: %s: %s", self._text, format_transfer(self._folder_bytes, seconds))


def format_transfer(nbytes: int, seconds: float) -> str:
    """`0.98 GB in 0.8 s, 1.23 GB/s`; without a rate where it would round to 0."""
    rate = nbytes / 1e9 / max(seconds, 1e-9)
    return f"{format_size(nbytes)} in {seconds:.1f} s" + (f", {rate:.2f} GB/s" if rate >= 0.01 else "")
