"""Protocol between a launcher and its ranks, in a folder that they share: notes, signs of life,
requests to stop.

A rank writes step, phase and time whenever it begins something new (2 us, no synchronization). The
launcher compares the times, keeps the stacks of ranks that hang (SIGUSR1 asks for them), and ends
all: `titanlite.launch.guard`.

SIGTERM and SIGINT end a run after its step, with a checkpoint. A launcher leaves a note, which
ranks look for after each step; a rank without a launcher takes the signal itself, in a thread and
through a pipe: handlers of Python wait until the main thread returns from C, as one that waits in a
collective for a lost peer never does. A run that has not begun to train has nothing to save, and
ends at once.
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

ENDING = "ending"  # the launcher ends all ranks: nobody waits any more
_RESTART = "restart"
_STOP = "stop"
_ABORT = "abort"
TORCH_LOGS = "torchelastic"  # folder for what torchrun writes about each start
_LAUNCHER = "launcher"  # locked as long as the launcher lives
# the others are about one start of the ranks
_KEPT = (_STOP, _ABORT, _RESTART, _LAUNCHER, TORCH_LOGS)
_FOLDER_PREFIX = "titanlite-launch-"
_PR_SET_PDEATHSIG = 1  # of prctl(2)
STACK_SIGNAL = signal.SIGUSR1
# Phases that take no longer than a collective may wait. Loading, saving, generating and diagnosing
# a NaN may, and the first step after loading compiles.
_LIMITED = ("data", "forward", "backward", "optimizer", "validation")
_OF_A_STEP = _LIMITED[:4]
_RECORD_BYTES = 1024
# A collective that failed because a rank died: the death shows within this time.
_DEATH_SHOWS_S = 1.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# The launcher ends the other ranks with SIGTERM when one has failed; then there is no note within
# this time.
_NOTE_WAIT_S = 2.0


@dataclass(frozen=True)
class Restart:
    """Why the ranks start again: what ended them, in words, restarts with this one, and how many
    are allowed.
    """

    why: str
    count: int
    most: int


def say(text: str) -> None:
    """Write a line to standard error, in the launcher."""
    sys.stderr.write(f"titanlite: {text}\n")
    sys.stderr.flush()


@contextmanager
def shared_folder() -> Iterator[str]:
    """Make a folder (mode 0700) for the launcher and its ranks, and remove it at the end.

    Folders of launchers of this user that were killed are removed, too: nobody holds the lock in
    them.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    lock = os.open(Path(folder, f".{_LAUNCHER}"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with suppress(OSError):  # no locks there: such folders are left
            fcntl.flock(lock, fcntl.LOCK_EX)
        # locked from when it can be found
        Path(folder, f".{_LAUNCHER}").rename(Path(folder, _LAUNCHER))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _is_abandoned(folder: Path) -> bool:
    """Return True if `folder` is of a launcher of this user that is gone."""
    try:
        lock = os.open(folder / _LAUNCHER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False  # another user's, or not one that a launcher has finished making
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

    Does nothing in a process that no launcher has started. It must be the main thread of the
    launcher that starts ranks: the signal comes when the thread ends that has.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = _find_folder()
    # A launcher that was killed before has let go of its lock by now, and one that ended has
    # removed its folder.
    if folder is not None and (_is_abandoned(folder) or not folder.is_dir()):
        os._exit(128 + signal.SIGKILL)


def forget_last_start(folder: str | Path) -> None:
    """Remove the notes of earlier ranks, but not the user's requests; the launcher calls it before
    ranks start.
    """
    for path in Path(folder).iterdir():
        if path.name not in _KEPT:
            path.unlink(missing_ok=True)


def note_restart(folder: str | Path, restart: Restart) -> None:
    """Tell the next ranks why they start; called by the launcher."""
    Path(folder, _RESTART).write_text(json.dumps(asdict(restart)))


def _find_folder() -> Path | None:
    """Return the folder that this rank shares with its launcher; None without one."""
    folder = os.environ.get(NOTICE_FOLDER)
    return None if folder is None else Path(folder)


def read_restart() -> Restart | None:
    """Return why this rank starts again, or None if it does not."""
    folder = _find_folder()
    try:
        return None if folder is None else Restart(**json.loads((folder / _RESTART).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def claim(name: str) -> bool:
    """Return True on the first rank of this machine that asks for `name`, and on every rank without
    a launcher.
    """
    folder = _find_folder()
    if folder is None:
        return True
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # better printed twice than never
    return True


@dataclass(frozen=True)
class Beat:
    """The latest sign of life of a rank."""

    rank: int  # over all machines
    pid: int
    # training step that it is in or has just done, counted from 1; 0 before the first
    step: int = 0
    # or 'loading', 'data', 'forward', 'backward', 'optimizer', 'validation', ...
    phase: str = "starting"
    time_s: float = 0.0  # when that began, on this machine's monotonic clock
    # after which a rank in this phase counts as hung; 0 if only a waiting collective can tell
    limit_s: float = 0.0
    timeout_s: float = 0.0  # how long a collective may wait; 0: not known yet
    grace_s: float = 0.0  # from SIGTERM to the end of the run; 0 if it may take as long as it needs
    dump_folder: str = ""  # of the run; empty as long as the configuration is not read
    trains: bool = False  # True once it has begun a training step in this start


class _Heart:
    """This rank's file, open; there is none without a launcher."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.stacks: IO[str] | None = None
        self.beat = Beat(read_rank(), os.getpid())
        self.rounds = 0


_heart = _Heart()


def stack_path(folder: str | Path, rank: int) -> Path:
    """File that a rank writes the stacks of its threads to on `STACK_SIGNAL`."""
    return Path(folder, f"stack-{rank}")


def start_heartbeat() -> None:
    """Begin to write; does nothing without a launcher. Call once per process."""
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
    """Tell the launcher the limits and the folder from the configuration, in this rank's `Beat`."""
    folder = str(Path(dump_folder).absolute())
    _heart.beat = replace(_heart.beat, timeout_s=timeout_s, grace_s=grace_s, dump_folder=folder)
    beat(_heart.beat.phase)


def beat(phase: str, step: int | None = None) -> None:
    """Note that this rank begins `phase`, in step `step` if that is new. The step after 'loading'
    is a first one.
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
    """Note that a collective of this rank failed because a peer is gone or hangs: with the stack of
    the call among its stacks, and as hung unless the death shows soon.
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
    """Optimizer steps that this rank has done, as far as its beats say."""
    beat = _heart.beat
    return beat.step - (beat.phase in _OF_A_STEP) if beat.step else 0


def current_beat() -> Beat:
    """Return this rank's latest beat, with a launcher or without."""
    return _heart.beat


def read_beats(folder: str | Path) -> dict[int, Beat]:
    """Return the latest beat of each rank that has one, by rank; for the launcher."""
    beats = {}
    for path in Path(folder).glob("beat-*"):
        try:
            found = Beat(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):  # still being written; read at the next look
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
    # the pipe has it
    handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()

    def undo() -> None:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)  # ends the thread

    return undo


def is_stop_requested() -> bool:
    """Return True once this run was asked to stop. Ranks may learn it at different steps; let them
    agree.
    """
    folder = _find_folder()
    return stop_requested.is_set() if folder is None else was_asked_to_stop(folder)


def was_asked_to_stop(folder: str | Path) -> bool:
    """Return True once `request_stop` was called; for the launcher."""
    return Path(folder, _STOP).exists()


def request_stop(folder: str) -> bool:
    """Ask all ranks to stop, from the launcher; the second call asks them to end at once.

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
            (folder / _STOP).touch()  # to this rank alone: from W&B's "Stop run"
        if is_ending or not was_asked_to_stop(folder) or (folder / _ABORT).exists():
            os._exit(128 + number)
