"""How many bytes of a checkpoint each rank will hold, and read, before anything is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from titanlite.materialize import Plan, Region
from titanlite.materialize.replicas import share_out
from titanlite.materialize.sources import Read


@runtime_checkable
class CountingReader(Protocol):
    """A reader that can say beforehand how much it will read."""

    def plan_bytes(self, name: str, region: Region) -> Mapping[Path, int]:
        """Bytes of each file that a read of `region` of tensor `name` takes; reads nothing."""
        ...


@dataclass(frozen=True)
class RankReads:
    """Of one rank, bytes as they are on disk.

    Attributes:
        held: what its shards are made of.
        read: the part of it that this rank reads itself; the rest comes from ranks that hold the same.
        files: files that it reads from.
    """

    held: int
    read: int
    files: frozenset[Path]


class PlannedReads:
    """The reads of a plan, shared out among the replicas as `materialize` will do it."""

    def __init__(self, plan: Plan) -> None:
        reads = [(entry.tensor, entry.source) for entry in plan.entries if isinstance(entry.source, Read)]
        shares = share_out((tensor for tensor, _ in reads), plan.group)
        self._reads = [(share, source) for share, (_, source) in zip(shares, reads, strict=True)]

    def of_rank(self, rank: int) -> RankReads:
        """Return what global rank `rank`, of the plan's stage, will hold and read. Adapters in memory count nothing."""
        held = read = 0
        files: set[Path] = set()
        for share, source in self._reads:
            region, in_charge = share.place_of(rank)
            if not isinstance(source.reader, CountingReader):
                continue
            needed = source.reader.plan_bytes(source.name, region)
            held += sum(needed.values())
            if in_charge:
                read += sum(needed.values())
                files.update(needed)
        return RankReads(held, read, frozenset(files))
