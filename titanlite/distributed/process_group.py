"""Process group and device of this rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from titanlite.distributed.flight_recorder import enable_flight_recorder
from titanlite.distributed.host_memory import keep_freed_memory


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be rank `rank` of a process group of `world_size` ranks that are not there: collectives return at once.

    Meshes and shards come out as in a real run, so that a layout can be looked at without a cluster.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the only place that offers it

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Drop the results that DTensor keeps for operations on meshes of this process.

    Meshes over the same ranks are equal, whichever rank they were made on. A later mesh (of this process, or of one
    forked from it) would get back layouts on the older mesh object, with the older rank's coordinate.
    """
    debug._clear_sharding_prop_cache()  # pyright: ignore[reportPrivateUsage]


def init_distributed(timeout_s: int, dump_folder: Path | None = None) -> torch.device:
    """Join the process group that torchrun announced, or make one of size 1; return this rank's device.

    NCCL for CUDA tensors with gloo beside it for small host objects; gloo alone without a GPU. A collective that waits
    longer than `timeout_s` seconds ends the rank with an error instead of hanging; with NCCL, every rank then leaves a
    record of its last collectives in `dump_folder`, if there is one.
    """
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        keep_freed_memory()
    if dist.is_initialized():
        return device
    if "nccl" in backend and dump_folder is not None:
        enable_flight_recorder(dump_folder)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return device
