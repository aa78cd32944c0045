"""This process: its environment (only `base` and `launch` read and set it), console, imports and
exit.

A process without a launcher is rank 0 of 1.
"""

import atexit
import ctypes
import gc
import io
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from titanlite.base.errors import ConfigError


def read_rank() -> int:
    """Return RANK: the number of this process among all ranks."""
    return int(os.environ.get("RANK", "0"))


def read_world_size() -> int:
    """Return WORLD_SIZE: the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def read_ranks_here() -> int:
    """Return LOCAL_WORLD_SIZE: the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def count_threads() -> int:
    """Return the number of threads for this rank's host work: its share of this machine's cores, 1
    to 16.
    """
    return min(max(len(os.sched_getaffinity(0)) // read_ranks_here(), 1), 16)


def read_variable(name: str) -> str | None:
    """Return the value of the variable `name`, or None if it is not set."""
    return os.environ.get(name)


def remove_variable(name: str) -> None:
    """Remove the variable `name` from the environment, for libraries that start later."""
    os.environ.pop(name, None)


def set_defaults(values: Mapping[str, str]) -> dict[str, str]:
    """Set the environment variables that are not set yet; return the resulting value of each."""
    return {name: os.environ.setdefault(name, value) for name, value in values.items()}


def get_cache_home() -> Path:
    """Return titanlite's folder in `$XDG_CACHE_HOME`, or in `~/.cache`. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titanlite"


def secure_cache() -> None:
    """Set torch.compile's cache folder to a private one of the user (0700), unless
    TORCHINDUCTOR_CACHE_DIR names another.

    Libraries in the cache are loaded and run. torch's default is in /tmp, under a name that anybody
    can create first.

    Raises ConfigError: the folder belongs to another user, other users can write to it, or it
    cannot be created.
    """
    folder = Path(set_defaults({_CACHE: str(get_cache_home() / "torchinductor")})[_CACHE])
    remedy = f"Set {_CACHE} to a folder of yours that others cannot write to (`chmod go-w`)."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"compile: cannot use the cache folder {folder}: {error.strerror}. {remedy}"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"compile: torch.compile loads libraries from {folder}, which user {found.st_uid} owns "
            f"(mode {found.st_mode & 0o777:o}); user {os.getuid()} runs this. {remedy}"
        )


@contextmanager
def environment_kept() -> Iterator[None]:
    """Restore all environment variables afterwards."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_OTHERS_WRITE = 0o022
# Set by profilers that use CUPTI, such as Nsight Systems: they write their records when the process
# is torn down.
_RECORDERS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH")
_WANTED_FILES = 65_536  # a run of 400 ranks exceeds the usual limit of 1024
# from glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_exit_code: int | None = None
# All C0 and C1 controls except tab and newline, and characters that change the direction of text:
# names in untrusted files must neither control the terminal nor look like different names.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Return `text` with its control characters escaped, such as `\\x1b` for the escape
    character.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class Console:
    """Standard output or error that escapes control characters, and can write any other character.

    Progress bars write to `raw_stream`. Other attributes are passed through to the stream. With
    `lossy`, text that cannot be written is dropped, because a run is worth more than its console;
    otherwise the OSError is raised.
    """

    def __init__(self, stream: TextIO, *, lossy: bool) -> None:
        self.raw_stream = stream
        self._dropped = (OSError,) * lossy
        if isinstance(stream, io.TextIOWrapper):
            # for an ASCII terminal, or bytes in a path that are not UTF-8
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write `text`. Standard error keeps carriage returns, with which progress bars redraw
        their line.
        """
        kept = "\r" if self.raw_stream is sys.__stderr__ else "\n"
        with suppress(*self._dropped):
            self.raw_stream.write(kept.join(map(escape_controls, text.split(kept))))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(*self._dropped):
            self.raw_stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def open_console(*, lossy: bool) -> None:
    """Replace standard output and error by a `Console`, until this process ends; call once,
    early.
    """
    sys.stdout, sys.stderr = Console(sys.stdout, lossy=lossy), Console(sys.stderr, lossy=True)  # type: ignore[assignment]


def raw_output() -> TextIO:
    """Return standard output for colors and progress bars, without escaping; never write text from
    files to it.
    """
    return getattr(sys.stdout, "raw_stream", sys.stdout)


def begin_process(*, lossy: bool) -> None:
    """Open the console, make Ctrl-C end this process without a traceback (importing torch is slow),
    and raise the limit on open files.
    """
    signal.signal(signal.SIGINT, lambda *_: _end_now(128 + signal.SIGINT))
    open_console(lossy=lossy)
    allow_many_files()


def allow_many_files() -> None:
    """Raise the limit on open files as far as this user may: gloo has a connection to each rank in
    each group.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_freed_memory() -> None:
    """Keep freed host memory in this process for its next tensors, as CUDA's caching allocator does
    on GPUs.

    By default glibc returns blocks to the kernel; the page faults when they are allocated again
    take a tenth of a small model's CPU time in each step. The peak is unchanged. No-op if the C
    library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Disable the garbage collector while the body imports a program's modules; later collections
    and the exit skip the imported objects.

    torch and its imports are a million objects that live as long as the process. Without this, the
    collector takes a third of the 4 CPU seconds of a rank that imports everything and ends.
    Finalizers of objects in reference cycles do not run at exit.
    """
    enabled = gc.isenabled()
    gc.disable()
    atexit.register(_end)  # exit handlers run in reverse order: this one is last
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """End this process with this exit code: exit handlers run, but modules and threads are not torn
    down.

    The threads of process groups outlive `destroy_process_group` while a mesh holds their group. A
    thread that drops a tensor while Python shuts down aborts the process, after all its work was
    done (pytorch #179291, #190489). With `at_once`, exit handlers are skipped too: after an error
    they might wait for ranks that have ended.
    """
    global _exit_code
    _exit_code = code
    if not at_once:
        sys.exit(code)
    _end_now(code)


def _end() -> None:
    gc.freeze()
    if _exit_code is not None and not any(name in os.environ for name in _RECORDERS):
        _end_now(_exit_code)


def _end_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or its reader has ended
            stream.flush()
    os._exit(code)
