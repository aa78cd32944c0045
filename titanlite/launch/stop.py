"""Asked to stop: SIGTERM and SIGINT end a run after the step that it is in, with a checkpoint.

A launcher (`titanlite.launch`) gets the signal and leaves a note in the folder that it shares with its ranks; they look
for it after each step. A rank without a launcher takes the signal itself. A run that has not begun to train has nothing
to save: if it does not end by itself within a few seconds, it is ended, whatever it loads or loops in.

Signals reach a thread through a pipe: Python's own handlers wait until the main thread returns from C, as a rank that
waits in a collective for a peer that is gone never does.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from titanlite.base.errors import NOTICE_FOLDER
from titanlite.launch import heartbeat
from titanlite.launch.notices import ENDING

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BEFORE_TRAINING_S = 8.0  # from the first signal to the end of a run that has not begun to train
_STOP, _ABORT = "stop", "abort"
# The launcher ends the other ranks with SIGTERM when one has failed; then there is no note within this time.
_NOTE_WAIT_S = 2.0
requested = threading.Event()


def install() -> Callable[[], None]:
    """Handle SIGTERM and SIGINT as requests to stop; return a function that undoes it. Call in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}  # the pipe has it
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()

    def undo() -> None:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)  # ends the thread

    return undo


def is_requested() -> bool:
    """Return True once this run was asked to stop. Ranks may learn it at different steps; let them agree."""
    folder = os.environ.get(NOTICE_FOLDER)
    return requested.is_set() if folder is None else Path(folder, _STOP).exists()


def asked(folder: str) -> bool:
    """Return True once `request` was called; for the launcher."""
    return Path(folder, _STOP).exists()


def request(folder: str) -> bool:
    """Ask all ranks to stop, from the launcher; the second call asks them to end at once.

    Returns True for the first call.
    """
    first = not Path(folder, _STOP).exists()
    Path(folder, _STOP if first else _ABORT).touch()
    return first


def _watch(reader: int) -> None:
    while data := os.read(reader, 1):  # until `undo`
        number = data[0]
        if number not in SIGNALS:
            continue
        folder = os.environ.get(NOTICE_FOLDER)
        if folder is None:
            if requested.is_set():
                os._exit(128 + number)
            requested.set()
            if not heartbeat.current().trains:
                _end_before_training(reader, number)
            continue
        end = time.monotonic() + _NOTE_WAIT_S
        while not any(Path(folder, note).exists() for note in (_STOP, ENDING)) and time.monotonic() < end:
            time.sleep(0.02)
        if number == signal.SIGINT and not Path(folder, ENDING).exists():
            Path(folder, _STOP).touch()  # to this rank alone: from W&B's "Stop run"
        if Path(folder, ENDING).exists() or not Path(folder, _STOP).exists() or Path(folder, _ABORT).exists():
            os._exit(128 + number)


def _end_before_training(reader: int, number: int) -> None:
    """Return if training begins meanwhile, or with the next signal."""
    if select.select([reader], [], [], BEFORE_TRAINING_S)[0] or heartbeat.current().trains:
        return
    sys.stderr.write(f"titanlite: {signal.Signals(number).name} before the first step: ended, nothing was trained.\n")
    sys.stderr.flush()
    os._exit(128 + number)
