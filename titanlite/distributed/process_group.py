"""Process group and device of this rank."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from titanlite.errors import ConfigError
from titanlite.network import find_interface


def _choose_interface() -> None:
    """Name gloo the interface that leads to the other machines, if there are any and the user has not."""
    several = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) != os.environ["WORLD_SIZE"]
    if several and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = find_interface(os.environ["MASTER_ADDR"])


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of a process group of `world_size` ranks that are not there: collectives return at once.

    Meshes and shards come out as in a real run, so that a layout can be looked at without a cluster.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the only place that offers it

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
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


def init_distributed(timeout_s: int) -> torch.device:
    """Join the process group that torchrun announced, or make one of size 1; return this rank's device.

    NCCL for CUDA tensors with gloo beside it for small host objects; gloo alone without a GPU. A collective that waits
    longer than `timeout_s` seconds ends the rank with an error instead of hanging.

    With several machines, gloo takes the network interface that leads to the first one, unless GLOO_SOCKET_IFNAME
    is set; NCCL finds its own.

    Raises:
        ConfigError: the ranks of other machines cannot be reached; names the interface and the address.
    """
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if dist.is_initialized():
        return device
    if "RANK" in os.environ:
        _choose_interface()
        try:
            dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as error:
            if "Gloo connectFullMesh failed" not in str(error) and "Unable to find address" not in str(error):
                raise
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "that of the host name")
            raise ConfigError(
                f"network: rank {os.environ['RANK']} on {socket.gethostname()} cannot connect to the other ranks by "
                f"the interface {interface}: {str(error).splitlines()[0]} Set GLOO_SOCKET_IFNAME on each machine to an "
                "interface that the others can reach, and let them connect to all ports."
            ) from None
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return device
