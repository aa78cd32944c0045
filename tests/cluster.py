"""Launchers with real ranks: tests start them, wait for their progress, and see them end."""

import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from processes import kill_tree

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240  # a wait takes 10 s on 2 idle cores, and 40 s with several machines
SHOWN = 6000  # characters of the output in a failure's message


def variables_of(pid):
    """Return the environment that a process was started with."""
    return dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))


class Launched:
    """A running launcher, with the output so far of it and its ranks.

    Args:
        command: Starts the launcher.
        env: All variables of its environment.
        cwd: Its working directory.
    """

    def __init__(
        self,
        command,
        *,
        env,
        cwd=ROOT,
    ):
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        streams = [self.process.stdout, self.process.stderr]
        self._lines = [[], []]
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in zip(streams, self._lines, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines):
        with stream:
            lines.extend(stream)

    @property
    def out(self):
        return "".join(self._lines[0])

    @property
    def err(self):
        return "".join(self._lines[1])

    @property
    def output(self):
        """All that was written to `out`, and then all that was written to `err`."""
        return self.out + self.err

    def report(self):
        return f"{self.out[-SHOWN:]}\n{self.err[-SHOWN:]}"

    def steps(self):
        """Return the steps whose lines the log has, in its order."""
        return [int(step) for step in re.findall(r"step +(\d+)/\d+  +loss", self.out)]

    def wait_for(self, what, condition, timeout_s=TIMEOUT_S):
        """Wait until `condition()` is true; an end of the launcher before that is a failure."""
        end = time.monotonic() + timeout_s
        while not condition():
            code = self.process.poll()
            assert code is None, f"ended with {code} instead of {what}:\n{self.report()}"
            assert time.monotonic() < end, f"no {what} within {timeout_s} s:\n{self.report()}"
            time.sleep(0.02)

    def wait_for_step(self, step):
        self.wait_for(f"step {step}", lambda: max(self.steps(), default=0) >= step)

    def end(self, timeout_s=TIMEOUT_S):
        """Return the exit code, once the launcher and all of its ranks have ended by themselves.

        A rank that still runs keeps the streams open, which is a failure.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s} s:\n{self.report()}") from None
        for reader in self._readers:
            reader.join(timeout_s)
            assert not reader.is_alive(), f"ended with {code}, a rank is left:\n{self.report()}"
        return code

    def kill(self):
        """End the launcher and its ranks at the same moment, as a power failure does."""
        kill_tree(self.process.pid)
        self.process.wait()


def rank_pids(launcher):
    """Return the processes of the ranks that a launcher has started, in their order."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher:
                found[int(variables_of(int(path.name))["RANK"])] = int(path.name)
        except (OSError, KeyError):
            continue  # the process has ended since, or is not a rank
    return [found[rank] for rank in sorted(found)]


class Forked:
    """Forked processes of one gloo group that run `main(pipe)`; this process has the other ends of
    the pipes.

    A fork takes milliseconds, but a fresh interpreter takes seconds to import torch. Closures need
    no pickling; only messages in the pipes do. If a rank raises, its pipe sends ("error",
    traceback) and closes.
    """

    def __init__(self, world_size, main):
        self._folder = Path(tempfile.mkdtemp(prefix="titanlite-ranks-"))
        context = multiprocessing.get_context("fork")
        sys.stdout.flush()
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            pipe, other_end = context.Pipe()
            process = context.Process(target=self._main, args=(rank, world_size, other_end, main))
            process.start()
            other_end.close()
            self.processes.append(process)
            self.pipes.append(pipe)

    def _main(self, rank, world_size, pipe, main):
        # PR_SET_PDEATHSIG ends the ranks when the test session is killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
        )
        torch.set_num_threads(1)
        rendezvous = f"file://{self._folder}/rendezvous"
        try:
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=world_size
            )
            main(pipe)
        except BaseException:  # noqa: BLE001 - everything goes to the parent, which fails the test
            pipe.send(("error", traceback.format_exc()))
        pipe.close()
        os._exit(0)  # no teardown of the forked test session

    def receive(self, timeout_s=60):
        """Return the next message of every rank."""
        messages = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(timeout_s), f"rank {rank} says nothing within {timeout_s} s"
            messages.append(pipe.recv())
        return messages

    def end(self):
        """Kill all remaining processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)
