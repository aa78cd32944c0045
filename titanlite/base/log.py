"""One logger for the package, and the console that it and everything else writes to.

Rank 0 logs from INFO up, also to `log.txt` in the run's folder. Other ranks log from WARNING up, with their rank in
front.
"""

import errno
import io
import logging
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from titanlite.base.env import read_rank
from titanlite.base.files import AppendedFile

logger = logging.getLogger("titanlite")
LOG_FILE = "log.txt"
# All of C0 and C1 but tab and newline, and what changes the direction of text: names in a stranger's files must neither
# steer the terminal nor look like others.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Return `text` with its control characters spelled out, `\\x1b` for an escape."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class Console:
    """Standard output or error: no control character of a text gets through, and any character can be written.

    What draws on a terminal writes to `raw_stream`. Other attributes are those of the stream. With `goes_on`, text that
    cannot be written is dropped, for a run is worth more than its console; otherwise the OSError is raised.
    """

    def __init__(self, stream: TextIO, *, goes_on: bool) -> None:
        self.raw_stream, self._goes_on = stream, goes_on
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal, or bytes of a path that are no UTF-8

    def write(self, text: str) -> int:
        """Write `text`; a carriage return at its beginning or end, as bars write it, stays on standard error."""
        safe = _CONTROLS.search(text) is None
        shown = text if safe else escape_controls(text)
        if not safe and self.raw_stream is sys.__stderr__:
            bare = text.removeprefix("\r")
            inner = bare.removesuffix("\r")
            shown = "\r" * (bare != text) + escape_controls(inner) + "\r" * (inner != bare)
        try:
            self.raw_stream.write(shown)
        except OSError:
            if not self._goes_on:
                raise
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.raw_stream.flush()
        except OSError:
            if not self._goes_on:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def open_console(*, goes_on: bool) -> None:
    """Put a `Console` in place of standard output and error, for as long as this process lives; call once, early.

    Descriptors that are closed are opened on nothing, or the next file that is opened would get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
        if getattr(sys, name) is None:
            stream = open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    sys.stdout, sys.stderr = Console(sys.stdout, goes_on=goes_on), Console(sys.stderr, goes_on=True)  # type: ignore[assignment]


def raw_output() -> TextIO:
    """Return standard output for what draws on the terminal: colors and bars, and no text that was not escaped."""
    stream = sys.stdout
    while (inner := getattr(stream, "raw_stream", None)) is not None:  # a bar may be in between
        stream = inner
    return stream


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
    """Handler that keeps lines until it knows its file, then appends each to it. Lines that it cannot write wait."""

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
