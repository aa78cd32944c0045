"""Collectives as operators against what they must give, computed from every rank's seed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titanlite.distributed.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    register_group,
    start_all_to_all,
)

RANKS = 4
LENGTH = 1000  # of 3 elements


def of_rank(rank, length, dtype):
    return torch.randn(length, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)], ids=["singles", "pairs", "all"])
def test_gathering_and_reducing(run_ranks, shape, dtype):
    def check():
        group = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))[
            "inner"
        ].get_group()
        name, members, place = (
            register_group(group),
            dist.get_process_group_ranks(group),
            group.rank(),
        )
        mine = of_rank(dist.get_rank(), LENGTH, dtype)
        pieces = [of_rank(rank, LENGTH, dtype) for rank in members]
        for dim in (0, 1):
            assert torch.equal(all_gather(mine, dim, name), torch.cat(pieces, dim))

        wholes = torch.stack([of_rank(rank, len(members) * LENGTH, dtype) for rank in members])
        # Three additions, each off by half a unit of a sum that is no larger than that of the
        # magnitudes.
        bound = 1.5 * torch.finfo(dtype).eps * wholes.double().abs().sum(0)
        rows, expected = slice(place * LENGTH, (place + 1) * LENGTH), wholes.double().sum(0)
        reduced, summed = reduce_scatter(wholes[place], 0, name), all_reduce(wholes[place], name)
        assert ((reduced.double() - expected[rows]).abs() <= bound[rows]).all()
        assert ((summed.double() - expected).abs() <= bound).all()

    run_ranks(RANKS, check)


def test_rows_of_any_number_are_exchanged(run_ranks):
    """Now, and in flight; some ranks send nothing to others."""

    def check():
        assert dist.group.WORLD is not None
        name, rank = register_group(dist.group.WORLD), dist.get_rank()
        sent = [10 * rank + peer if peer != 2 else 0 for peer in range(RANKS)]
        received = [10 * peer + rank if rank != 2 else 0 for peer in range(RANKS)]
        x = of_rank(rank, sum(sent), torch.float32)
        out, work = start_all_to_all(x, received, sent, name)
        assert work is not None
        work.wait()
        expected = []
        for peer, count in enumerate(received):
            start = sum(10 * peer + other for other in range(rank) if other != 2)
            length = sum(10 * peer + other for other in range(RANKS) if other != 2)
            expected.append(of_rank(peer, length, torch.float32)[start : start + count])
        assert torch.equal(out, torch.cat(expected)) and torch.equal(
            all_to_all(x, received, sent, name), out
        )

    run_ranks(RANKS, check)


def test_the_gradient_of_a_sum_is_summed(run_ranks):
    def check():
        assert dist.group.WORLD is not None
        x = torch.full((2,), float(dist.get_rank()), requires_grad=True)
        (all_reduce(x, register_group(dist.group.WORLD)) * (dist.get_rank() + 1)).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [10.0, 10.0]

    run_ranks(RANKS, check)
