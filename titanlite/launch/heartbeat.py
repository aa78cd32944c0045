"""What each rank is doing, in a small file that its launcher reads: how a rank that hangs is found and named.

A rank writes step, phase and time whenever it begins something new (2 us, no synchronization). The launcher compares
the times, asks the ranks for their stacks with SIGUSR1, and says who waits for whom: `titanlite.launch.guard`.
"""

import faulthandler
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from titanlite.base.env import read_rank
from titanlite.base.errors import NOTICE_FOLDER

STACK_SIGNAL = signal.SIGUSR1
# What takes no longer than a collective may wait. Loading, saving, generating and looking for the cause of a NaN may,
# and the first step after loading compiles.
_LIMITED = ("data", "forward", "backward", "optimizer", "validation")
_OF_A_STEP = _LIMITED[:4]
_RECORD_BYTES = 1024


@dataclass(frozen=True)
class Beat:
    """The latest sign of life of a rank."""

    rank: int  # over all machines
    pid: int
    step: int = 0  # training step that it is in or has just done, counted from 1; 0 before the first
    phase: str = "starting"  # or 'loading', 'data', 'forward', 'backward', 'optimizer', 'validation', ...
    time_s: float = 0.0  # when that began, on this machine's monotonic clock
    limit_s: float = 0.0  # after which a rank in this phase hangs; 0 if only a collective that waits for it can tell
    stopped_limit_s: float = 0.0  # after which a rank hangs that is stopped by a signal, in any phase; 0: not known yet
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


def start() -> None:
    """Begin to write; does nothing without a launcher. Call once per process."""
    global _heart
    _heart = heart = _Heart()
    folder = os.environ.get(NOTICE_FOLDER)
    if folder is None or not Path(folder).is_dir():
        return
    heart.stacks = stack_path(folder, heart.beat.rank).open("w")
    faulthandler.register(STACK_SIGNAL, heart.stacks, all_threads=True)
    heart.file = os.open(Path(folder, f"beat-{heart.beat.rank}"), os.O_CREAT | os.O_WRONLY, 0o600)
    beat("starting")


def configure(timeout_s: float, grace_s: float, dump_folder: str | Path) -> None:
    """Tell the launcher the limits and the folder from the configuration, in this rank's `Beat`."""
    folder = str(Path(dump_folder).absolute())
    _heart.beat = replace(_heart.beat, stopped_limit_s=timeout_s, grace_s=grace_s, dump_folder=folder)
    beat(_heart.beat.phase)


def beat(phase: str, step: int | None = None) -> None:
    """Note that this rank begins `phase`, in step `step` if that is new. The step after 'loading' is a first one."""
    heart = _heart
    heart.rounds = 0 if phase == "loading" else heart.rounds + (phase == "data")
    limited = heart.rounds > 1 and phase in _LIMITED
    heart.beat = replace(
        heart.beat,
        phase=phase,
        step=heart.beat.step if step is None else step,
        time_s=time.monotonic(),
        limit_s=heart.beat.stopped_limit_s if limited else 0.0,
        trains=heart.beat.trains or phase in _OF_A_STEP,
    )
    if heart.file is not None:
        os.pwrite(heart.file, json.dumps(asdict(heart.beat)).encode().ljust(_RECORD_BYTES), 0)


def steps_done() -> int:
    """Optimizer steps that this rank has done, as far as its beats say."""
    beat = _heart.beat
    return beat.step - (beat.phase in _OF_A_STEP) if beat.step else 0


def current() -> Beat:
    """Return this rank's latest beat, with a launcher or without."""
    return _heart.beat


def read(folder: str | Path) -> dict[int, Beat]:
    """Return the latest beat of each rank that has one, by rank; for the launcher."""
    beats = {}
    for path in Path(folder).glob("beat-*"):
        try:
            found = Beat(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):  # being written; the next look has it
            continue
        beats[found.rank] = found
    return beats
