"""One run at a time writes into a folder: two would remove each other's checkpoints."""

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from titanlite.base.errors import ConfigError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_LOCK_FILE = ".run.lock"
LOCK_WAIT_S = 10.0  # a process that dies takes a moment to let go
_PAUSE_S = 0.1


@dataclass(frozen=True)
class Holder:
    """The process that writes into a run's folder; `rendezvous` is where the machines of its run meet, if several."""

    pid: int = 0
    host: str = "a machine that did not leave its name"
    since: str = "an unknown time"
    rendezvous: str = ""


class FolderLock:
    """The right to write into a run's folder, until this object or its process is gone, however it ends.

    In one process there is one for each folder: who asks again gets the same. Reading needs none.
    """

    _held: ClassVar["weakref.WeakValueDictionary[Path, FolderLock]"] = weakref.WeakValueDictionary()

    def __init__(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, folder: Path, rendezvous: str = "", wait_s: float = LOCK_WAIT_S) -> "FolderLock | None":
        """Lock `folder`, which exists; None if its file system has no locks.

        A process of another machine of the same rendezvous that still holds it after `wait_s` seconds is gone, though
        the file server does not know: its launcher would have ended it before the machines met again.

        Raises:
            ConfigError: another process holds it, also after `wait_s` seconds.
            OSError: the file cannot be made there.
        """
        path = folder.resolve() / _LOCK_FILE
        if (held := cls._held.get(path)) is not None:
            return held
        me = Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"), rendezvous)
        end = time.monotonic() + wait_s
        while True:
            with ExitStack() as stack:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
                stack.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > end:
                        holder = _read_holder(descriptor)
                        if not rendezvous or holder.rendezvous != rendezvous or holder.host == me.host:
                            raise ConfigError(
                                f"job.dump_folder: another run writes into {folder}: process {holder.pid} on "
                                f"{holder.host}, since {holder.since}. Wait for its end, or end it, or set another "
                                f"job.dump_folder. Remove {path} if that machine is gone."
                            ) from None
                        if _is_at(descriptor, path):
                            path.unlink()
                except OSError as error:
                    if error.errno in _NO_LOCKS:
                        return None
                    raise
                else:
                    if _is_at(descriptor, path):
                        stack.pop_all()
                        with suppress(OSError):  # a full disk: others do not learn who it is
                            os.ftruncate(descriptor, 0)
                            os.pwrite(descriptor, json.dumps(asdict(me)).encode(), 0)
                        lock = cls._held[path] = cls(descriptor)
                        return lock
            time.sleep(_PAUSE_S)

    @classmethod
    def remove_unused(cls) -> None:
        """Remove the folders that hold nothing but a lock of this process: its run was refused before it wrote."""
        for path in list(cls._held):
            with suppress(OSError):
                if os.listdir(path.parent) == [path.name]:
                    path.unlink()
                    path.parent.rmdir()


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True unless somebody has removed the open file, or put another one in its place."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _read_holder(descriptor: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(descriptor, 1 << 12, 0)))
    except (OSError, ValueError, TypeError):
        return Holder()
