"""`ParallelDims`: the meshes and groups of a run. Only this class uses the names of mesh axes."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.parallelism import Degrees


@dataclass(frozen=True)
class ParallelDims:
    """Degrees and the two meshes over the same ranks.

    An axis with one rank is omitted, because gloo's threads of an idle process group wake up a
    hundred times a second. Only the two axes over which FSDP shards are always present. With
    pipeline stages the meshes begin with an axis "pp", along which no tensor is split; the other
    axes span the ranks of one stage.
    """

    degrees: Degrees
    dense: DeviceMesh  # (dp_replicate, dp_shard or dp_shard_cp, tp), for everything but experts
    # (dp_replicate, efsdp, ep); neighbouring ranks form an ep group. None: experts are split over
    # the dense mesh.
    sparse: DeviceMesh | None
    # ranks with the pieces of a sequence, in order; this group shards no parameters
    cp_group: dist.ProcessGroup | None = None
    # ranks of this pipeline stage, if there are several stages
    stage_group: dist.ProcessGroup | None = None
    # A second group of the axis "pp", for gradients; the axis' own group sends hidden states.
    pp_backward_group: dist.ProcessGroup | None = None

    @classmethod
    def build(cls, degrees: Degrees, device_type: str) -> "ParallelDims":
        """Create the meshes. Collective: every rank of the default process group must call."""
        d = degrees
        sparse = None
        sizes = {"pp": d.pp, "dp_replicate": d.dp_replicate, d.fsdp_axis: d.fsdp, "tp": d.tp}
        dense = _build_mesh(device_type, sizes, d.fsdp_axis)
        if d.experts_on_own_mesh:
            sizes = {"pp": d.pp, "dp_replicate": d.dp_replicate, "efsdp": d.efsdp, "ep": d.ep}
            sparse = _build_mesh(device_type, sizes, "efsdp")
        cp_group = stage_group = backward_group = None
        rank = dist.get_rank()
        if d.pp > 1:
            size = d.stage_size
            first = d.stage_of(rank) * size
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
        """Return the mesh with one rank of every stage, this rank included; only with pp > 1."""
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
        """Return the mesh for `fully_shard` of experts on the sparse mesh: one axis, or two for
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
        """Return which of the `degrees.dp` data streams this rank reads; cp, tp and pp ranks share
        a stream.
        """
        return dist.get_rank() % self.degrees.stage_size // self.degrees.ranks_per_sequence

    @property
    def dropout_rank(self) -> int:
        """Return the number of the random stream of dropout; tp ranks share one, because they
        compute parts of a layer from the same tokens.
        """
        return dist.get_rank() // self.degrees.tp

    def seed_generators(self, seed: int, step: int, device: torch.device) -> None:
        """Seed torch's generators of the host and of `device` for `step`, so that dropout is the
        same in a resumed run.
        """
        name = f"{seed}:{step}:{self.dropout_rank}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        # torch.manual_seed would format the stack for CUDA's first use
        torch.default_generator.manual_seed(number)
        if device.type == "cuda":
            torch.cuda.manual_seed(number)


def _new_group(ranks: range) -> dist.ProcessGroup:
    """Make the group of `ranks`, which must include this rank. Collective over these ranks only."""
    # Without local synchronization every rank would have to make every group, with a barrier of all
    # ranks for each. The default group must not be bound to a device: otherwise NCCL would split
    # its communicator, which is collective over all ranks.
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return group


def _build_mesh(device_type: str, sizes: dict[str, int], always: str) -> DeviceMesh:
    """Make the mesh over `always` and the axes with more than one rank. Collective."""
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == always}
    # The all-to-alls of tokens get a separate group even if it has all ranks. In the default group
    # they would queue after FSDP's all-gather of the next layer: NCCL processes one communicator in
    # order.
    own: Any = {"ep": dist.get_backend_config()} if "ep" in sizes else None
    return init_device_mesh(
        device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=own
    )
