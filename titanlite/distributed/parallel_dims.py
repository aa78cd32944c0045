"""`ParallelDims`: the only place that knows mesh axes by name."""

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.parallelism import Degrees


@dataclass(frozen=True)
class ParallelDims:
    """Degrees and the two meshes over the same ranks.

    Attributes:
        degrees: resolved degrees.
        dense: mesh (dp_replicate, fsdp, tp), for everything but experts.
        sparse: mesh (dp_replicate, efsdp, ep), for experts; neighbouring ranks form an ep group.
    """

    degrees: Degrees
    dense: DeviceMesh
    sparse: DeviceMesh

    @classmethod
    def build(cls, degrees: Degrees, device_type: str) -> "ParallelDims":
        """Create the meshes. Collective: every rank of the default process group must call."""
        d = degrees
        dense = init_device_mesh(
            device_type, (d.dp_replicate, d.dp_shard, d.tp), mesh_dim_names=("dp_replicate", "fsdp", "tp")
        )
        sparse = init_device_mesh(
            device_type,
            (d.dp_replicate, d.efsdp, d.ep),
            mesh_dim_names=("dp_replicate", "efsdp", "ep"),
            # A group of its own also where it has all ranks. Sharing the default one with FSDP, tokens would travel
            # behind the parameters of the next layer: NCCL serves one communicator in order.
            backend_override={"ep": dist.get_backend_config()} if d.ep > 1 else None,
        )
        return cls(d, dense, sparse)

    @cached_property
    def tp_mesh(self) -> DeviceMesh:
        """Ranks that split a layer and the sequence."""
        return self.dense["tp"]

    @cached_property
    def ep_mesh(self) -> DeviceMesh:
        """Ranks that split the experts."""
        return self.sparse["ep"]

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh for `fully_shard` of dense parameters: one axis, or two for HSDP."""
        return self.dense["dp_replicate", "fsdp"] if self.degrees.dp_replicate > 1 else self.dense["fsdp"]

    @cached_property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """Mesh for `fully_shard` of expert parameters: one axis, or two for HSDP."""
        return self.sparse["dp_replicate", "efsdp"] if self.degrees.dp_replicate > 1 else self.sparse["efsdp"]

    @property
    def dp_rank(self) -> int:
        """Which of the `degrees.dp` data streams this rank reads; tp ranks of one group read the same."""
        return self.dense["dp_replicate"].get_local_rank() * self.degrees.dp_shard + self.dense["fsdp"].get_local_rank()
