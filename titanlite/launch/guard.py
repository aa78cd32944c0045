"""The launcher's watch over its ranks: which rank failed first and why, which ranks hang, and
whether to restart.

Everything that depends on torchrun's internals is in `Agent`.
"""

import os
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from titanlite.base.errors import NEVER_RESTARTED
from titanlite.base.text import list_names
from titanlite.launch.protocol import (
    ENDING,
    STACK_SIGNAL,
    Beat,
    forget_last_start,
    note_restart,
    read_beats,
    say,
    stack_path,
    was_asked_to_stop,
)

_HANG = 124  # exit code, as of timeout(1)
# time that the other ranks have, after one has failed, to print the same error and end
_LAST_WORDS_S = 0.5
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Failure:
    """Why a start of the ranks ended."""

    text: str
    code: int  # exit code of the launcher, if it does not restart the ranks
    said: bool = False  # `text` was printed already


class Guard:
    """Watch over one launcher's local ranks. One object exists through all restarts."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.failure: Failure | None = None  # of the latest start
        self._looked = 0.0
        self._stop_seen: float | None = None

    def began(self) -> None:
        self.failure = None
        self._looked = time.monotonic()

    def watch(self, pids: Mapping[int, int]) -> None:
        """Check the ranks, given by their process ids. If a rank failed or hangs, end all ranks.

        Call often: it costs a system call per rank, and reads the ranks' files twice a second.
        """
        if self.failure is not None:
            return  # all ranks are ending
        ended = {rank: code for rank, pid in pids.items() if (code := _exit_code(pid)) is not None}
        failed = {rank: code for rank, code in ended.items() if code != 0}
        if failed:
            self._end_after_failure(pids, failed)
            return
        if time.monotonic() - self._looked < _LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        running = {rank: pid for rank, pid in pids.items() if rank not in ended}
        beats = {rank: beat for rank, beat in read_beats(self._folder).items() if rank in running}
        now = time.monotonic()
        if any(beat.limit_s and now - beat.time_s > beat.limit_s for beat in beats.values()):
            self._end_hanging(beats, running, len(pids))
        elif self._is_over_grace(beats):
            self._end(pids)

    def note_failure(self, rank: int, code: int) -> None:
        """Record why all ranks end, unless an earlier cause is known. A rank may also fail between
        two checks.
        """
        self.failure = self.failure or Failure(
            f"rank {rank} {_how(code)}", code if code > 0 else 128 - code
        )

    def wants_restart(self, restarts: int, most: int) -> bool:
        """Return True, after a failure, if restarted ranks may succeed; print why they restart, and
        leave a note for them.

        A restart cannot help after an error that would occur again, or once the user has asked the
        run to stop.
        """
        failure = self.failure
        if (
            failure is None
            or restarts >= most
            or failure.code in NEVER_RESTARTED
            or was_asked_to_stop(self._folder)
        ):
            return False
        text = "" if failure.said else f"{failure.text}; all ranks were stopped. "
        number = f"restart {restarts + 1} of {most}"
        say(f"{text}Starting all ranks again: {number}.")
        why = failure.text.partition("\n")[0].rstrip(".")
        note_restart(self._folder, f"{number}, because {why}")
        return True

    def _end_after_failure(self, pids: Mapping[int, int], failed: Mapping[int, int]) -> None:
        # Ranks that lost a peer wait for this launcher instead of exiting, so the rank found dead
        # in this poll (every 0.1 s) is the cause.
        self.note_failure(*next(iter(failed.items())))
        end = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < end and any(_exit_code(pid) is None for pid in pids.values()):
            time.sleep(0.02)
        self._end(pids)

    def _end_hanging(
        self, beats: Mapping[int, Beat], running: Mapping[int, int], num_ranks: int
    ) -> None:
        kept = save_stacks(self._folder, beats)
        text = describe(beats, [rank for rank in running if rank not in beats])
        if kept is not None:
            text += f" Stacks: {kept}"
        self._end(running)
        self.failure = Failure(text, _HANG, said=True)
        say(f"{text}\n  All {num_ranks} ranks of this machine were ended.")

    def _is_over_grace(self, beats: Mapping[int, Beat]) -> bool:
        """Return True if the run was asked to stop and has not done so within
        `job.stop_grace_seconds`.
        """
        if not beats or not was_asked_to_stop(self._folder):
            return False
        if self._stop_seen is None:
            self._stop_seen = time.monotonic()
        grace_s = max(beat.grace_s for beat in beats.values())
        if not grace_s or time.monotonic() - self._stop_seen < grace_s:
            return False
        latest = max(beats.values(), key=lambda beat: beat.time_s)
        text = (
            f"job.stop_grace_seconds ({grace_s:g} s) are over and the ranks are still in step "
            f"{latest.step} ({latest.phase}); they were ended without a save."
        )
        say(text)
        self.failure = Failure(text, 128 + signal.SIGTERM, said=True)
        return True

    def _end(self, pids: Mapping[int, int]) -> None:
        """End all ranks at once; SIGKILL reaches stopped processes too."""
        Path(self._folder, ENDING).touch()
        for pid in pids.values():
            if _exit_code(pid) is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


# torch's decorators hide the signatures of these methods, hence the ignored reports.
class Agent(LocalElasticAgent):
    """torchrun's agent, extended by a guard: it starts this machine's ranks, and restarts them if
    that may help.

    The methods with a leading underscore are documented by torch for subclasses.
    `_remaining_restarts` is not documented; it is read and set only here.
    """

    def __init__(self, guard: Guard, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self._guard = guard
        self._folder = folder

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        forget_last_start(self._folder)
        self._guard.began()
        return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._pcontext is not None:
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            pids = self._pcontext.pids()
            self._guard.watch({ranks[local]: pid for local, pid in pids.items() if local in ranks})
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            first = min(result.failures.items(), key=lambda item: item[1].timestamp, default=None)
            if first is not None:
                self._guard.note_failure(first[0], first[1].exitcode)
            most = worker_group.spec.max_restarts
            if not self._guard.wants_restart(most - self._remaining_restarts, most):
                self._remaining_restarts = 0
        return result


def describe_resume(folder: str | Path) -> str:
    """Return how to resume after a failure, if the ranks were a training run; otherwise ""."""
    run = next((beat.dump_folder for beat in read_beats(folder).values() if beat.dump_folder), "")
    return (
        f" The same command resumes from the newest checkpoint in {run}, or begins anew without "
        "one."
        if run
        else ""
    )


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has ended, -N if signal N ended it; None while it runs.
    The child can still be waited for.
    """
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None  # already waited for: torchrun knows its code
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


_ANSWER_S = 1.0  # faulthandler writes immediately, in the signal handler


def save_stacks(folder: str | Path, beats: Mapping[int, Beat]) -> Path | None:
    """Ask the ranks for the stacks of all their threads, and store them in `dump_folder`/stacks.

    A rank that is stopped, or does not return from the kernel, writes none. Returns the folder, or
    None if there is nothing to store or the folder cannot be written.
    """
    for beat in beats.values():
        with suppress(ProcessLookupError):
            os.kill(beat.pid, STACK_SIGNAL)
    time.sleep(_ANSWER_S)
    dump_folder = next((beat.dump_folder for beat in beats.values() if beat.dump_folder), "")
    if not dump_folder:
        return None
    kept = Path(dump_folder, "stacks")
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for rank in beats:
            shutil.copyfile(stack_path(folder, rank), kept / f"rank-{rank}.txt")
    except OSError:
        return None
    return kept


def describe(beats: Mapping[int, Beat], silent: list[int]) -> str:
    """Describe where the ranks hang, the oldest heartbeat first; `silent` ranks have not
    started.
    """
    now = time.monotonic()
    places: defaultdict[str, list[Beat]] = defaultdict(list)
    for beat in sorted(beats.values(), key=lambda beat: beat.time_s):
        places[_where(beat)].append(beat)
    found = [
        f"{_ranks(sorted(beat.rank for beat in there))} not moved for {now - there[0].time_s:.0f} "
        f"s since {place}"
        for place, there in places.items()
    ]
    if silent:
        found.append(f"{_ranks(silent)} not started")
    return "; ".join(found) + "."


def _where(beat: Beat) -> str:
    return f"step {beat.step}, {beat.phase}" if beat.step else beat.phase


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list_names(ranks)} have"
