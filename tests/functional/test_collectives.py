"""Collectives through gloo against what they must give, computed from every rank's seed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titanlite.distributed.collectives import all_gather_single, reduce_scatter_single

RANKS, LENGTH = 4, 1000


def of_rank(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)], ids=["singles", "pairs", "all"])
def test_gathering_and_reducing_through_gloo(run_ranks, shape, dtype):
    def check() -> None:
        group = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))["inner"].get_group()
        members, place = dist.get_process_group_ranks(group), group.rank()
        expected = torch.cat([of_rank(rank, LENGTH, dtype) for rank in members])

        # As FSDP2 gathers: this rank's piece lies in the result already.
        gathered = torch.full((len(members) * LENGTH, 3), float("nan"), dtype=dtype)
        piece = gathered.narrow(0, place * LENGTH, LENGTH)
        piece.copy_(of_rank(dist.get_rank(), LENGTH, dtype))
        assert all_gather_single(gathered, piece, group=group) is None
        assert torch.equal(gathered, expected)
        assert all_gather_single(gathered.zero_(), of_rank(dist.get_rank(), LENGTH, dtype), group=group) is None
        assert torch.equal(gathered, expected)

        wholes = torch.stack([of_rank(rank, len(members) * LENGTH, dtype) for rank in members])
        reduced = torch.full((LENGTH, 3), float("nan"), dtype=dtype)
        assert reduce_scatter_single(reduced, wholes[place], group=group) is None
        exact = wholes.double().sum(0)[place * LENGTH : (place + 1) * LENGTH]
        torch.testing.assert_close(reduced.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-7)

    run_ranks(RANKS, check)


def test_another_reduction_and_a_collective_in_the_background_are_those_of_torch(run_ranks):
    def check() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        reduced = torch.zeros(1)
        reduce_scatter_single(reduced, torch.arange(4.0) * (rank + 1), group=group, op=dist.ReduceOp.MAX)
        assert reduced.item() == 4 * rank
        gathered = torch.zeros(4)
        work = all_gather_single(gathered, torch.full((1,), float(rank)), group=group, async_op=True)
        assert work is not None
        work.wait()
        assert gathered.tolist() == [0, 1, 2, 3]

    run_ranks(RANKS, check)
