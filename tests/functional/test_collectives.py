"""Collectives of host tensors against what they must give, computed from every rank's seed."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.parallelism import Degrees
from titanlite.distributed import ParallelDims, collectives
from titanlite.distributed.collectives import (
    all_gather_single,
    all_reduce_sum,
    all_to_all_single,
    forget_groups,
    reduce_scatter_single,
    sum_pieces,
)
from titanlite.ops import kernels

RANKS = 4
LENGTH = 100_000  # of 3 elements: one rank's piece fits in a region of shared memory, that of four does not
_own = torch.ops.titanlite


class Called(TorchDispatchMode):
    """`with Called() as called`: `called.operators` are those that ran inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def of_rank(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)


def on_one_machine_and_on_two() -> Iterator[str]:
    """This rank's machine, as torchrun says it to all ranks."""
    for machine in ("0", str(dist.get_rank() // 2)):
        os.environ["GROUP_RANK"] = machine  # of this process, which ends with the test
        forget_groups()
        yield machine


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
        with Called() as called:
            assert all_gather_single(gathered, piece, group=group) is None
        assert _own.host_all_gather.default in called.operators
        assert torch.equal(gathered, expected)
        assert all_gather_single(gathered.zero_(), of_rank(dist.get_rank(), LENGTH, dtype), group=group) is None
        assert torch.equal(gathered, expected)

        wholes = torch.stack([of_rank(rank, len(members) * LENGTH, dtype) for rank in members])
        reduced = torch.full((LENGTH, 3), float("nan"), dtype=dtype)
        with Called() as called:
            assert reduce_scatter_single(reduced, wholes[place], group=group) is None
        assert _own.host_reduce_scatter.default in called.operators
        pieces = wholes[:, place * LENGTH : (place + 1) * LENGTH].double()
        # Three additions in float32, each off by half a unit of a sum that is no larger than that of the magnitudes,
        # and for bfloat16 one rounding of the result.
        bound = 1.5 * torch.finfo(torch.float32).eps * pieces.abs().sum(0)
        if dtype == torch.bfloat16:
            bound += 0.5 * torch.finfo(dtype).eps * pieces.sum(0).abs()
        assert ((reduced.double() - pieces.sum(0)).abs() <= bound).all()

    run_ranks(RANKS, check)


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(dp_shard=4, ep=4),
        Degrees(dp_shard=4, ep=2),
        Degrees(dp_shard=2, tp=2, ep=2),
        Degrees(dp_replicate=2, dp_shard=2, ep=2),
        Degrees(tp=2, ep=2, cp=2),
    ],
    ids=["ep4", "ep2", "tp2-ep2", "hsdp-ep2", "cp2-tp2-ep2"],
)
def test_the_groups_of_all_axes_share_memory(run_ranks, degrees):
    """Also those that have a backend for each type of device."""

    def check() -> None:
        dims = ParallelDims.build(degrees, "cpu")
        assert dims.sparse is not None
        groups = [group for mesh in (dims.dense, dims.sparse) for group in mesh.get_all_groups()]
        groups += [] if dims.cp_group is None else [dims.cp_group]
        several = [group for group in groups if group.size() > 1]
        assert len(several) >= 2
        for group in several:
            size, place = group.size(), group.rank()
            mine, all_equal = torch.full((size,), float(place)), [1] * size
            gathered, reduced, exchanged = torch.zeros(size * size), torch.zeros(1), torch.zeros(size)
            all_gather_single(gathered, mine, group=group)
            reduce_scatter_single(reduced, mine, group=group)
            all_to_all_single(exchanged, mine, all_equal, all_equal, group=group)
            ranks = torch.arange(float(size))
            assert torch.equal(gathered, ranks.repeat_interleave(size)) and torch.equal(exchanged, ranks)
            all_reduce_sum(mine, group=group)
            assert reduced.item() == ranks.sum() and torch.equal(mine, ranks.sum().expand(size))
            assert collectives._transports[group] is not None

    run_ranks(RANKS, check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32])
def test_sums_of_any_size_have_the_same_bits_on_one_machine_and_on_two(run_ranks, dtype):
    def check() -> None:
        rank = dist.get_rank()
        for machine in on_one_machine_and_on_two():
            for shape in ((), (0, 3), (7,), (2, 8, 16), (9999, 3), (LENGTH, 3)):
                parts = [
                    (torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 100).to(dtype)
                    for rank in range(RANKS)
                ]
                x, expected = parts[rank].clone(), torch.empty_like(parts[0])
                all_reduce_sum(x)
                sum_pieces(expected, torch.stack(parts))
                assert torch.equal(x, expected), (machine, shape)

    run_ranks(RANKS, check)


def test_what_is_left_to_torch(run_ranks):
    """Another reduction, a collective in the background, a dtype that differs, which is an error there."""

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
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            all_gather_single(torch.zeros(4 * LENGTH), torch.zeros(LENGTH, dtype=torch.int32), group=group)

    run_ranks(RANKS, check)


def test_without_a_transport_gloo_takes_over(run_ranks, monkeypatch):
    def check() -> None:
        monkeypatch.setattr(kernels, "_kernels", {})
        x = of_rank(dist.get_rank(), LENGTH, torch.float32)
        gathered, exchanged, few = torch.zeros(2 * LENGTH, 3), torch.zeros_like(x), x[:9].clone()
        assert dist.group.WORLD is not None
        all_gather_single(gathered, x, group=dist.group.WORLD)
        all_to_all_single(exchanged, x, [LENGTH // 2] * 2, [LENGTH // 2] * 2, group=dist.group.WORLD)
        all_reduce_sum(few)
        all_reduce_sum(x)
        assert collectives._transports == {dist.group.WORLD: None}
        whole = gathered.view(2, LENGTH, 3)
        assert torch.equal(x, whole[0] + whole[1]) and torch.equal(few, x[:9])
        assert torch.equal(exchanged, whole.chunk(2, dim=1)[dist.get_rank()].flatten(0, 1))

    run_ranks(2, check)


def test_between_machines_gloo_takes_over_and_sums_keep_their_bits(run_ranks):
    def check() -> None:
        group = dist.group.WORLD
        assert group is not None
        rank, length = dist.get_rank(), RANKS * LENGTH
        x = of_rank(rank, length, torch.float32)
        splits = [LENGTH * 4 // 10 * (peer + 1) for peer in range(RANKS)]
        results = []
        for machine in on_one_machine_and_on_two():
            gathered, reduced, summed = torch.zeros(RANKS * length, 3), torch.zeros(LENGTH, 3), x.clone()
            exchanged = torch.zeros(RANKS * splits[rank], 3)
            all_gather_single(gathered, x, group=group)
            reduce_scatter_single(reduced, x, group=group)
            all_to_all_single(exchanged, x, [splits[rank]] * RANKS, splits, group=group)
            all_reduce_sum(summed)
            assert (collectives._transports[group] is None) == (machine == str(rank // 2) and results != [])
            results.append((gathered, reduced, exchanged, summed))
        assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
        wholes = [of_rank(rank, length, torch.float32) for rank in range(RANKS)]
        assert torch.equal(results[0][0], torch.cat(wholes))
        assert torch.equal(results[0][3], wholes[0] + wholes[1] + wholes[2] + wholes[3])
        start = sum(splits[:rank])
        assert torch.equal(results[0][2], torch.cat([whole[start : start + splits[rank]] for whole in wholes]))

    run_ranks(RANKS, check)
