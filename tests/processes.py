"""Processes that tests start: each one ends in every case, together with all processes that it has
started.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


def anonymous_bytes():
    """Return the memory of this process that is not mapped from a file. Reading smaps_rollup takes
    up to 0.1 s, because it walks all pages.
    """
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def descendants(pid):
    """Return all processes below `pid`, parents first. Ranks are in separate sessions, so a process
    group does not have all of them.
    """
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended since
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


def kill_tree(pid):
    """Send SIGKILL to `pid` and all processes below it, parents first, so that none can start
    another process.
    """
    for each in [pid, *descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def run_python(code, *arguments, timeout=120, **options):
    """Run `code` in a new Python like `subprocess.run`, with captured output as text."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


@dataclass(frozen=True)
class Finished:
    """A process that ended by itself."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self):
        return self.stdout + self.stderr


def run_to_end(command, *, cwd, env, timeout_s):
    """Run the command and return how it `Finished`; if it takes longer, fail with the output so
    far.

    `subprocess.run` itself would keep waiting: it ends only the command, and ranks that hang keep
    its output open.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException as error:
        kill_tree(process.pid)
        out, err = process.communicate(timeout=60)
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(
                f"{command} did not end within {timeout_s} s:\n{out}\n{err}"
            ) from None
        raise
    return Finished(process.returncode, out, err)
