"""Shards in host memory of a mesh of GPUs, which are not there."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titanlite.launch.process_group import fake_ranks
from titanlite.materialize.execute import exchange, sharded_like


def test_offloaded_shards_stay_where_they_are():
    """DTensor.from_local would move them to the GPU, and FSDP2 refuses to offload what is there."""
    with fake_ranks(4):
        mesh = init_device_mesh("cuda", (4,))
        shape, meta = torch.Size((8, 3)), torch.empty(2, 3, device="meta")
        param = nn.Parameter(
            DTensor.from_local(meta, mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1)),
            requires_grad=False,
        )
        local = torch.arange(6.0).view(2, 3)
        exchange(param, sharded_like(param, local))
        assert (
            isinstance(param, nn.Parameter) and isinstance(param, DTensor) and param.shape == shape
        )
        assert (
            param.device == param.to_local().device == torch.device("cpu")
            and param.device_mesh == mesh
        )
        assert param.to_local().data_ptr() == local.data_ptr() and torch.equal(
            param.to_local(), local
        )
        assert torch.zeros_like(param).to_local().device == torch.device("cpu"), (
            "an optimizer's state"
        )
