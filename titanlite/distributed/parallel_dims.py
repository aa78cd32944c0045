"""Process group and device of this rank; `ParallelDims`, which alone knows mesh axes by name;
sharding over an axis.
"""

import hashlib
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, debug

from titanlite.base.errors import ConfigError, TransientError
from titanlite.base.process import allow_many_files
from titanlite.config.parallelism import Degrees
from titanlite.distributed.collectives import forget_groups
from titanlite.launch.rendezvous import PORT_TAKEN, STORE_FILE, find_interface
from titanlite.materialize.layout import is_elsewhere
from titanlite.ops.attention import leave_out_cudnn
from titanlite.ops.matmul import keep_float32

_rendezvous_number = count()  # of process groups made in this process
_INTERFACES, _LOOPBACK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"


_NO_ADDRESS = "Unable to find address"


def _explain(error: RuntimeError) -> Exception:
    """Return what a user can do about the failure to connect all ranks; other errors as they
    are.
    """
    text, interface = str(error), os.environ.get("GLOO_SOCKET_IFNAME", "that of the host name")
    if not any(sign in text for sign in (_NO_ADDRESS, PORT_TAKEN, "Gloo connectFullMesh failed")):
        return error
    found = ConfigError if _NO_ADDRESS in text else TransientError
    return found(
        f"network: rank {os.environ['RANK']} on {socket.gethostname()} cannot connect to the other "
        f"ranks by the interface {interface} and port {os.environ.get('MASTER_PORT')}: "
        f"{text.splitlines()[0]} If no rank has ended, set GLOO_SOCKET_IFNAME on each machine to "
        "an interface that the others can reach (`ip address` lists them), or MASTER_PORT to a "
        "free port."
    )


def _choose_interfaces() -> None:
    """Name gloo and NCCL the loopback interface if all ranks are here, unless the user has named
    another.

    Other interfaces can be reached by everybody, without authentication. With several machines,
    gloo uses the interface that leads to the first one.
    """
    world_size, here = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
    for name in _INTERFACES:
        if world_size in ("1", here):
            os.environ.setdefault(name, _LOOPBACK)
        # inherited from a run on one machine that started this one
        elif os.environ.get(name) == _LOOPBACK:
            del os.environ[name]
    if here not in (None, world_size) and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = find_interface(os.environ["MASTER_ADDR"])


def _find_store(timeout: timedelta) -> dict[str, Any]:
    """Return arguments for `init_process_group`: the store where the ranks meet, a file if the
    launcher named one.

    Ranks that meet again, for another run in the same processes, must not find stale keys.
    """
    path, number = os.environ.get(STORE_FILE), next(_rendezvous_number)
    if path is None and number == 0:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if path is None:
        store = dist.PrefixStore(
            f"meeting {number}", next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
        )
    else:
        store = dist.FileStore(f"{path}.{number}" if number else path, world_size)
    store.set_timeout(timeout)
    return {"store": store, "rank": rank, "world_size": world_size}


def _refuse_idle_gpus() -> None:
    """Refuse to train on the CPU, a hundred times as slow, because torch has no way to the GPUs."""
    gpus = int(os.environ.get("TITANLITE_GPUS", "0"))
    if gpus == 0:
        return
    reason = "it was built without CUDA"
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
            reason = f"it was built for CUDA {torch.version.cuda}"
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
    raise ConfigError(
        f"GPUs: nvidia-smi lists {gpus} on {socket.gethostname()}, but torch {torch.__version__} "
        f"cannot use them: {reason}. Install a torch for their driver, or set "
        "CUDA_VISIBLE_DEVICES= to train on the CPU."
    )


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of a fake process group of `world_size` ranks: collectives
    return at once.

    Meshes and shards come out as in a real run, so that a layout can be looked at without a
    cluster.
    """
    # the only place that offers it
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Drop the results that DTensor keeps for operations on meshes of this process.

    Meshes over the same ranks are equal, whichever rank made them: a later mesh would get the older
    one's coordinate.
    """
    debug._clear_sharding_prop_cache()  # pyright: ignore[reportPrivateUsage]


def end_distributed() -> None:
    """Destroy the process groups and close the connections. Undoes `init_distributed`."""
    dist.destroy_process_group()
    forget_groups()
    _forget_meshes()


def init_distributed(timeout_s: int) -> torch.device:
    """Join the process group that torchrun announced, or make one of size 1; return this rank's
    device.

    NCCL for CUDA tensors with gloo for small host objects; gloo alone without a GPU. A collective
    that waits longer than `timeout_s` seconds ends the rank with an error. With several machines,
    gloo takes the network interface that leads to the first one, unless GLOO_SOCKET_IFNAME is set.
    The ranks of one machine meet in a file and talk over the loopback interface: nothing listens
    where others could reach it.

    Raises:
        ConfigError: GLOO_SOCKET_IFNAME names no interface of this machine; `run_train.sh` saw GPUs,
            torch sees none.
        TransientError: ranks of other machines cannot be reached, or the port where all ranks meet
            is taken.
    """
    timeout = timedelta(seconds=timeout_s)
    allow_many_files()
    keep_float32()
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # a task may see its own only
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
        leave_out_cudnn()
        backend = "cpu:gloo,cuda:nccl"
    else:
        _refuse_idle_gpus()
        device, backend = torch.device("cpu"), "gloo"
    if dist.is_initialized():
        return device
    _choose_interfaces()
    if "RANK" in os.environ:
        try:
            dist.init_process_group(backend, timeout=timeout, **_find_store(timeout))
        except RuntimeError as error:
            raise _explain(error) from None
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    return device


ParameterPlacements = dict[nn.Parameter, Placement]


@dataclass(frozen=True)
class ParallelDims:
    """Degrees and the two meshes over the same ranks.

    An axis with one rank is left out, except the two that FSDP units are split over: gloo's threads
    of an idle process group wake up a hundred times a second. With pipeline stages the meshes begin
    with an axis "pp", along which no tensor is split: the axes after it span the ranks of one
    stage.
    """

    degrees: Degrees
    dense: DeviceMesh  # (dp_replicate, dp_shard or dp_shard_cp, tp), for everything but experts
    # (dp_replicate, efsdp, ep): neighbours form an ep group. None: experts are split over the same
    # ranks as the rest.
    sparse: DeviceMesh | None
    # ranks with the pieces of a sequence, in order; it shards no parameter
    cp_group: dist.ProcessGroup | None = None
    # ranks of this pipeline stage, if there are several
    stage_group: dist.ProcessGroup | None = None
    # The axis "pp" once more, for gradients, since its own group serves hidden states.
    pp_backward_group: dist.ProcessGroup | None = None

    @classmethod
    def build(cls, degrees: Degrees, device_type: str) -> "ParallelDims":
        """Create the meshes. Collective: every rank of the default process group must call."""
        d, sparse = degrees, None
        sizes = {"pp": d.pp, "dp_replicate": d.dp_replicate, d.fsdp_axis: d.fsdp, "tp": d.tp}
        dense = _build_mesh(device_type, sizes, d.fsdp_axis)
        if d.experts_on_own_mesh:
            sizes = {"pp": d.pp, "dp_replicate": d.dp_replicate, "efsdp": d.efsdp, "ep": d.ep}
            sparse = _build_mesh(device_type, sizes, "efsdp")
        cp_group = stage_group = backward_group = None
        rank = dist.get_rank()
        if d.pp > 1:
            first, size = d.stage_of(rank) * d.stage_size, d.stage_size
            stage_group = _new_group(range(first, first + size))
            backward_group = _new_group(range(rank % size, d.world_size, size))
        if d.cp > 1:  # a separate group, even if it has all ranks
            first = rank - rank // d.tp % d.cp * d.tp
            cp_group = _new_group(range(first, first + d.cp * d.tp, d.tp))
        return cls(d, dense, sparse, cp_group, stage_group, backward_group)

    @property
    def stage(self) -> int:
        return self.degrees.stage_of(dist.get_rank())

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.degrees.pp - 1

    @cached_property
    def pp_mesh(self) -> DeviceMesh:
        """Return the mesh of the corresponding ranks of all stages; only with pp > 1."""
        return self.dense["pp"]

    @cached_property
    def tp_mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that split a layer and the sequence; only with tp > 1."""
        return self.dense["tp"]

    @cached_property
    def ep_mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that split the experts; only with ep > 1."""
        assert self.sparse is not None
        return self.sparse["ep"]

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """Return the mesh for `fully_shard` of dense parameters: one axis, or two for HSDP."""
        axis = self.degrees.fsdp_axis
        return (
            self.dense["dp_replicate", axis] if self.degrees.dp_replicate > 1 else self.dense[axis]
        )

    @cached_property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """Return the mesh for `fully_shard` of experts on a mesh of their own: one axis, or two for
        HSDP.
        """
        assert self.sparse is not None
        return (
            self.sparse["dp_replicate", "efsdp"]
            if self.degrees.dp_replicate > 1
            else self.sparse["efsdp"]
        )

    @property
    def dp_rank(self) -> int:
        """Return the number of the data stream that this rank reads, of `degrees.dp`; cp, tp and pp
        ranks share one.
        """
        return dist.get_rank() % self.degrees.stage_size // self.degrees.ranks_per_sequence

    @property
    def dropout_rank(self) -> int:
        """Return the number of the random stream of dropout; tp ranks compute parts of a layer from
        the same tokens.
        """
        return dist.get_rank() // self.degrees.tp

    def seed_generators(self, seed: int, step: int, device: torch.device) -> None:
        """Seed torch's generators of the host and of `device` for `step`: dropout is the same in a
        resumed run.
        """
        name = f"{seed}:{step}:{self.dropout_rank}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        # torch.manual_seed would format the stack for CUDA's first use
        torch.default_generator.manual_seed(number)
        if device.type == "cuda":
            torch.cuda.manual_seed(number)


def _new_group(ranks: range) -> dist.ProcessGroup:
    """Make the group of `ranks`, which this rank is one of. Collective over these alone."""
    # Without local synchronization every rank would have to make every group, with a barrier of all
    # ranks for each. It needs a default group that is bound to no device: otherwise NCCL splits its
    # communicator, with all ranks.
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return group


def _build_mesh(device_type: str, sizes: dict[str, int], always: str) -> DeviceMesh:
    """Make the mesh over the axes of more than one rank, and over `always`. Collective."""
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == always}
    # Tokens get a separate group even if it has all ranks. In the default one they would queue
    # after FSDP's all-gather of the next layer: NCCL serves one communicator in order.
    own: Any = {"ep": dist.get_backend_config()} if "ep" in sizes else None
    return init_device_mesh(
        device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=own
    )


def shard_parameters(model: nn.Module, mesh: DeviceMesh, placements: ParameterPlacements) -> None:
    """Replace each given parameter of `model` by a DTensor on the one-axis `mesh` that holds this
    rank's part of it.

    Splits are in `torch.chunk` sizes. Ties stay tied, and attributes are carried over. A plain
    parameter cannot become a DTensor in place (their slots differ), so do this before anything is
    keyed by parameter objects. A replicated parameter must have the same value on all ranks of the
    axis already. Parameters of other pipeline stages are left alone. No collective.
    """
    holders: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            holders[param].append((module, name))
    for param, placement in placements.items():
        if is_elsewhere(param):
            continue
        local = param.detach()
        if isinstance(placement, Shard):
            size = local.shape[placement.dim]
            chunk = -(-size // mesh.size())
            start = min(mesh.get_local_rank() * chunk, size)
            local = local.narrow(placement.dim, start, min(chunk, size - start)).contiguous()
        sharded = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=param.shape, stride=param.stride()
        )
        new = nn.Parameter(sharded, requires_grad=param.requires_grad)
        vars(new).update(vars(param))
        for module, name in holders[param]:
            setattr(module, name, new)
