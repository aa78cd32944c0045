"""Run one way on forked ranks and measure it: wall time, CPU time, memory that no file backs."""

import ctypes
import gc
import mmap
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SAMPLE_EVERY_S = 0.005
# Free memory that is not touched, in huge pages and then in small ones: the page cache must not
# have to give way.
_LEFT_BYTES = {True: 1_500_000_000, False: 400_000_000}
# RssAnon of /proc/<pid>/status is the counter behind "Anonymous:" of smaps_rollup (equal to the
# byte), read in 0.02 ms. smaps_rollup took 3 ms for 0.7 GB, and holds up the page faults of the
# measured process, whose tables it walks. The other two count memory that no file backs either: a
# way could hide shards in them.
_MEMORY = re.compile(r"^(?:RssAnon|RssShmem|HugetlbPages):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Way:
    """One way to load or save.

    Attributes:
        act: what is timed; gets what `prepare` returned.
        check: raises ValueError if the result of `act` is wrong, and returns the bytes that the
            rank has to hold.
        prepare: runs before the clock starts.
    """

    act: Callable[[Any], Any]
    check: Callable[[Any], int]
    prepare: Callable[[], Any] = lambda: None


@dataclass
class RankResult:
    """What one rank measured of itself. Times in seconds of the monotonic clock, which all
    processes share.
    """

    start: float = 0.0
    end: float = 0.0
    cpu_s: float = 0.0
    base_bytes: int = 0
    end_bytes: int = 0
    held_bytes: int = 0
    imported: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Measurement:
    """One run of one way. Lists are by rank.

    Attributes:
        wall_s: from the first rank's start to the last rank's end.
        cpu_s: user and system time of all threads of all ranks.
        peak_bytes: highest memory that no file backs, above that at the start.
        held_bytes: what the rank has to hold at the end, or held already before a save: its shards.
        imported: modules that the way imported while the clock ran.
    """

    wall_s: float
    cpu_s: float
    peak_bytes: list[int]
    held_bytes: list[int]
    imported: list[str]


class WayFailed(Exception):  # noqa: N818 - the way failed, not this script
    """A way raised on some rank, or did not end."""


def memory_bytes(pid: int | str = "self") -> int:
    """Memory of a process that no file backs; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(kib) for kib in _MEMORY.findall(status))


def run_way(way: Way, ranks: int, timeout_s: float = 600) -> Measurement:
    """Fork `ranks` fresh processes, run `way` on them, and measure.

    Raises:
        WayFailed: with the first rank's reason; the others are killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="titanlite-bench-ranks-"))
    context = multiprocessing.get_context("fork")
    sys.stdout.flush()
    processes, pipes = [], []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, ranks, folder, sender, way))
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        results, samples = _collect(pipes, [process.pid for process in processes], timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)
    peaks = [
        max([result.end_bytes, *(used for at, used in seen if result.start <= at <= result.end)])
        - result.base_bytes
        for result, seen in zip(results, samples, strict=True)
    ]
    return Measurement(
        wall_s=max(r.end for r in results) - min(r.start for r in results),
        cpu_s=sum(r.cpu_s for r in results),
        peak_bytes=peaks,
        held_bytes=[r.held_bytes for r in results],
        imported=sorted({name for r in results for name in r.imported}),
    )


def run_alone(function: Callable[[], None]) -> None:
    """Run `function` in a forked process, so that this one's heap stays as small as it is.

    Raises:
        WayFailed: it raised.
    """
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    if process.exitcode:
        raise WayFailed(f"exit code {process.exitcode}")


def touch_memory(most: int = sys.maxsize) -> None:
    """Touch and free `most` bytes of the free memory, but nearly all at most, in a process of its
    own.

    In a virtual machine, memory that lay idle may have to come from the host first: each run would
    be charged for what it happens to get. Plain copying took 1.2 CPU s instead of 0.57 so, and
    where the guest reports free memory to the host, huge pages, which come out of the largest free
    blocks, took 2.4 s per 0.75 GB instead of 0.5. So it touches huge pages first, and small ones in
    what they cannot use: with huge pages alone, small ones, which come out of the smallest free
    blocks, took 1.7 to 4.5 s per GB instead of 0.6 to 1.0.
    """

    def touch() -> None:
        taken = []
        for huge in (True, False):
            free = min(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _left_in_group())
            length = min(free - _LEFT_BYTES[huge], most - sum(map(len, taken)))
            if length < mmap.PAGESIZE:
                continue
            memory = fresh_memory(length, huge=huge)
            for start in range(0, length, mmap.PAGESIZE):
                memory[start] = 1
            taken.append(memory)

    run_alone(touch)


def fresh_memory(length: int, *, huge: bool) -> mmap.mmap:
    """Private memory that nobody has touched, of huge pages, where the system has them, or of small
    ones.
    """
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return memory


def _left_in_group() -> int:
    """What the control group of this process may still take, in bytes."""
    with suppress(OSError, ValueError):
        folder = Path(
            "/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        )
        used = int((folder / "memory.current").read_text())
        return int((folder / "memory.max").read_text()) - used  # "max" is no number
    return sys.maxsize


def _collect(
    pipes: list[Connection], pids: list[Any], timeout_s: float
) -> tuple[list[RankResult], list[list[tuple[float, int]]]]:
    """Wait for all ranks' results and sample their memory meanwhile, as (time, bytes) by rank."""
    results: dict[int, RankResult] = {}
    samples: list[list[tuple[float, int]]] = [[] for _ in pipes]
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        for pipe in wait(
            [pipe for rank, pipe in enumerate(pipes) if rank not in results],
            timeout=_SAMPLE_EVERY_S,
        ):
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                message = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise WayFailed(f"rank {rank} died") from None
            if isinstance(message, str):
                raise WayFailed(f"rank {rank}: {message}")
            results[rank] = message
        for seen, pid in zip(samples, pids, strict=True):
            seen.append((time.monotonic(), memory_bytes(pid)))
        if time.monotonic() > deadline:
            raise WayFailed(f"no end after {timeout_s:.0f} s")
    return [results[rank] for rank in range(len(pipes))], samples


def _rank_main(rank: int, ranks: int, folder: Path, sender: Connection, way: Way) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    torch.set_num_threads(1)
    message: RankResult | str
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
        )
        message = _measure(way)
        dist.barrier()  # the rendezvous must outlive the slowest check
    except BaseException as error:  # noqa: BLE001 - everything goes to the parent, which reports it
        if os.environ.get("BENCH_TRACEBACK"):
            traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
    sender.send_bytes(pickle.dumps(message))
    sender.close()
    os._exit(0)  # no teardown of what the parent imported


def _measure(way: Way) -> RankResult:
    result = RankResult()
    state = way.prepare()
    gc.collect()
    # or the way would fill free memory of the heap, its own or the parent's, unseen
    ctypes.CDLL(None).malloc_trim(0)
    dist.all_reduce(torch.zeros(1))  # opens the connections
    modules = set(sys.modules)
    dist.barrier()
    result.base_bytes = memory_bytes()
    cpu = _cpu_s()
    result.start = time.monotonic()
    outcome = way.act(state)
    dist.barrier()
    result.end = time.monotonic()
    result.cpu_s = _cpu_s() - cpu
    result.end_bytes = memory_bytes()
    result.imported = sorted(set(sys.modules) - modules)
    result.held_bytes = way.check(outcome)
    return result


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
