"""Safe file access: only regular files are read, a run's records survive a full disk, and one run
at a time writes to a folder.

Opening a pipe blocks until its other end opens, and reading a device may never end. Records that
cannot be appended wait for the next record; a file that cannot be replaced keeps its old content.
"""

import errno
import json
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, ClassVar

from titanlite.base.errors import CheckpointError, ConfigError, TitanliteError
from titanlite.base.text import describe_error

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOST_READ_BYTES = 256 << 20  # the largest tokenizer.json of a public model has 34 MB


def check_regular(path: str | Path) -> os.stat_result:
    """Return the status of a regular file, or of a link to one.

    Raises OSError: the file does not exist, or `path` is a folder, a pipe, a device or a socket;
    `strerror` says which.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """Open a file if it is a regular one: never wait for the other end of a pipe, never touch a
    device.

    Raises OSError: as `check_regular`, or the file cannot be opened.
    """
    with suppress(FileNotFoundError):
        check_regular(path)
    return open(path, mode, **options)


def read_regular(path: str | Path, most_bytes: int | None = _MOST_READ_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises OSError: as `open_regular`, or the file has more than `most_bytes` (None: no limit).
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            raise OSError(
                errno.EINVAL,
                f"it has {size} bytes, more than the {most_bytes} that are read",
                str(path),
            )
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file in UTF-8, of at most 256 MiB.

    Raises OSError, as `read_regular`, or ValueError: the file is not UTF-8, not JSON, or nested too
    deeply.
    """
    return parse_json(read_regular(path).decode("utf-8"))


class AppendedFile:
    """A file to which records are appended whole or not at all. A record that cannot be written
    waits for the next record.

    The file is opened for each record, so that a killed process loses no record; its folder is
    created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = bytearray()

    def append(self, record: bytes = b"") -> None:
        """Write the waiting records and then `record`, in one piece. Raises OSError: they cannot be
        written, and wait.
        """
        self._waiting += record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            written = 0
            try:
                while written < len(self._waiting):
                    written += file.write(self._waiting[written:])
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise
        self._waiting.clear()


@contextmanager
def write_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path`; on success it replaces `path`, on an error it is
    removed.
    """
    # Host, process and thread: on some network file systems flock does not reach other hosts, and
    # two of them may write at once.
    writer = f"{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}"
    temporary = path.with_name(f"{path.name}.{writer}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Without this, a power cut can leave the new name with the right size and zeros inside.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`; if that fails, the old content stays.

    Raises OSError: the file cannot be written, or `path` exists and is not a regular file.
    """
    with suppress(FileNotFoundError):
        check_regular(path)  # replacing /dev/null would be an accident
    with write_atomic(path) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Return True if the disk or a quota is full, or the file is too large: a later write may
    succeed.
    """
    return error.errno in _NO_SPACE


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_LOCK_FILE = ".run.lock"
LOCK_WAIT_S = 10.0  # the lock of a dying process is released after a moment
# A lock file describes the process that writes into the run's folder. These values stand in for a
# file that cannot be read, or for what it does not say. `rendezvous` is the rendezvous of the run's
# machines, if there are several.
_UNKNOWN = {"pid": 0, "host": "an unknown machine", "since": "an unknown time", "rendezvous": ""}


class FolderLock:
    """The exclusive right to write into a run's folder, until this object or its process ends,
    however it ends.

    One per folder and process: a second call returns the same object. Reading needs no lock.
    """

    _held: ClassVar["weakref.WeakValueDictionary[Path, FolderLock]"] = weakref.WeakValueDictionary()

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    @classmethod
    def take(
        cls, folder: Path, rendezvous: str = "", wait_s: float = LOCK_WAIT_S
    ) -> "FolderLock | None":
        """Lock `folder`, which exists; return None if its file system has no locks.

        If a different machine of the same rendezvous still holds the lock after `wait_s` seconds,
        that machine was lost, and the file server has not noticed. (Its launcher would have ended
        the process before the machines met again.) The lock is then taken over.

        Raises ConfigError: another process holds the lock; OSError: the lock file cannot be
        created.
        """
        # imported here, because the configuration is read without other packages
        from filelock import FileLock, Timeout

        path = folder.resolve() / _LOCK_FILE
        if (held := cls._held.get(path)) is not None:
            return held
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": since,
            "rendezvous": rendezvous,
        }
        lock = FileLock(path, timeout=wait_s)
        try:
            lock.acquire()
        except Timeout:
            holder = _read_holder(path)
            if not rendezvous or holder["rendezvous"] != rendezvous or holder["host"] == me["host"]:
                raise ConfigError(
                    f"job.dump_folder: another run writes into {folder}: process {holder['pid']} "
                    f"on {holder['host']}, since {holder['since']}. Wait for its end, or end it, "
                    f"or set another job.dump_folder. Remove {path} if that machine is gone."
                ) from None
            path.unlink(missing_ok=True)
            lock.acquire()
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        with suppress(OSError):  # disk full: others cannot read who holds it
            path.write_text(json.dumps(me))
        found = cls._held[path] = cls(lock)
        return found

    @classmethod
    def remove_unused(cls) -> None:
        """Remove the folders that contain only a lock of this process: its run was refused before
        it wrote anything.
        """
        for path in list(cls._held):
            with suppress(OSError):
                if os.listdir(path.parent) == [path.name]:
                    path.unlink()
                    path.parent.rmdir()


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        return _UNKNOWN | json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return _UNKNOWN


def render(what: str, write: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the content of the files that `write` writes into an empty folder, by file name.
    Raises as `saving_as`.
    """
    with saving_as(what), TemporaryDirectory(prefix="titanlite-") as name:
        write(Path(name))
        files = sorted(path for path in Path(name).rglob("*") if path.is_file())
        return {str(path.relative_to(name)): path.read_bytes() for path in files}


@contextmanager
def saving_as(what: str) -> Iterator[None]:
    """Turn any exception of the body into a CheckpointError: `what` cannot be saved."""
    try:
        yield
    except TitanliteError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint: {what} cannot be saved: {describe_error(error)}. Correct it."
        ) from error
