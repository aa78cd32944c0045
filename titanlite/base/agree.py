"""Errors raised together: a problem of one rank is raised on all ranks, so that none waits for
another in vain.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from titanlite.base.errors import TitanliteError, raise_problems
from titanlite.base.process import read_rank
from titanlite.base.text import list_names

_T = TypeVar("_T")
# "remote process" is of ncclRemoteError: "... a remote process exiting prematurely", "... remote
# process exited".
_NCCL_SIGNS_OF_A_LOST_PEER = (
    *("remote process", "aborted", "timeout", "timed out"),
    *("Connection closed", "Connection refused", "Connection reset", "Broken pipe"),
)


def raise_together(
    error: type[TitanliteError],
    where: str,
    problems: Sequence[str],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise on all ranks one `error` that lists the problems of each rank; return quietly if no
    rank has any.

    A problem that several ranks have is listed once, with their numbers.

    Collectives: one all-gather of small objects over `group` (the default one), if there is one;
    every rank must call.
    """
    if not (dist.is_initialized() and dist.get_world_size(group) > 1):
        raise_problems(error, where, problems)
        return
    raise_problems(error, where, merge_problems(gather_objects(list(problems), group)))


def gather_objects(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the small objects of all ranks, in their order.

    Collectives: one all-gather over `group` (the default one), if there is one; every rank must
    call.
    """
    if not dist.is_initialized():
        return [value]
    gathered = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def merge_problems(gathered: Sequence[Sequence[str]]) -> list[str]:
    """Return the problems of all ranks, each once, with the ranks that have it."""
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, problems in enumerate(gathered):
        for problem in problems:
            ranks_of[problem].append(rank)
    return [
        f"{problem} (rank{'s' if len(ranks) > 1 else ''} {list_names(ranks, most=8)})"
        for problem, ranks in ranks_of.items()
    ]


def new_host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of all ranks, on the host, whose collectives wait that long. Collective: every
    rank must call.
    """
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def on_first_rank(function: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """Return what `function()` returns on rank 0, on all ranks; its `TitanliteError` is raised on
    all of them.

    Collectives: one broadcast of the pickled result over `group` (the default one); every rank must
    call.
    """
    if not dist.is_initialized():
        return function()
    outcome: list[tuple[_T | None, TitanliteError | None]] = [(None, None)]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = (function(), None)
        except TitanliteError as error:
            outcome[0] = (None, error)
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    result, failure = outcome[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise the `TitanliteError` of the body on all ranks: that of the first rank that has one.

    The body must have no collectives. Other exceptions end the rank, and with it the run.

    Collectives: one all-gather of small objects over `group` (the default one), which waits for
    all; every rank must call.
    """
    failure: TitanliteError | None = None
    try:
        yield
    except TitanliteError as error:
        failure = error
    first = next((error for error in gather_objects(failure, group) if error is not None), None)
    if first is not None:
        raise first from failure


def get_rank() -> int:
    """Return this rank's number, also before the process group exists."""
    return dist.get_rank() if dist.is_initialized() else read_rank()


def is_lost_peer(error: Exception) -> bool:
    """Return True if a collective failed because another rank is gone or hangs."""
    text = str(error)
    if isinstance(error, dist.DistBackendError) and "gloo" not in text:
        # NCCL: a rank's own trouble (memory, /dev/shm, two ranks on one GPU) is reported as any
        # error is.
        return any(sign in text for sign in _NCCL_SIGNS_OF_A_LOST_PEER)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
