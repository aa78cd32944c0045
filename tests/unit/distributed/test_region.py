"""Regions of sharded tensors: over all ranks of a mesh they tile the tensor, and hold what FSDP2
puts there.
"""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.materialize import region_of
from titanlite.materialize.layout import num_replicas

WORLD = 8


@contextmanager
def fake_rank(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def coverage(make):
    """How often each element is held, over all ranks, and the number of replicas that layout
    states.
    """
    held, replicas = None, 0
    for rank in range(WORLD):
        with fake_rank(rank):
            tensor = make()
            held = torch.zeros(tensor.shape, dtype=torch.int64) if held is None else held
            region = region_of(tensor)
            assert tuple(tensor.to_local().shape) == region.lengths
            held[region.slices] += 1
            replicas = num_replicas(tensor, WORLD)
    return held, replicas


@pytest.mark.parametrize("shape", [(9, 6), (1, 5)])
@pytest.mark.parametrize(
    "placements", [*itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)], ids=str
)
def test_shards_tile_the_tensor(shape, placements):
    def make():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        return distribute_tensor(
            torch.empty(shape, device="meta"), mesh, placements, src_data_rank=None
        )

    held, replicas = coverage(make)
    assert (held == replicas).all()


SHAPES = [(16, 8), (12, 8), (10, 8), (5, 6), (3, 8), (1, 4)]


def fsdp_over_tensor_parallel():
    """This rank's regions, and its values after FSDP2 sharded a real tensor that counts 0, 1, 2,
    ...
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for shape, dim in itertools.product(SHAPES, (0, 1)):
        model = nn.Linear(shape[1], shape[0], bias=False)
        values = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        model.weight = nn.Parameter(
            distribute_tensor(values, mesh["tp"], [Shard(dim)], src_data_rank=None)
        )
        fully_shard(model, mesh=mesh["dp"])
        region = region_of(model.weight)
        assert torch.equal(model.weight.to_local(), values[region.slices])
        held = torch.zeros(shape, dtype=torch.int64)
        held[region.slices] = 1
        found.append((num_replicas(model.weight, 4), held))
    return found


def test_fsdp_over_tensor_parallel_tiles_the_tensor(run_ranks):
    # Forked ranks: torch keeps meshes of a process group beyond its end, so one process cannot play
    # several ranks.
    for of_ranks in zip(*run_ranks(4, fsdp_over_tensor_parallel), strict=True):
        assert {replicas for replicas, _ in of_ranks} == {1}
        assert (sum(held for _, held in of_ranks) == 1).all()


def test_partial_sums_have_no_region():
    with fake_rank(0):
        mesh = init_device_mesh("cpu", (WORLD,))
        tensor = distribute_tensor(
            torch.empty(4, device="meta"), mesh, [Replicate()], src_data_rank=None
        )
        partial = type(tensor).from_local(tensor.to_local(), mesh, [Partial()])
        with pytest.raises(ValueError, match="holds a partial sum and has no region"):
            region_of(partial)
