"""Errors raised together: a problem of one rank is raised on all ranks, so that none waits for
another forever.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from titanlite.base.errors import TitanliteError
from titanlite.base.process import read_rank
from titanlite.base.text import list_names

_T = TypeVar("_T")
# "remote process" is in ncclRemoteError: "... a remote process exiting prematurely", "... remote
# process exited".
_NCCL_SIGNS_OF_A_LOST_PEER = (
    "remote process",
    "aborted",
    "timeout",
    "timed out",
    "Connection closed",
    "Connection refused",
    "Connection reset",
    "Broken pipe",
)


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise a `TitanliteError` of the body on all ranks, as one error of the first error's class.

    A message that several ranks raise appears once, with the numbers of these ranks unless all
    ranks raise it. The body must have no collectives. Other exceptions end the rank, and with it
    the run.

    Collectives: one all-gather of small objects over `group` (the default one), which waits for all
    ranks; every rank must call.
    """
    failure: TitanliteError | None = None
    try:
        yield
    except TitanliteError as error:
        failure = error
    found = gather_objects(failure, group)
    first = next((error for error in found if error is not None), None)
    if first is not None:
        texts = merge_problems([[] if error is None else [str(error)] for error in found])
        raise type(first)("\n".join(texts)) from failure


def gather_objects(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the small objects of all ranks, in the order of the ranks.

    Collectives: one all-gather over `group` (the default one), if there is one; every rank must
    call.
    """
    if not dist.is_initialized():
        return [value]
    gathered = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def merge_problems(gathered: Sequence[Sequence[str]]) -> list[str]:
    """Return the problems of all ranks, each problem once, with the ranks that have it unless all
    ranks have it.
    """
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, problems in enumerate(gathered):
        for problem in problems:
            ranks_of[problem].append(rank)
    merged = []
    for problem, ranks in ranks_of.items():
        plural = "s" if len(ranks) > 1 else ""
        where = f" (rank{plural} {list_names(ranks, most=8)})" if len(ranks) < len(gathered) else ""
        merged.append(problem + where)
    return merged


def new_host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of all ranks on the host, whose collectives wait for `timeout`. Collective:
    every rank must call.
    """
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def on_first_rank(function: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
    """Return the result of `function()` on rank 0 on all ranks; its `TitanliteError` is raised on
    all ranks.

    Collectives: one broadcast of the pickled result over `group` (the default one); every rank must
    call.
    """
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [function()]
        except TitanliteError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if isinstance(outcome[0], TitanliteError):
        raise outcome[0]
    return outcome[0]


def get_rank() -> int:
    """Return this rank's number, even before the process group exists."""
    return dist.get_rank() if dist.is_initialized() else read_rank()


def get_rank_and_size() -> tuple[int, int]:
    """Return this rank's number and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_lost_peer(error: Exception) -> bool:
    """Return True if a collective failed because another rank ended or hangs."""
    text = str(error)
    if isinstance(error, dist.DistBackendError) and "gloo" not in text:
        # NCCL also reports failures of the rank itself (memory, /dev/shm, two ranks on one GPU):
        # these must not match.
        return any(sign in text for sign in _NCCL_SIGNS_OF_A_LOST_PEER)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
