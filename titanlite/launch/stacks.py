"""Who waits for whom, from the stacks of the ranks: one is not in a collective, or is stopped, and the others wait."""

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titanlite.launch.protocol import STACK_SIGNAL, Beat, lost_path, stack_path

_ANSWER_S, _RECORDS_S = 2.0, 5.0  # NCCL's thread that writes a record looks for a wish every second
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')
_OWN_FILES = ("titanlite/distributed/collectives.py", "titanlite/features/cpu/shared_memory.py")
# Functions of torch.distributed and of titanlite's own collectives that wait for other ranks.
_COLLECTIVES = re.compile(
    "all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|gather|scatter|wait_tensor|rendezvous|"
    "init_process_group|new_group|foreach_reduce|unshard"
)


def save_stacks(folder: str | Path, beats: Mapping[int, Beat]) -> Path | None:
    """Ask the ranks for the stacks of all their threads, and keep them in `dump_folder`/stacks.

    A rank that is stopped, or does not return from the kernel, leaves none. Returns the folder, or None if there is
    nothing to keep or no place for it.
    """
    before = {rank: _size(stack_path(folder, rank)) for rank in beats}
    for beat in beats.values():
        with suppress(ProcessLookupError):
            os.kill(beat.pid, STACK_SIGNAL)
    end = time.monotonic() + _ANSWER_S
    waiting = {rank for rank, beat in beats.items() if not is_stopped(beat.pid)}
    while waiting and time.monotonic() < end:
        time.sleep(0.05)
        waiting = {rank for rank in waiting if _size(stack_path(folder, rank)) == before[rank]}
    time.sleep(0.05)  # a dump is several writes
    dump_folder = next((beat.dump_folder for beat in beats.values() if beat.dump_folder), "")
    if not dump_folder:
        return None
    kept = Path(dump_folder, "stacks")
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for rank in beats:
            sources = [path for path in (lost_path(folder, rank), stack_path(folder, rank)) if path.exists()]
            (kept / f"rank-{rank}.txt").write_bytes(b"\n".join(path.read_bytes() for path in sources))
    except OSError:
        return None
    return kept


def record_pipe(folder: str | Path) -> str:
    """Return the prefix of the pipes PREFIX<rank>.pipe: a write to one makes NCCL dump that rank's record."""
    return str(Path(folder, "nccl-"))


def save_records(folder: str | Path, beats: Mapping[int, Beat]) -> list[Path]:
    """Have NCCL write each rank's latest collectives (`features.diagnose`), and return the files, if any."""
    asked: dict[Path, int] = {}
    for rank, beat in beats.items():
        with suppress(OSError):  # there is no pipe, or nobody reads it
            pipe = os.open(f"{record_pipe(folder)}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            path = Path(beat.dump_folder, "flight_recorder", f"rank_{rank}")
            asked[path] = path.stat().st_mtime_ns if path.exists() else 0
            os.write(pipe, b"1")
            os.close(pipe)
    end, written = time.monotonic() + _RECORDS_S, []
    while len(written) < len(asked) and time.monotonic() < end:
        time.sleep(0.1)
        written = [path for path, before in asked.items() if path.exists() and path.stat().st_mtime_ns != before]
    return written


def describe(folder: str | Path, beats: Mapping[int, Beat], silent: Iterable[int]) -> str:
    """Describe who does not move, and who waits for it in which collective; `silent` ranks have not begun to beat."""
    now = time.monotonic()
    stuck: list[str] = []
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    for rank, beat in sorted(beats.items()):
        # A rank whose collective timed out has left it by now, with a note from where.
        frames = main_thread(lost_path(folder, rank)) or main_thread(stack_path(folder, rank))
        since = f"rank {rank} has not moved for {now - beat.time_s:.0f} s since {_where(beat)}"
        if is_stopped(beat.pid):
            stuck.append(f"{since}: it is stopped (SIGSTOP)")
        elif not frames:
            stuck.append(f"{since}: it does not answer")
        elif (collective := find_collective(frames)) is not None:
            waiting[f"{collective} ({_where(beat)})"].append(rank)
        else:
            stuck.append(f"{since}: it is in {_place(frames)}")
    stuck += [f"rank {rank} has not started" for rank in silent]
    waits = [f"{_ranks(ranks)} in {place}" for place, ranks in waiting.items()]
    if not stuck:
        return (
            "no rank moves, and all ranks of this machine wait for others: "
            + "; ".join(waits)
            + ". Either they are in "
            "collectives that do not belong together, or a rank of another machine is gone: see its launcher's message."
            + "".join(f"\n  Rank {rank}: {note}" for note, rank in _failed_collectives(folder, beats).items())
        )
    if not waits:
        return "; ".join(stuck) + "."
    return (
        "; ".join(stuck) + f".\n  The others wait for {'it' if len(stuck) == 1 else 'them'}: " + "; ".join(waits) + "."
    )


def _failed_collectives(folder: str | Path, ranks: Iterable[int]) -> dict[str, int]:
    """Return the errors of collectives, each with the first rank that has it."""
    found: dict[str, int] = {}
    for rank in sorted(ranks):
        with suppress(OSError):
            found.setdefault(" ".join(lost_path(folder, rank).read_text().partition("\nThread")[0].split()), rank)
    return found


def main_thread(path: Path) -> list[re.Match[str]]:
    """Frames of the main thread in the latest dump of `faulthandler`, innermost first; empty if there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    # Threads come newest first, so the last block is the main thread's.
    return list(_FRAME.finditer(text.rpartition("(most recent call first):")[2]))


def find_collective(frames: Sequence[re.Match[str]]) -> str | None:
    """Name of the collective that a thread with these frames waits in, or None."""
    found = None
    for frame in frames:
        own = frame["file"].endswith(_OWN_FILES)
        # Made of other collectives, which would say less.
        if own and frame["name"] == "all_reduce_sum":
            return "all_reduce"
        if own and frame["name"].startswith("host_"):
            found = f"{frame['name'].removeprefix('host_')}_single"
        elif found is None and (own or "torch/distributed/" in frame["file"]) and _COLLECTIVES.search(frame["name"]):
            found = frame["name"].lstrip("_")
        if "/titanlite/" in frame["file"] and not own:
            break  # further out is what called titanlite's own code
    return found


def is_stopped(pid: int) -> bool:
    """Return True if the process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _where(beat: Beat) -> str:
    return f"step {beat.step}, {beat.phase}" if beat.step else beat.phase


def _place(frames: Sequence[re.Match[str]]) -> str:
    """Return the innermost frame, and the innermost of titanlite."""
    own = next((frame for frame in frames if "/titanlite/" in frame["file"]), frames[0])
    places = [frames[0]] if own is frames[0] else [frames[0], own]
    return ", called by ".join(f"{frame['name']} ({frame['file']}:{frame['line']})" for frame in places)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
