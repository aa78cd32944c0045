"""One logger for the package.

Rank 0 logs from INFO up, also to `log.txt` in the run's folder. Other ranks log from WARNING up, with their rank in
front.
"""

import logging
import sys
from functools import cache
from pathlib import Path
from typing import TextIO

from titanlite.base.files import AppendedFile
from titanlite.base.process import escape_controls, read_rank

logger = logging.getLogger("titanlite")
LOG_FILE = "log.txt"


class _RankFormatter(logging.Formatter):
    """`12:30:01 text` on rank 0, `12:30:01 [rank 3] WARNING text` elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        rank = read_rank()
        parts = [self.formatTime(record, self.datefmt or "%H:%M:%S")]
        if rank:
            parts.append(f"[rank {rank}]")
        if record.levelno >= logging.WARNING:
            parts.append(record.levelname)
        return " ".join([*parts, escape_controls(record.getMessage())])


class _OutputHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to `sys.stdout` at the time of the line: a progress bar may have replaced it."""

    stream = property(lambda self: sys.stdout, lambda self, stream: None)  # type: ignore[assignment]


class _FileHandler(logging.Handler):
    """Handler that keeps lines until it knows its file, then appends each to it. Lines that cannot be written wait."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_RankFormatter(datefmt="%Y-%m-%d %H:%M:%S"))
        self._file: AppendedFile | None = None
        self._lines: list[str] = []
        self._failing = False

    def open(self, path: Path) -> None:
        """Append to `path` from now on, beginning with the lines so far."""
        self._file = AppendedFile(path)
        self._write()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        data = "".join(f"{line}\n" for line in self._lines).encode("utf-8", errors="replace")
        self._lines.clear()
        try:
            self._file.append(data)
            self._failing = False
        except OSError as error:  # a full disk ends the run elsewhere, where something is lost
            if self._failing:
                return
            self._failing = True
            logger.warning(
                "cannot write %s: %s. The console has the log; the file gets it when there is space.",
                *(self._file.path, error.strerror or error),
            )


def setup_logger() -> None:
    """Send the package's log lines to standard output; call once per process, later calls change nothing."""
    if logger.handlers:
        return
    handler = _OutputHandler()
    handler.setFormatter(_RankFormatter())
    logger.addHandler(handler)
    if read_rank() == 0:
        logger.addHandler(_FileHandler())
    logger.setLevel(logging.INFO if read_rank() == 0 else logging.WARNING)
    logger.propagate = False


@cache
def warn_once(text: str) -> None:
    """Log a warning, on rank 0 and once per process, however often it is found."""
    if read_rank() == 0:
        logger.warning("%s", text)


def log_to_folder(folder: Path) -> None:
    """Write rank 0's lines to `log.txt` in `folder` too, those since `setup_logger` included. A resumed run appends."""
    for handler in logger.handlers:
        if isinstance(handler, _FileHandler):
            handler.open(folder / LOG_FILE)
