"""The launcher's side: which rank failed first, which rank hangs, and whether ranks start again."""

import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titanlite.base.errors import NOTICE_FOLDER
from titanlite.launch import protocol
from titanlite.launch.guard import Failure, Guard
from titanlite.launch.protocol import (
    beat,
    claim,
    configure_heartbeat,
    forget_last_start,
    note_restart,
    read_beats,
    read_restart,
    request_stop,
    start_heartbeat,
    steps_done,
)

ROOT = Path(__file__).parents[3]
# A rank that sends heartbeats and then acts as its arguments say.
RANK = """
import sys, time
from titanlite.launch.protocol import beat, configure_heartbeat, start_heartbeat
start_heartbeat()
configure_heartbeat(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
beat("data", 1)
beat("data", 2)
beat("forward")
print("ready", flush=True)
def all_reduce(): time.sleep(100)
def compute(): time.sleep(100)
{"wait": all_reduce, "loop": compute, "end": lambda: sys.exit(int(sys.argv[5]))}[sys.argv[4]]()
"""


@pytest.fixture
def start(tmp_path):
    """`start(rank, what, code=, timeout_s=, grace_s=)` -> pid of a rank with its notices in
    `tmp_path`/notices.
    """
    (tmp_path / "notices").mkdir()
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    started = []

    def run(rank, what, code=0, timeout_s=1, grace_s=0):
        environment = {
            **os.environ,
            NOTICE_FOLDER: str(tmp_path / "notices"),
            "RANK": str(rank),
            "PYTHONPATH": str(ROOT),
        }
        arguments = [str(timeout_s), str(grace_s), str(tmp_path / "run"), what, str(code)]
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments], env=environment, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield run
    for process in started:
        process.kill()
        process.communicate()


def watch(guard, pids):
    guard.began()
    end = time.monotonic() + 20
    while guard.failure is None:
        assert time.monotonic() < end
        guard.watch(pids)
        time.sleep(0.05)
    return guard.failure


def is_gone(pid):
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        time.sleep(0.02)
    return False


def test_first_rank_that_fails_is_the_cause_and_the_others_are_ended(start, tmp_path):
    pids = {0: start(0, "wait", timeout_s=100), 1: start(1, "end", code=5)}
    failure = watch(Guard(str(tmp_path / "notices")), pids)
    assert failure == Failure("rank 1 ended with exit code 5", 5)
    assert is_gone(pids[0]) and (tmp_path / "notices/ending").exists()


def test_ranks_that_end_well_are_no_failure(start, tmp_path):
    guard, pid = Guard(str(tmp_path / "notices")), start(0, "end")
    assert is_gone(pid)
    guard.began()
    guard.watch({0: pid})
    assert guard.failure is None


def test_hang_says_where_each_rank_stands_and_where_the_stacks_are(start, tmp_path, capfd):
    pids = {rank: start(rank, "wait" if rank else "loop") for rank in range(3)}
    os.kill(pids[2], signal.SIGSTOP)
    failure = watch(Guard(str(tmp_path / "notices")), pids)
    assert failure.code == 124 and failure.said
    said = capfd.readouterr().err
    assert re.search(
        r"ranks 0, 1, 2 have not moved for \d+ s since step 2, forward\. Stacks: ", said
    )
    stacks = tmp_path / "run/stacks"
    assert f"Stacks: {stacks}\n" in said
    assert "in compute" in (stacks / "rank-0.txt").read_text()
    assert "in all_reduce" in (stacks / "rank-1.txt").read_text()
    assert all(is_gone(pid) for pid in pids.values()), "a stopped one, too"


def test_run_that_does_not_stop_in_its_grace_is_ended(start, tmp_path, capfd):
    folder = str(tmp_path / "notices")
    pids = {0: start(0, "loop", timeout_s=100, grace_s=1)}
    guard = Guard(folder)
    guard.began()
    guard.watch(pids)
    request_stop(folder)
    failure = watch(guard, pids)
    assert failure.code == 128 + signal.SIGTERM and is_gone(pids[0])
    assert (
        "job.stop_grace_seconds (1 s) are over and the ranks are still in step 2 (forward)"
        in capfd.readouterr().err
    )
    assert not guard.wants_restart(0, 3)


@pytest.mark.parametrize(
    ("failure", "restarts", "stopped", "expected"),
    [
        (Failure("it died", 137), 0, False, True),
        (Failure("it erred", 3), 2, False, True),
        (Failure("it died", 137), 3, False, False),
        (Failure("configuration", 2), 0, False, False),
        (Failure("it died", 137), 0, True, False),
        (None, 0, False, False),
    ],
)
def test_restarts_only_where_they_may_help(
    tmp_path, monkeypatch, failure, restarts, stopped, expected
):
    monkeypatch.setenv(NOTICE_FOLDER, str(tmp_path))
    guard = Guard(str(tmp_path))
    guard.failure = failure
    if stopped:
        request_stop(str(tmp_path))
    assert guard.wants_restart(restarts, 3) == expected
    assert read_restart() == (
        f"restart {restarts + 1} of 3, because {failure.text}" if expected else ""
    )


def test_notes_of_the_last_start_go_but_not_those_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTICE_FOLDER, str(tmp_path))
    request_stop(str(tmp_path))
    note_restart(tmp_path, "why")
    assert claim("traceback") and not claim("traceback")
    forget_last_start(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"stop", "restart"}
    assert claim("traceback")


# Phase and step of a beat; the latest step, the limit in seconds, and the number of steps done.
PHASES = [
    ("loading", 0, 0, 0, 0),
    ("data", 1, 1, 0, 0),
    ("forward", None, 1, 0, 0),
    ("data", 2, 2, 30, 1),
    ("forward", None, 2, 30, 1),
    ("saving", None, 2, 0, 2),
    ("data", 3, 3, 30, 2),
    ("diagnosing", None, 3, 0, 3),
    ("loading", 1, 1, 0, 1),  # a resume of step 1
    ("data", 2, 2, 0, 1),
    ("data", 3, 3, 30, 2),
]


def test_only_phases_of_training_have_a_limit_and_not_in_the_first_step_after_loading(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(NOTICE_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "7")
    start_heartbeat()
    try:
        configure_heartbeat(30, 0, "run")
        found = []
        for phase, step, *_ in PHASES:
            beat(phase, step)
            latest = read_beats(tmp_path)[7]
            found.append((phase, step, latest.step, latest.limit_s, steps_done()))
            assert latest.trains == (len(found) > 1), "from the first step on"
    finally:
        faulthandler.unregister(protocol.STACK_SIGNAL)
        monkeypatch.delenv(NOTICE_FOLDER)
        protocol._heart.stacks.close()
        os.close(protocol._heart.file)
        start_heartbeat()
    assert found == PHASES
