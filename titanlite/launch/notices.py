"""Notes between a launcher and its ranks, in the folder that they share: why ranks ended, and why they start again."""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titanlite.base.errors import NOTICE_FOLDER

ENDING = "ending"  # the launcher ends all ranks: nobody shall wait for anything
_RESTART, _ERROR = "restart", "error"
_SHOWN_CHARS = 200
TORCH_LOGS = "torchelastic"  # folder for what torchrun writes about each start
_LAUNCHER = "launcher"  # locked as long as the launcher lives
_KEPT = ("stop", "abort", _RESTART, _LAUNCHER, TORCH_LOGS)  # the others are about one start of the ranks
_FOLDER_PREFIX = "titanlite-launch-"
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True)
class Restart:
    """Why the ranks start again: what ended them, in words, restarts with this one, and how many are allowed."""

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

    Folders of launchers of this user that were killed are removed, too: nobody holds the lock in them.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    lock = os.open(Path(folder, f".{_LAUNCHER}"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with suppress(OSError):  # no locks there: such folders are left
            fcntl.flock(lock, fcntl.LOCK_EX)
        Path(folder, f".{_LAUNCHER}").rename(Path(folder, _LAUNCHER))  # locked from when it can be found
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
    """Ask the kernel to kill this rank when its launcher ends; call before anything that takes time.

    Does nothing in a process that no launcher has started. It must be the main thread of the launcher that starts
    ranks: the signal comes when the thread ends that has.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = os.environ.get(NOTICE_FOLDER)
    # A launcher that was killed before has let go of its lock by now, and one that ended has removed its folder.
    if folder is not None and (_is_abandoned(Path(folder)) or not Path(folder).is_dir()):
        os._exit(128 + signal.SIGKILL)


def forget_last_start(folder: str | Path) -> None:
    """Remove the notes of earlier ranks, but not the user's requests; the launcher calls it before ranks start."""
    for path in Path(folder).iterdir():
        if path.name not in _KEPT:
            path.unlink(missing_ok=True)


def note_restart(folder: str | Path, restart: Restart) -> None:
    """Tell the next ranks why they start; called by the launcher."""
    Path(folder, _RESTART).write_text(json.dumps(asdict(restart)))


def read_restart() -> Restart | None:
    """Return why this rank starts again, or None if it does not."""
    folder = os.environ.get(NOTICE_FOLDER)
    try:
        return None if folder is None else Restart(**json.loads(Path(folder, _RESTART).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def claim(name: str) -> bool:
    """Return True on the first rank of this machine that asks for `name`, and on every rank without a launcher."""
    folder = os.environ.get(NOTICE_FOLDER)
    if folder is None:
        return True
    try:
        os.close(os.open(Path(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        pass  # better said twice than not at all
    return True


def note_error(text: str) -> None:
    """Note the error that ended this rank, to be shown at a restart. The first rank of this machine counts."""
    folder = os.environ.get(NOTICE_FOLDER)
    if folder is not None and claim("has-error"):
        Path(folder, _ERROR).write_text(text)


def read_error(folder: str | Path) -> str:
    """Return the first sentence of the error that `note_error` noted, in the launcher; empty without one."""
    try:
        text = Path(folder, _ERROR).read_text()
    except OSError:
        return ""
    return first_sentence(text)


def first_sentence(text: str) -> str:
    """Return the first sentence of `text` in one line, at most 200 characters, without its full stop."""
    return " ".join(text.split()).partition(". ")[0][:_SHOWN_CHARS].rstrip(".")


def lost_path(folder: str | Path, rank: int) -> Path:
    """File with the stack of a rank in a collective that failed."""
    return Path(folder, f"lost-{rank}")


def note_lost_peer(rank: int, error: BaseException) -> None:
    """Note that a collective of this rank failed because a peer is gone or hangs; the launcher finds out which.

    The note is the stack of the call, innermost frame first as `faulthandler` writes it.
    """
    folder = os.environ.get(NOTICE_FOLDER)
    if folder is None:
        return
    frames = [
        f'  File "{f.filename}", line {f.lineno} in {f.name}\n' for f in traceback.extract_tb(error.__traceback__)
    ]
    temporary = lost_path(folder, rank).with_name(f".lost-{rank}")
    temporary.write_text(f"Failed collective: {error}\nThread (most recent call first):\n" + "".join(reversed(frames)))
    temporary.rename(lost_path(folder, rank))


def lost_peers(folder: str | Path) -> dict[int, float]:
    """Return the seconds since each rank noted that it has lost a peer, by rank; for the launcher."""
    now, found = time.time(), {}
    for path in Path(folder).glob("lost-*"):
        found[int(path.name.removeprefix("lost-"))] = now - path.stat().st_mtime
    return found
