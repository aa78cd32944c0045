"""The process group: where the ranks meet, through which network interface, and how they
disconnect.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from titanlite.base.errors import ConfigError, TransientError
from titanlite.base.process import allow_many_files, read_rank, read_world_size
from titanlite.base.text import first_line
from titanlite.launch.rendezvous import STORE_FILE, find_interface
from titanlite.ops.attention import leave_out_cudnn
from titanlite.ops.matmul import keep_float32

_rendezvous_number = count()  # counts the process groups of this process
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo"


def _explain(error: RuntimeError) -> TransientError:
    """Return an error that says what to do if the ranks cannot be connected."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "that of the host name")
    return TransientError(
        f"network: rank {read_rank()} on {socket.gethostname()} cannot connect to the other "
        f"ranks through the interface {interface} and port {os.environ.get('MASTER_PORT')}: "
        f"{first_line(error)}. If no rank has ended, set GLOO_SOCKET_IFNAME on each "
        "machine to an interface that the others can reach (`ip address` lists them), or "
        "MASTER_PORT to a free port."
    )


def _choose_interfaces() -> None:
    """Make gloo and NCCL use the loopback interface if all ranks are on this machine, unless the
    user has named another.

    Anybody on the network can reach other interfaces, without authentication. With several
    machines, gloo uses the interface from which the first machine is reached.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    here = os.environ.get("LOCAL_WORLD_SIZE")
    for name in _INTERFACES:
        if world_size in ("1", here):
            os.environ.setdefault(name, _LOOPBACK)
        # inherited from a run on one machine that started this run
        elif os.environ.get(name) == _LOOPBACK:
            del os.environ[name]
    if here not in (None, world_size) and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = find_interface(os.environ["MASTER_ADDR"])


def _find_store(timeout: timedelta) -> dict[str, Any]:
    """Return arguments for `init_process_group`: the store where the ranks meet, a file if the
    launcher named one.

    Ranks that meet again in the same processes, for another run, must not find stale keys.
    """
    if "RANK" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    number = next(_rendezvous_number)
    world_size = read_world_size()
    if path := os.environ.get(STORE_FILE):
        store = dist.FileStore(f"{path}.{number}", world_size)
    else:
        meeting_point = next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
        store = dist.PrefixStore(f"meeting {number}", meeting_point)
    store.set_timeout(timeout)
    return {"store": store, "rank": read_rank(), "world_size": world_size}


def _refuse_idle_gpus() -> None:
    """Refuse to train on the CPU, which is a hundred times slower, if the machine has GPUs that
    torch cannot use.
    """
    gpus = int(os.environ.get("TITANLITE_GPUS", "0"))
    if gpus == 0:
        return
    reason = "it was built without CUDA"
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
            reason = f"it was built for CUDA {torch.version.cuda}"
        except RuntimeError as error:
            reason = first_line(error)
    raise ConfigError(
        f"GPUs: nvidia-smi lists {gpus} on {socket.gethostname()}, but torch {torch.__version__} "
        f"cannot use them: {reason}. Install a torch for their driver, or set "
        "CUDA_VISIBLE_DEVICES= to train on the CPU."
    )


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of a fake process group of `world_size` ranks: collectives
    return at once.

    Meshes and shards are the same as in a real run, so a layout can be inspected without a cluster.
    """
    # the only module that offers it
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's cached results of operations on meshes of this process.

    Meshes over the same ranks compare as equal, whichever rank made them: a later mesh would get
    the coordinate of an earlier mesh.
    """
    debug._clear_sharding_prop_cache()  # pyright: ignore[reportPrivateUsage]


def end_distributed() -> None:
    """Destroy the process groups and close the connections. Undoes `init_distributed`."""
    dist.destroy_process_group()
    _forget_meshes()


def init_distributed(timeout_s: int) -> torch.device:
    """Join the process group that torchrun announced, or create one of size 1; return this rank's
    device.

    NCCL for CUDA tensors with gloo for small host objects; gloo alone without a GPU. A collective
    that waits longer than `timeout_s` seconds ends the rank with an error. With several machines,
    gloo takes the network interface from which the first machine is reached, unless
    GLOO_SOCKET_IFNAME is set. The ranks of one machine meet in a file and communicate over the
    loopback interface: no port is open to other machines.

    Raises:
        ConfigError: `run_train.sh` found GPUs, but torch finds none.
        TransientError: the ranks cannot be connected, because of a wrong interface, a port that is
            in use, or a rank that has ended.
    """
    timeout = timedelta(seconds=timeout_s)
    allow_many_files()
    keep_float32()
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # a task may see only its own GPU
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
        leave_out_cudnn()
        backend = "cpu:gloo,cuda:nccl"
    else:
        _refuse_idle_gpus()
        device = torch.device("cpu")
        backend = "gloo"
    if dist.is_initialized():
        return device
    _choose_interfaces()
    try:
        dist.init_process_group(backend, timeout=timeout, **_find_store(timeout))
    except RuntimeError as error:
        raise _explain(error) from None
    return device
