"""One replica in charge of each tensor, and what it holds on all of them, on 1 and 4 ranks."""

import collections
import itertools

import pytest
import torch
from tensors import bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.materialize import region_of
from titanlite.materialize.layout import local_of
from titanlite.materialize.replicas import assign_owners, broadcast

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = [None, *itertools.product([R, S0, S1], repeat=2)]  # None: a plain tensor
SHAPES = [(8, 6), (5, 7), (1, 1), (1, 3), (3, 1), (0, 4), (33, 3)]
# 1 to 1000
SIZES = (10 ** (torch.rand(200, generator=torch.Generator().manual_seed(1)) * 3)).int().tolist()
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float64,
]


def numbers(shape, dtype, seed):
    """Return the values of a global tensor, which all ranks compute alike."""
    values = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(seed))
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def sharded(shape, dtype, mesh, placements, fill=0):
    """A DTensor over `mesh` in `torch.chunk` sizes, made without communication; plain if
    `placements` is None.
    """
    lengths = list(shape)
    if placements is None:
        local = torch.empty(shape, dtype=dtype)
    else:
        for placement, size, index in zip(
            placements, mesh.shape, mesh.get_coordinate(), strict=True
        ):
            if isinstance(placement, Shard):
                chunk = -(-lengths[placement.dim] // size)
                begin = min(index * chunk, lengths[placement.dim])
                lengths[placement.dim] = min(chunk, lengths[placement.dim] - begin)
        local = torch.empty(lengths, dtype=dtype)
    bits(local).fill_(fill)
    if placements is None:
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def deliver(tensors, values):
    """Fill the tensors that this rank owns, broadcast, and list the tensors with wrong values."""
    replicas = list(assign_owners(tensors))
    for replica, value in zip(replicas, values, strict=True):
        if replica.is_owner:
            local_of(replica.tensor).copy_(value[region_of(replica.tensor).slices])
    broadcast(replicas)
    return [
        i
        for i, (tensor, value) in enumerate(zip(tensors, values, strict=True))
        if not torch.equal(bits(local_of(tensor)), bits(value[region_of(tensor).slices]))
    ]


# ---- functions of the ranks, which are started only once, because a start costs more than all of
# them ----


def assign_all(mesh):
    tensors = [
        sharded(shape, torch.float32, mesh, placements)
        for shape in SHAPES
        for placements in LAYOUTS
    ]
    replicas = list(assign_owners(tensors))
    assert all(replica.tensor is tensor for replica, tensor in zip(replicas, tensors, strict=True))
    return [
        (replica.is_owner, region_of(replica.tensor), len(replica.hops)) for replica in replicas
    ]


def loads_of_layouts(mesh):
    loads = {}
    for placements in [None, (R, R), (R, S0), (S0, R)]:
        tensors = [sharded((4 * size,), torch.float32, mesh, placements) for size in SIZES]
        loads[placements] = sum(
            local_of(replica.tensor).nbytes
            for replica in assign_owners(tensors)
            if replica.is_owner
        )
    return loads


def deliver_every_layout(mesh):
    cases = [(shape, dtype, where) for shape in SHAPES for where in LAYOUTS for dtype in DTYPES]
    cases += [((), dtype, where) for dtype in DTYPES for where in (None, (R, R))]
    tensors = [
        sharded(shape, dtype, mesh, placements, fill=1) for shape, dtype, placements in cases
    ]
    values = [numbers(shape, dtype, seed) for seed, (shape, dtype, _) in enumerate(cases)]
    return [cases[i] for i in deliver(tensors, values)], len(cases)


def deliver_large_and_small(mesh):
    mib = 1 << 18  # elements of 4 bytes
    # The lengths are above, at and below 4 MiB, and several small ones fill more than one packet.
    lengths = [3, mib * 4, 5, mib * 4 - 1, mib * 4 + 1, *([mib + 7] * 9), 11]
    wrong = []
    for placements in [None, (R, R), (R, S0), (S0, R)]:
        tensors = [sharded((length,), torch.float32, mesh, placements) for length in lengths]
        wrong.append(
            deliver(tensors, [torch.arange(length, dtype=torch.float32) for length in lengths])
        )
    return wrong


WORK = (
    assign_all,
    loads_of_layouts,
    deliver_every_layout,
    deliver_large_and_small,
)


@pytest.fixture(scope="module")
def ranks(run_ranks):
    """The results of the functions above on each of 4 ranks, as a list by rank."""

    def rank_main():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        return {work: work(mesh) for work in WORK}

    results = run_ranks(4, rank_main)
    return {work: [result[work] for result in results] for work in WORK}


# ---- expected results ----


def test_one_process_is_in_charge_of_everything():
    tensors = [torch.zeros(3), torch.zeros(()), torch.zeros(0)]
    replicas = list(assign_owners(tensors))
    assert all(replica.is_owner and replica.hops == () for replica in replicas)
    assert all(replica.tensor is tensor for replica, tensor in zip(replicas, tensors, strict=True))
    broadcast(replicas)


def test_one_rank_of_every_replica_set_is_in_charge(ranks):
    cases = itertools.product(SHAPES, LAYOUTS)
    for (shape, placements), column in zip(
        cases, zip(*ranks[assign_all], strict=True), strict=True
    ):
        in_charge = collections.defaultdict(list)
        for is_owner, region, num_hops in column:
            in_charge[region].append(is_owner)
            assert num_hops == (1 if placements is None else placements.count(R)), placements
        for region, is_owner in in_charge.items():
            if region.numel:  # empty regions are equal even on unrelated ranks
                assert sum(is_owner) == 1, (shape, placements, region)


def test_ranks_get_about_equally_many_bytes(ranks):
    total, largest = sum(SIZES) * 16, max(SIZES) * 16
    for placements in ranks[loads_of_layouts][0]:
        loads = [of_rank[placements] for of_rank in ranks[loads_of_layouts]]
        assert sum(loads) == total  # every byte once
        assert max(loads) - min(loads) <= largest, placements


def test_broadcast_delivers_on_every_layout_with_mixed_dtypes_and_odd_sizes(ranks):
    for wrong, num_cases in ranks[deliver_every_layout]:
        assert wrong == []
        assert num_cases == len(SHAPES) * len(LAYOUTS) * len(DTYPES) + 2 * len(DTYPES)


def test_broadcast_of_large_and_small_tensors_together(ranks):
    assert ranks[deliver_large_and_small] == [[[]] * 4] * 4
