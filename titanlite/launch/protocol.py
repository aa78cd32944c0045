"""Protocol between a launcher and its ranks, in a folder that they share: notes, heartbeats,
requests to stop.

A rank writes step, phase and time whenever it begins a new phase (2 us, no synchronization). The
launcher compares the times, stores the stacks of ranks that hang (SIGUSR1 requests them), and ends
all ranks: `titanlite.launch.guard`.

SIGTERM and SIGINT end a run after its current step, with a checkpoint. A launcher leaves a note,
which ranks check for after each step. A rank without a launcher receives the signal itself, in a
thread and through a pipe: Python's signal handlers run only when the main thread returns from C,
which never happens if it waits in a collective for a lost peer. A run that has not begun to train
has nothing to save, and ends at once.
"""

import ctypes
import faulthandler
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from titanlite.base.errors import NOTICE_FOLDER
from titanlite.base.process import read_rank

ENDING = "ending"  # the launcher ends all ranks: nobody waits any longer
_RESTART = "restart"
_STOP = "stop"
_ABORT = "abort"
TORCH_LOGS = "torchelastic"  # folder for torchrun's output about each start
_LAUNCHER = "launcher"  # locked as long as the launcher lives
# files that outlive one start of the ranks
_KEPT = (_STOP, _ABORT, _RESTART, _LAUNCHER, TORCH_LOGS)
_FOLDER_PREFIX = "titanlite-launch-"
_PR_SET_PDEATHSIG = 1  # of prctl(2)
STACK_SIGNAL = signal.SIGUSR1
# Phases with the time limit of a waiting collective. Loading, saving, generating and the diagnosis
# of a NaN may take longer, and so may the first step after loading, which compiles.
_LIMITED = ("data", "forward", "backward", "optimizer", "validation")
_OF_A_STEP = _LIMITED[:4]
_RECORD_BYTES = 1024
# If a collective failed because a rank died, the launcher sees that death within this time.
_DEATH_SHOWS_S = 1.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# When one rank has failed, the launcher ends the others with SIGTERM; then no note appears within
# this time.
_NOTE_WAIT_S = 2.0


def say(text: str) -> None:
    """Print a line to standard error, in the launcher."""
    sys.stderr.write(f"titanlite: {text}\n")
    sys.stderr.flush()


@contextmanager
def shared_folder() -> Iterator[str]:
    """Make a folder (mode 0700) for the launcher and its ranks, and remove it at the end.

    Folders of this user's killed launchers, whose locks are free, are removed too.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    lock = os.open(Path(folder, f".{_LAUNCHER}"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with suppress(OSError):  # the file system has no locks: such folders stay
            fcntl.flock(lock, fcntl.LOCK_EX)
        # The folder is locked before other launchers can find it.
        Path(folder, f".{_LAUNCHER}").rename(Path(folder, _LAUNCHER))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _is_abandoned(folder: Path) -> bool:
    """Return True if `folder` belongs to a launcher of this user that has ended."""
    try:
        lock = os.open(folder / _LAUNCHER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False  # owned by another user, or not complete yet
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(lock).st_uid == os.getuid()
    except OSError:
        return False
    finally:
        os.close(lock)


def end_with_launcher() -> None:
    """Ask the kernel to kill this rank when its launcher ends; call before anything that takes
    time.

    Does nothing in a process that no launcher has started. Ranks must be started by the launcher's
    main thread, because the signal comes when the thread that started them ends.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = _find_folder()
    # If the launcher was killed before this call, its lock is free by now; if it ended, its folder
    # is removed.
    if folder is not None and (_is_abandoned(folder) or not folder.is_dir()):
        os._exit(128 + signal.SIGKILL)


def forget_last_start(folder: str | Path) -> None:
    """Remove the notes of earlier ranks, but not the user's requests. The launcher calls it before
    ranks start.
    """
    for path in Path(folder).iterdir():
        if path.name not in _KEPT:
            path.unlink(missing_ok=True)


def note_restart(folder: str | Path, text: str) -> None:
    """Leave a note for the next ranks: the number of the restart, and its cause. Called by the
    launcher.
    """
    Path(folder, _RESTART).write_text(text)


def _find_folder() -> Path | None:
    """Return the folder that this rank shares with its launcher; None without a launcher."""
    folder = os.environ.get(NOTICE_FOLDER)
    return None if folder is None else Path(folder)


def read_restart() -> str:
    """Return the note about the restart of this rank; "" if it was not restarted."""
    folder = _find_folder()
    try:
        return "" if folder is None else (folder / _RESTART).read_text()
    except OSError:
        return ""


def claim(name: str) -> bool:
    """Return True on the first rank of this machine that claims `name`, and on every rank without a
    launcher.
    """
    folder = _find_folder()
    if folder is None:
        return True
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # printing twice is better than never
    return True


@dataclass(frozen=True)
class Beat:
    """The latest heartbeat of a rank."""

    rank: int  # number over all machines
    pid: int
    # the current or last completed training step, counted from 1; 0 before the first
    step: int = 0
    # such as 'loading', 'data', 'forward', 'backward', 'optimizer', 'validation'
    phase: str = "starting"
    time_s: float = 0.0  # when the phase began, on this machine's monotonic clock
    # time after which a rank in this phase counts as hung; 0 if only a waiting collective can tell
    limit_s: float = 0.0
    timeout_s: float = 0.0  # how long a collective may wait; 0: not known yet
    grace_s: float = 0.0  # from SIGTERM to the end of the run; 0: no limit
    dump_folder: str = ""  # the run's folder; empty until the configuration is read
    trains: bool = False  # True once a training step has begun in this start


class _Heart:
    """The heartbeat of this rank and its open files; without a launcher there are no files."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.stacks: IO[str] | None = None
        self.beat = Beat(read_rank(), os.getpid())
        self.rounds = 0


_heart = _Heart()


def stack_path(folder: str | Path, rank: int) -> Path:
    """Return the file to which a rank writes the stacks of its threads on `STACK_SIGNAL`."""
    return Path(folder, f"stack-{rank}")


def start_heartbeat() -> None:
    """Begin to write heartbeats; without a launcher, nothing is written. Call once per process."""
    global _heart
    _heart = heart = _Heart()
    folder = _find_folder()
    if folder is None or not folder.is_dir():
        return
    heart.stacks = stack_path(folder, heart.beat.rank).open("w")
    faulthandler.register(STACK_SIGNAL, heart.stacks, all_threads=True)
    heart.file = os.open(folder / f"beat-{heart.beat.rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    beat("starting")


def configure_heartbeat(timeout_s: float, grace_s: float, dump_folder: str | Path) -> None:
    """Report the limits and the folder from the configuration to the launcher, in this rank's
    `Beat`.
    """
    folder = str(Path(dump_folder).absolute())
    _heart.beat = replace(_heart.beat, timeout_s=timeout_s, grace_s=grace_s, dump_folder=folder)
    beat(_heart.beat.phase)


def beat(phase: str, step: int | None = None) -> None:
    """Record that this rank begins `phase`, in step `step` if it has changed. The step after
    'loading' counts as a first step.
    """
    heart = _heart
    heart.rounds = 0 if phase == "loading" else heart.rounds + (phase == "data")
    limited = heart.rounds > 1 and phase in _LIMITED
    heart.beat = replace(
        heart.beat,
        phase=phase,
        step=heart.beat.step if step is None else step,
        time_s=time.monotonic(),
        limit_s=heart.beat.timeout_s if limited else 0.0,
        trains=heart.beat.trains or phase in _OF_A_STEP,
    )
    _write_beat(heart)


def note_lost_peer(error: BaseException) -> None:
    """Record that a collective of this rank failed because a peer ended or hangs.

    The stack of the call is added to this rank's stacks, and the rank counts as hung unless the
    launcher sees a death soon.
    """
    heart = _heart
    if heart.stacks is None:
        return
    traceback.print_exception(error, file=heart.stacks)
    heart.stacks.flush()
    waited_s = time.monotonic() - heart.beat.time_s
    heart.beat = replace(heart.beat, limit_s=waited_s + _DEATH_SHOWS_S)
    _write_beat(heart)


def _write_beat(heart: _Heart) -> None:
    if heart.file is not None:
        os.pwrite(heart.file, json.dumps(asdict(heart.beat)).encode().ljust(_RECORD_BYTES), 0)


def steps_done() -> int:
    """Return the number of optimizer steps that this rank has completed, according to its
    heartbeats.
    """
    beat = _heart.beat
    return beat.step - (beat.phase in _OF_A_STEP) if beat.step else 0


def current_beat() -> Beat:
    """Return this rank's latest heartbeat, with or without a launcher."""
    return _heart.beat


def read_beats(folder: str | Path) -> dict[int, Beat]:
    """Return the latest heartbeat of each rank that has one, by rank; for the launcher."""
    beats = {}
    for path in Path(folder).glob("beat-*"):
        try:
            found = Beat(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):  # still being written; read at the next check
            continue
        beats[found.rank] = found
    return beats


stop_requested = threading.Event()


def catch_signals() -> Callable[[], None]:
    """Handle SIGTERM and SIGINT as requests to stop; return a function that undoes it. Call in the
    main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # the handlers do nothing: the signal's number arrives through the pipe
    handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()

    def undo() -> None:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)  # ends the thread

    return undo


def is_stop_requested() -> bool:
    """Return True once this run was asked to stop. Ranks may see it at different steps; they must
    agree on one.
    """
    folder = _find_folder()
    return stop_requested.is_set() if folder is None else was_asked_to_stop(folder)


def was_asked_to_stop(folder: str | Path) -> bool:
    """Return True once `request_stop` was called; for the launcher."""
    return Path(folder, _STOP).exists()


def request_stop(folder: str) -> bool:
    """Ask all ranks to stop; at the second call, ask them to end at once. Called by the launcher.

    Returns True for the first call.
    """
    first = not was_asked_to_stop(folder)
    Path(folder, _STOP if first else _ABORT).touch()
    return first


def _watch(reader: int) -> None:
    while data := os.read(reader, 1):  # until `undo`
        number = data[0]
        if number not in STOP_SIGNALS:
            continue
        folder = _find_folder()
        if folder is None:
            if stop_requested.is_set() or not current_beat().trains:
                os._exit(128 + number)
            stop_requested.set()
            continue
        end = time.monotonic() + _NOTE_WAIT_S
        while (
            not any((folder / note).exists() for note in (_STOP, ENDING)) and time.monotonic() < end
        ):
            time.sleep(0.02)
        is_ending = (folder / ENDING).exists()
        if number == signal.SIGINT and not is_ending:
            (folder / _STOP).touch()  # this rank alone was asked: by W&B's "Stop run"
        if is_ending or not was_asked_to_stop(folder) or (folder / _ABORT).exists():
            os._exit(128 + number)
