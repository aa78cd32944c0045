"""Files in a run's folder that survive a full disk: what cannot be appended waits, what cannot be replaced stays."""

import errno
import os
from collections import deque
from contextlib import suppress
from pathlib import Path

_MOST_BYTES = 16 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AppendedFile:
    """Appends records to a file. Those that cannot be written wait for the next call, and the file has no half one.

    It is opened anew each time, its folder made if it is missing: nothing is lost if the process is killed, nor if
    the disk was full when the run began. At most 16 MiB wait; of more, the oldest records are given up.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque()

    @property
    def num_waiting(self) -> int:
        """Records that are not in the file yet."""
        return len(self._waiting)

    def append(self, record: bytes = b"") -> None:
        """Write what waits and then `record`, in one piece.

        Raises:
            OSError: it cannot be written, and waits.
        """
        if record:
            self._waiting.append(record)
        try:
            self._write(b"".join(self._waiting))
        except OSError:
            num_bytes = sum(map(len, self._waiting))
            while num_bytes > _MOST_BYTES:
                num_bytes -= len(self._waiting.popleft())
            raise
        self._waiting.clear()

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`; if that fails, what was there before is there still.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until what was written to a file is on the disk; of a folder, until its names are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """True if there is no space, or not for this user or file: what may be better later."""
    return error.errno in _NO_SPACE
