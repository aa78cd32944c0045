"""Ranks compared: who does the waiting, who is waited for, and why.

Ranks in lockstep take the same wall time per step whichever of them is slow. So each rank measures the time that it was
busy, outside of collectives; the slowest is the one with the most.
"""

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from titanlite.base.timers import COMMUNICATION, FSDP_COLLECTIVES

_GIB = 2**30
_MOST_LISTED = 128


def gather_ranks(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the `values` of every rank, by name, in order of ranks.

    Collectives: one all-gather of a few host floats over the default process group, on gloo; every rank must call, with
    the same names.
    """
    own = torch.tensor(list(values.values()), dtype=torch.float64)
    table = own.new_empty(dist.get_world_size(), own.numel())
    dist.all_gather(list(table.unbind()), own)
    return {name: column.tolist() for name, column in zip(values, table.T, strict=True)}


def get_busy_seconds(seconds: Mapping[str, float]) -> float:
    """Time outside of collectives, from the phases of a `StepTimer`.

    On CUDA the whole duration of FSDP's collectives counts as not busy, also where computation hides it. That is alike
    on all ranks but for the wait for a late peer, which is what tells them apart.
    """
    phases = sum(value for name, value in seconds.items() if name not in (COMMUNICATION, FSDP_COLLECTIVES))
    return max(phases - seconds.get(FSDP_COLLECTIVES, 0.0), 0.0)


def get_memory(device: torch.device) -> dict[str, float]:
    """Memory of this rank in GiB: peaks of the device's allocator since the start, and the host's resident memory."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    found = {"memory/host_peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB}
    if device.type == "cuda":
        found["memory/max_allocated_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
        found["memory/max_reserved_gib"] = torch.cuda.max_memory_reserved(device) / _GIB
    statm = Path("/proc/self/statm")
    if statm.exists():
        found["memory/host_rss_gib"] = int(statm.read_text().split()[1]) * resource.getpagesize() / _GIB
        # The kernel adds up what its CPUs counted for the present size, not for the peak, which may be short of it.
        found["memory/host_peak_rss_gib"] = max(found["memory/host_peak_rss_gib"], found["memory/host_rss_gib"])
    return found


def find_slowest(busy: Sequence[float], data: Sequence[float], stage_size: int | None = None) -> tuple[int, float, str]:
    """Find the rank that the others wait for, from the busy times and the parts spent on data, in rank order.

    Returns its number, its busy time over the median of the ranks that have its layers, and why: "data" if most of its
    excess over the median was spent loading data, otherwise "compute".

    Of pipeline stages, of `stage_size` neighbouring ranks each, one may have more to do; its ranks are compared with
    each other, and the one that exceeds its own stage's median most is the slowest.
    """
    size = stage_size or len(busy)

    def typical_of(values: Sequence[float], rank: int) -> float:
        first = rank - rank % size
        return median(values[first : first + size])

    rank = max(range(len(busy)), key=lambda r: (busy[r] - typical_of(busy, r), busy[r]))
    typical = typical_of(busy, rank)
    excess, data_excess = busy[rank] - typical, data[rank] - typical_of(data, rank)
    return rank, busy[rank] / typical if typical else 1.0, "data" if data_excess > 0.5 * excess else "compute"


def describe_ranks(
    ranks: Mapping[str, Sequence[float]], steps: int, tokens_per_rank: float, stage_size: int | None = None
) -> tuple[dict[str, float], dict[str, object]]:
    """Return metrics of all ranks together, and lists by rank for `metrics.jsonl`, of an interval of `steps` steps.

    `ranks` has, from `gather_ranks`, `busy_s` and `data_s` of the whole interval, and values of memory.
    """
    busy = [value / steps for value in ranks["busy_s"]]
    data = [value / steps for value in ranks["data_s"]]
    values = {name: max(column) for name, column in ranks.items() if name.startswith("memory/")}
    if len(busy) == 1:
        return values, {}
    rank, ratio, reason = find_slowest(busy, data, stage_size)
    values |= {"ranks/slowest": rank, "ranks/slowest_over_median": ratio}
    values |= {"ranks/busy_max_s": busy[rank], "ranks/busy_median_s": median(busy)}
    lists: dict[str, object] = {"ranks/slowest_reason": reason}
    if len(busy) <= _MOST_LISTED:  # a line of a large run stays readable
        memory = "memory/max_reserved_gib" if "memory/max_reserved_gib" in ranks else "memory/host_peak_rss_gib"
        lists["ranks/busy_s"] = [round(value, 6) for value in busy]
        lists["ranks/data_s"] = [round(value, 6) for value in data]
        lists["ranks/tokens_per_s"] = [round(tokens_per_rank / steps / max(value, 1e-9), 1) for value in busy]
        lists["ranks/memory_gib"] = [round(value, 4) for value in ranks[memory]]
    return values, lists
