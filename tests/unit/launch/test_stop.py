"""Asked to stop: with a launcher by notes in its folder, without one by the signal itself."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.base.errors import NOTICE_FOLDER
from titanlite.launch.protocol import request_stop, was_asked_to_stop

ROOT = Path(__file__).parents[3]
# A rank that stops in good order says so; a stuck one waits for something that never comes, as for
# a peer that is gone.
RANK = """
import _thread, sys, threading, time
from titanlite.launch import protocol
protocol.catch_signals()
protocol.beat("loading" if sys.argv[1] == "stuck" else "forward", 1)
print("ready", flush=True)
if sys.argv[1] == "interrupts itself":  # as W&B's "Stop run" does
    threading.Thread(target=_thread.interrupt_main).start()
if sys.argv[1] == "stuck":
    threading.Event().wait()
while not protocol.is_stop_requested():
    time.sleep(0.01)
print("stops", flush=True)
time.sleep(float(sys.argv[2]))
"""


def start_rank(kind="free", linger_s=0, folder=None):
    env = {key: value for key, value in os.environ.items() if key != NOTICE_FOLDER}
    if folder is not None:
        env[NOTICE_FOLDER] = str(folder)
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, kind, str(linger_s)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def end_of(process):
    """What it said after "ready", and its exit code."""
    try:
        said, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    return said, process.returncode


def test_one_signal_ends_a_rank_in_good_order():
    process = start_rank()
    process.send_signal(signal.SIGINT)
    assert end_of(process) == ("stops\n", 0)


def test_second_signal_ends_it_at_once():
    process = start_rank(linger_s=60)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stops\n"
    process.send_signal(signal.SIGINT)
    assert end_of(process) == ("", 128 + signal.SIGINT)


def test_rank_of_a_launcher_stops_for_a_note_and_not_for_the_signal(tmp_path):
    process = start_rank(folder=tmp_path)
    # the launcher's, or that of the terminal, which goes to all
    process.send_signal(signal.SIGTERM)
    request_stop(str(tmp_path))  # after it, or the rank could end before the signal comes
    assert end_of(process) == ("stops\n", 0)


def test_an_interrupt_of_one_rank_alone_stops_all(tmp_path):
    process = start_rank("interrupts itself", folder=tmp_path)
    assert end_of(process) == ("stops\n", 0)
    assert was_asked_to_stop(str(tmp_path)), "the other ranks look there"


@pytest.mark.parametrize("requests", [0, 2])
def test_rank_of_a_launcher_ends_at_once_without_a_note_or_when_told_so(requests, tmp_path):
    process = start_rank("stuck", folder=tmp_path)
    for _ in range(requests):
        request_stop(str(tmp_path))
    process.send_signal(signal.SIGTERM)
    assert end_of(process) == ("", 128 + signal.SIGTERM)


def test_one_signal_ends_a_rank_that_has_not_begun_to_train():
    process = start_rank("stuck")
    process.send_signal(signal.SIGTERM)
    assert end_of(process) == ("", 128 + signal.SIGTERM)
