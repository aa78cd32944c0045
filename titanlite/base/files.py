"""Files of a user: regular ones only, and those of a run survive a full disk.

Opening a pipe waits for its other end, and reading a device may never end. What cannot be appended waits, what cannot
be replaced stays.
"""

import errno
import json
import os
import socket
import stat
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_MOST_BYTES = 16 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOST_JSON_BYTES = 256 << 20  # the largest tokenizer.json of a public model has 34 MB
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def check_regular(path: str | Path) -> os.stat_result:
    """Return the status of a regular file; a link to one is one.

    Raises OSError: there is none, or `path` is a folder, a pipe, a device or a socket; `strerror` says which.
    """
    return _check_status(os.stat(path), path)


def _check_status(status: os.stat_result, path: str | Path) -> os.stat_result:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return status


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """`open`, of a regular file only: neither waits for the other end of a pipe, nor touches a device.

    Raises OSError: as `check_regular`, or it cannot be opened.
    """

    def opener(name: str, flags: int) -> int:
        with suppress(FileNotFoundError):
            check_regular(name)  # opening a device may do something
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
        try:
            _check_status(os.fstat(descriptor), name)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, opener=opener, **options)


def read_regular(path: str | Path, most_bytes: int | None = None) -> bytes:
    """Return the content of a regular file. Raises OSError: as `open_regular`, or it has more than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            raise OSError(errno.EINVAL, f"it has {size} bytes, more than the {most_bytes} that are read", str(path))
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, where nesting that is too deep, and a name that an object has twice, are ValueErrors."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise ValueError if a name comes twice: some readers take the first, others the last."""
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"it has {', '.join(ascii(name) for name, count in counts.items() if count > 1)} twice")
    return table


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file in UTF-8, of at most 256 MiB.

    Raises OSError, as `read_regular`, or ValueError: it is no UTF-8 or no JSON, or nested too deeply.
    """
    return parse_json(read_regular(path, _MOST_JSON_BYTES).decode("utf-8"))


class AppendedFile:
    """Appends records to a file. Those that cannot be written wait for the next call, and the file has no half one.

    It is opened anew each time, its folder made if it is missing: nothing is lost if the process is killed, nor if
    the disk was full when the run began. At most 16 MiB wait; of more, the oldest records are given up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque()

    @property
    def num_waiting(self) -> int:
        """Records that are not in the file yet."""
        return len(self._waiting)

    def append(self, record: bytes = b"") -> None:
        """Write what waits and then `record`, in one piece. Raises OSError: it cannot be written, and waits."""
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
        with open_regular(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise


@contextmanager
def write_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success it replaces `path`, on an error it is removed."""
    # Host, process, thread: on some network file systems flock does not reach other hosts, and two may write at once.
    writer = f"{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}"
    temporary = path.with_name(f"{path.name}.{writer}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave the new name with the right size and zeros inside
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`; if that fails, what was there before is there still.

    Raises OSError: it cannot be written, or `path` is there and no regular file.
    """
    with suppress(FileNotFoundError):
        check_regular(path)  # to replace /dev/null would be an accident
    with write_atomic(path) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Wait until what was written to a file is on the disk; of a folder, until its names are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Return True if there is no space, or not for this user or file: what may be better later."""
    return error.errno in _NO_SPACE
