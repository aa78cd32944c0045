"""How entry points import torch, and how they end: Python's own ways with so many objects are slow, and may abort."""

import atexit
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

# Set by tools that record a process, and write what they have when it is torn down: Nsight Systems, others on CUPTI.
_RECORDERS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH")
_LEAST_FILES, _WANTED_FILES = 128, 65_536
_LEAST_ADDRESS_SPACE = 4 << 30  # a rank that has imported torch for CPUs takes 0.9 GB, and threads and mappings to come
_exit_code: int | None = None


def check_limits() -> None:
    """Raise the limit on open files as far as this user may; end this process if a limit cannot be lived with.

    Before torch is imported: without address space or files that fails anywhere, with an abort in C++ or a traceback.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    problems = []
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        problems.append(f"{soft} open files (ulimit -n); {_LEAST_FILES} are needed")
    for name, kind in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESS_SPACE:
            problems.append(f"{limit >> 20} MiB of memory (ulimit {name}); {_LEAST_ADDRESS_SPACE >> 20} are needed")
    if problems:
        sys.stderr.write(f"titanlite: error: this shell allows {' and '.join(problems)}. Raise it.\n")
        _end_now(2)


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process without a traceback, as long as nothing else is installed: torch imports for long."""
    signal.signal(signal.SIGINT, lambda *_: _end_now(128 + signal.SIGINT))


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import what a program needs in this; the collector is off meanwhile, and leaves it alone later and at exit.

    torch and what it imports are a million objects that live as long as the process. The collector goes through them
    again and again, while they are made and while others are, and once more before they are dropped one by one: a third
    of the 4 CPU seconds of a rank that imports everything and ends. Finalizers of objects in cycles do not run at exit:
    close files explicitly.
    """
    enabled = gc.isenabled()
    gc.disable()
    atexit.register(_end)  # registered before others, and so called after them
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """End this process with this exit code: the exit handlers of what was imported run, but nothing is torn down.

    The threads of process groups outlive `destroy_process_group` while a mesh holds their group. One that still drops a
    tensor when Python has begun to end aborts the process, after all its work was done (pytorch #179291, #190489).

    Args:
        code: for the parent process.
        at_once: without the exit handlers; after an error, when they might wait for ranks that are gone.
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
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)
