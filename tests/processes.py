"""Processes that tests start: with an end in every case, for themselves and for all that they have
started.
"""

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


def anonymous_bytes():
    """Memory of this process that is no page of a file. To read smaps_rollup takes up to 0.1 s: it
    walks all pages.
    """
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def descendants(pid):
    """All processes below `pid`, parents first; ranks are in sessions of their own, so a process
    group has not all.
    """
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended since
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


def kill_tree(pid):
    """SIGKILL to `pid` and all below it. First those above, so that none of them can start
    others.
    """
    for each in [pid, *descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def run_to_end(
    command,
    *,
    cwd,
    env,
    timeout_s,
    join_outputs=False,
):
    """As `subprocess.run` with captured output; one that lasts longer fails, with what it has
    written so far.

    `subprocess.run` itself would go on waiting: it ends the command alone, and ranks that hang keep
    its output open.
    """
    stderr = subprocess.STDOUT if join_outputs else subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
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
                f"{command} did not end within {timeout_s} s:\n{out}\n{err or ''}"
            ) from None
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err or "")
