"""Regions of sharded tensors: over all ranks of a mesh they tile the tensor."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlite.launch.process_group import fake_ranks
from titanlite.materialize import region_of
from titanlite.materialize.layout import num_replicas

WORLD = 8


def coverage(make):
    """How often each element is held, over all ranks, and the number of replicas that layout
    states.
    """
    held, replicas = None, 0
    for rank in range(WORLD):
        with fake_ranks(WORLD, rank):
            tensor = make()
            held = torch.zeros(tensor.shape, dtype=torch.int64) if held is None else held
            region = region_of(tensor)
            assert tuple(tensor.to_local().shape) == region.lengths
            held[region.slices] += 1
            replicas = num_replicas(tensor, WORLD)
    return held, replicas


@pytest.mark.parametrize(
    "placements", [*itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)]
)
def test_shards_tile_the_tensor(placements):
    def make():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        return distribute_tensor(
            torch.empty(9, 6, device="meta"), mesh, placements, src_data_rank=None
        )

    held, replicas = coverage(make)
    assert (held == replicas).all()


def test_a_shard_of_another_size_is_named():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        shape = {"shape": torch.Size((8, 3)), "stride": (3, 1)}
        tensor = DTensor.from_local(torch.zeros(3, 3), mesh, [Shard(0)], run_check=False, **shape)
        with pytest.raises(ValueError, match=r"local shape \(3, 3\), expected \(4, 3\)"):
            region_of(tensor)
