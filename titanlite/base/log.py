"""One logger for the package.

Rank 0 logs from INFO up, and also writes to `log.txt` in the run's folder. Other ranks log from
WARNING up; their lines begin with their rank.
"""

import logging
import logging.handlers
import sys
from functools import cache
from pathlib import Path
from typing import TextIO

from titanlite.base.process import escape_controls, read_rank

logger = logging.getLogger("titanlite")
LOG_FILE = "log.txt"


class _RankFormatter(logging.Formatter):
    """Formatter: `12:30:01 text` on rank 0, and `12:30:01 [rank 3] WARNING text` on other ranks."""

    def format(self, record: logging.LogRecord) -> str:
        rank = read_rank()
        parts = [self.formatTime(record, self.datefmt or "%H:%M:%S")]
        if rank:
            parts.append(f"[rank {rank}]")
        if record.levelno >= logging.WARNING:
            parts.append(record.levelname)
        return " ".join([*parts, escape_controls(record.getMessage())])


class _OutputHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current `sys.stdout`, which a progress bar may have replaced."""

    stream = property(lambda self: sys.stdout, lambda self, stream: None)  # type: ignore[assignment]


class _FileHandler(logging.FileHandler):
    """Handler that appends lines to a file; the first failure is reported on the console, which
    shows all lines anyway.
    """

    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not self._failed:
            self._failed = True
            sys.stderr.write(f"titanlite: cannot write {self.baseFilename}: {sys.exc_info()[1]}.\n")


def setup_logger() -> None:
    """Send the package's log lines to standard output. Call once per process; later calls change
    nothing.
    """
    if logger.handlers:
        return
    handler = _OutputHandler()
    handler.setFormatter(_RankFormatter())
    logger.addHandler(handler)
    if read_rank() == 0:
        # Holds the lines until `log_to_folder` names the folder.
        logger.addHandler(
            logging.handlers.MemoryHandler(capacity=sys.maxsize, flushLevel=sys.maxsize)
        )
    logger.setLevel(logging.INFO if read_rank() == 0 else logging.WARNING)
    logger.propagate = False


@cache
def warn_once(text: str) -> None:
    """Log a warning on rank 0, once per process even if the function is called again with the same
    text.
    """
    if read_rank() == 0:
        logger.warning("%s", text)


def log_to_folder(folder: Path) -> None:
    """Write rank 0's lines to `log.txt` in `folder` too, including the lines since `setup_logger`.
    A resumed run appends.
    """
    for early in logger.handlers[:]:
        if isinstance(early, logging.handlers.MemoryHandler):
            handler = _FileHandler(
                folder / LOG_FILE, encoding="utf-8", errors="replace", delay=True
            )
            handler.setFormatter(_RankFormatter(datefmt="%Y-%m-%d %H:%M:%S"))
            early.setTarget(handler)
            early.flush()
            logger.removeHandler(early)
            logger.addHandler(handler)
