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
_WANTED_FILES = 65_536  # the usual limit of 1024 ends runs of 400 ranks
_exit_code: int | None = None


def allow_many_files() -> None:
    """Raise the limit on open files as far as this user may: gloo holds a connection to each rank in each group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def end_on_interrupt() -> None:
    """Make Ctrl-C end this process without a traceback until another handler is installed: importing torch is slow."""
    signal.signal(signal.SIGINT, lambda *_: _end_now(128 + signal.SIGINT))


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import what a program needs in this; the collector is off meanwhile, and leaves it alone later and at exit.

    torch and what it imports are a million objects that live as long as the process: the collector takes a third of the
    4 CPU seconds of a rank that imports everything and ends. Finalizers of objects in cycles do not run at exit.
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
    With `at_once` without the exit handlers: after an error they might wait for ranks that are gone.
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
