"""Results that are built once per machine and shared by all processes that start at the same time.

Every rank asks for the same file; one builds it, the others sleep on a file lock and then read it. Files appear by
`os.replace`, so a reader sees a whole file or none, and a killed builder leaves nothing that looks finished.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import IO, TypeVar

from titanlite.base.env import get_cache_home
from titanlite.base.errors import DataError
from titanlite.base.files import open_regular, write_atomic
from titanlite.config.data import DataSection

T = TypeVar("T")
_FINE_NS, _COARSE_NS = 50_000_000, 2_000_000_000  # clock ticks of file systems with and without fractions of a second


def get_cache_folder(data: DataSection) -> Path:
    """Return `data.cache_folder`, or `$XDG_CACHE_HOME/titanlite`, or `~/.cache/titanlite`. It need not exist."""
    return Path(data.cache_folder).expanduser() if data.cache_folder else get_cache_home()


@cache
def get_code_digest(*folders: Path) -> str:
    """Return a digest of the code in `folders`: what is cached was made by it, and changes with it."""
    digest = sha256()
    for file in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def load_or_build(path: Path, load: Callable[[], T | None], build: Callable[[], None]) -> tuple[T, float]:
    """Return `load()`, after `build()` if there was nothing valid to load.

    `load` returns None when the file is missing or damaged; it may run while another process builds. `build` runs under
    a lock and must end with `write_atomic`. Also returned are the seconds spent on building it or waiting for that.

    Raises DataError: the folder of `path` cannot be created, locked or written, or the new file is damaged.
    """
    if (value := load()) is not None:
        return value, 0.0
    start_s = time.monotonic()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_name(path.name + ".lock")):
            if (value := load()) is None:  # no other process has made it while this one waited
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


def load_or_make(
    path: Path,
    load: Callable[[], T | None],
    make: Callable[[], T],
    save: Callable[[T, IO[bytes]], object],
    *,
    lock: Path | None = None,
) -> T:
    """Return `load()`, or what `make` makes under a lock; `save` writes it, unless the cache cannot be written.

    `load` returns None when the file is missing, damaged or cannot be read.
    """
    if (value := load()) is not None:
        return value
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_lock(lock or path.with_name(path.name + ".lock")))
        except OSError:
            return make()
        if (value := load()) is None:
            value = make()
            with suppress(OSError), write_atomic(path) as file:
                save(value, file)
        return value


def stamp_files(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Return (path, inode, size, mtime, ctime) of each file, times in ns: alike for files that have not changed.

    No program can set ctime, the time of the last change. Raises OSError: a file is missing or cannot be read.
    """
    stamps = []
    for file in files:
        with open_regular(file) as stream:  # a network file system asks its server only when a file is opened
            s = os.fstat(stream.fileno())
        stamps.append((os.path.abspath(file), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return stamps


def read_once(folder: Path, what: str, files: Sequence[Path], compute: Callable[[], T]) -> T:
    """Return `compute()`, or its cached result for the same files: a value for JSON, not None.

    A digest of a terabyte would otherwise take each rank a quarter of an hour at each start. `files` are the same if
    their stamps are; `what` says which value it is, with all else that it depends on. Where the cache `folder` cannot
    be used, it is computed.
    """
    try:
        stamps = stamp_files(files)
    except OSError:
        return compute()  # says which file it is
    key = sha256(json.dumps([get_code_digest(Path(__file__).parent), what, stamps]).encode()).hexdigest()[:32]
    path = folder / "read" / f"{key}.json"

    def load() -> T | None:
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None

    def make() -> T:
        # Until the clock of the file system has ticked, a second change could leave no trace.
        now, waits = time.time_ns(), [0]
        for *_, ctime in stamps:
            tick = _FINE_NS if ctime % 1_000_000_000 else _COARSE_NS
            waits.append(min(ctime + tick - now, tick))
        time.sleep(max(waits) / 1e9)
        return compute()

    return load_or_make(path, load, make, lambda value, file: file.write(json.dumps(value).encode()))
