"""Results that are built once per machine and shared by all processes that start at the same time.

Every rank asks for the same file; one builds it, the others sleep on a file lock and then read it. Files appear by
`os.replace`, so a reader sees a whole file or none, and a killed builder leaves nothing that looks finished.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from titanlite.config.schema import DataSection
from titanlite.errors import DataError

T = TypeVar("T")


def get_cache_folder(data: DataSection) -> Path:
    """`data.cache_folder`, or `$XDG_CACHE_HOME/titanlite`, or `~/.cache/titanlite`. It need not exist."""
    if data.cache_folder:
        return Path(data.cache_folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titanlite"


def load_or_build(path: Path, load: Callable[[], T | None], build: Callable[[], None]) -> tuple[T, float]:
    """Return `load()`, after `build()` if there was nothing valid to load.

    `load` returns None when the file is missing or damaged; it may run while another process builds. `build` runs
    under an exclusive lock on `path` + '.lock' and must end with `write_atomic`.

    Returns:
        The loaded value, and the seconds spent on building it or waiting for the process that did; 0.0 from cache.

    Raises:
        DataError: the folder of `path` cannot be created, locked or written, or the new file is damaged.
    """
    value = load()
    if value is not None:
        return value, 0.0
    start_s = time.monotonic()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_name(path.name + ".lock")):
            value = load()  # another process may have built it while this one waited
            if value is None:
                build()
                value = load()
    except OSError as error:
        raise DataError(
            f"data: cannot use the cache folder {path.parent}: {error}. Set data.cache_folder to a writable folder."
        ) from error
    if value is None:
        raise DataError(f"data: {path} is damaged although it was just written. Check the disk, or data.cache_folder.")
    return value, time.monotonic() - start_s


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it when the process dies, however it dies."""
    # The lock file stays: deleting it would let a waiter hold the old inode while a newcomer locks a new one.
    with path.open("a") as file:
        with suppress(OSError):  # some network file systems know no locks; then several may build, each its own file
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def write_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success it replaces `path`, on an error it is removed."""
    # Host and process id: on some network file systems flock does not reach other hosts, and two may write at once.
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave the new name with the right size and zeros inside
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
