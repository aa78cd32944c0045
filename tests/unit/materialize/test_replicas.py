"""One replica in charge of each tensor, and what it holds on all of them, on 1 and 4 ranks."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.materialize import region_of
from titanlite.materialize.layout import local_of
from titanlite.materialize.replicas import broadcast, share_out

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ALL_PLACEMENTS = list(itertools.product([R, S0, S1], repeat=2))
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float64]


def numbers(shape, dtype, seed):
    """The values that all ranks agree a global tensor has."""
    values = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(seed))
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def sharded(shape, dtype, mesh, placements, fill=0):
    """A DTensor over `mesh` in `torch.chunk` sizes, made without communication; a plain tensor if `mesh` is None."""
    lengths = list(shape)
    if mesh is None:
        local = torch.empty(shape, dtype=dtype)
    else:
        for placement, size, index in zip(placements, mesh.shape, mesh.get_coordinate(), strict=True):
            if isinstance(placement, Shard):
                chunk = -(-lengths[placement.dim] // size)
                begin = min(index * chunk, lengths[placement.dim])
                lengths[placement.dim] = min(chunk, lengths[placement.dim] - begin)
        local = torch.empty(lengths, dtype=dtype)
    bits(local).fill_(fill)
    if mesh is None:
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def test_one_process_is_in_charge_of_everything():
    tensors = [torch.zeros(3), torch.zeros(()), torch.zeros(0)]
    shares = list(share_out(tensors))
    assert all(share.mine and share.hops == () for share in shares)
    assert all(share.tensor is tensor for share, tensor in zip(shares, tensors, strict=True))
    broadcast(shares)


def test_one_rank_of_every_replica_set_is_in_charge(run_ranks):
    shapes = [(8, 6), (5, 7), (1, 1), (3, 1), (0, 4), (64, 64)]

    def rank_main():
        mesh = mesh_2x2()
        placed = [(None, None), *((mesh, placements) for placements in ALL_PLACEMENTS)]
        tensors = [sharded(shape, torch.float32, *where) for shape in shapes for where in placed]
        shares = list(share_out(tensors))
        assert [share.tensor is tensor for share, tensor in zip(shares, tensors, strict=True)]
        return [(share.mine, region_of(share.tensor), len(share.hops)) for share in shares]

    ranks = run_ranks(4, rank_main)
    placed = [(R, R), *ALL_PLACEMENTS]
    for i, column in enumerate(zip(*ranks, strict=True)):
        placements = placed[i % len(placed)]
        holders = {}
        if shapes[i // len(placed)] == (0, 4):
            continue  # all regions are empty, and alike
        for mine, region, num_hops in column:
            holders.setdefault(region, []).append(mine)
            expected = 1 if i % len(placed) == 0 else placements.count(R)  # plain: one broadcast to all
            assert num_hops == expected
        for region, in_charge in holders.items():
            if region.numel:
                assert sum(in_charge) == 1, (placements, region)


def test_ranks_get_about_equally_many_bytes(run_ranks):
    generator = torch.Generator().manual_seed(1)
    sizes = (10 ** (torch.rand(200, generator=generator) * 3)).int().tolist()

    def rank_main():
        mesh = mesh_2x2()
        loads = []
        for where in [(None, None), (mesh, (R, R)), (mesh, (R, S0)), (mesh, (S0, R))]:
            tensors = [sharded((4 * size,), torch.float32, *where) for size in sizes]
            loads.append(sum(local_of(share.tensor).nbytes for share in share_out(tensors) if share.mine))
        return loads

    largest = max(sizes) * 16
    by_kind = list(zip(*run_ranks(4, rank_main), strict=True))
    for loads in by_kind[:2]:  # held by all four
        assert sum(loads) == sum(sizes) * 16
        assert max(loads) - min(loads) <= largest
    for loads in by_kind[2:]:  # halves, each held by two
        assert sum(loads) == sum(sizes) * 16
        assert max(loads) - min(loads) <= largest / 2


def test_largest_first_or_last_is_balanced_too(run_ranks):
    # Equal tensors go round; a large one keeps its rank out for as long as it takes the others to catch up.
    def rank_main():
        mine = [share.mine for share in share_out([torch.zeros(300), *(torch.zeros(100) for _ in range(9))])]
        return [i for i, is_mine in enumerate(mine) if is_mine]

    assert run_ranks(4, rank_main) == [[0], [1, 4, 7], [2, 5, 8], [3, 6, 9]]


def deliver(tensors, values):
    """Fill what this rank is in charge of, broadcast, and list the tensors that are not what they must be."""
    shares = list(share_out(tensors))
    for share, value in zip(shares, values, strict=True):
        if share.mine:
            local_of(share.tensor).copy_(value[region_of(share.tensor).slices])
    broadcast(shares)
    return [
        i
        for i, (tensor, value) in enumerate(zip(tensors, values, strict=True))
        if not torch.equal(bits(local_of(tensor)), bits(value[region_of(tensor).slices]))
    ]


def test_broadcast_delivers_on_every_layout_with_mixed_dtypes_and_odd_sizes(run_ranks):
    shapes = [(8, 6), (5, 7), (1, 1), (1, 3), (3, 1), (0, 4), (33, 3)]

    def rank_main():
        mesh = mesh_2x2()
        placed = [(None, None), *((mesh, placements) for placements in ALL_PLACEMENTS)]
        cases = [(shape, dtype, where) for shape in shapes for where in placed for dtype in DTYPES]
        cases += [((), dtype, where) for dtype in DTYPES for where in (placed[0], (mesh, (R, R)))]
        tensors = [sharded(shape, dtype, *where, fill=1) for shape, dtype, where in cases]
        values = [numbers(shape, dtype, seed) for seed, (shape, dtype, _) in enumerate(cases)]
        return [cases[i] for i in deliver(tensors, values)], len(cases)

    for wrong, num_cases in run_ranks(4, rank_main):
        assert wrong == []
        assert num_cases == 7 * 10 * 7 + 14


def test_broadcast_of_large_and_small_tensors_together(run_ranks):
    mib = 1 << 18  # elements of 4 bytes
    # Above, at and below 4 MiB; small ones that fill more than one packet; a large one that is not contiguous.
    lengths = [3, mib * 4, 5, mib * 4 - 1, mib * 4 + 1, *([mib + 7] * 9), 11]

    def rank_main():
        mesh = mesh_2x2()
        wrong = []
        for where in [(None, None), (mesh, (R, R)), (mesh, (R, S0)), (mesh, (S0, R))]:
            tensors = [sharded((length,), torch.float32, *where) for length in lengths]
            values = [torch.arange(length, dtype=torch.float32) for length in lengths]
            wrong.append(deliver(tensors, values))
        tensors = [torch.zeros(3000, 1000).T, torch.zeros(20, 30).T, torch.zeros(7)]
        wrong.append(deliver(tensors, [torch.arange(t.numel(), dtype=torch.float32).view(t.shape) for t in tensors]))
        return wrong

    assert run_ranks(4, rank_main) == [[[]] * 5] * 4


def test_small_tensors_travel_together(run_ranks):
    def rank_main():
        calls, original = [], dist.broadcast

        def counted(data, *args, **options):
            calls.append(data.nbytes)
            return original(data, *args, **options)

        dist.broadcast = counted
        assert deliver([torch.zeros(100) for _ in range(400)], [torch.full((100,), float(i)) for i in range(400)]) == []
        return calls

    for calls in run_ranks(4, rank_main):
        assert calls == [40_000] * 4  # one packet from each rank


def test_shards_that_are_empty_on_some_ranks(run_ranks):
    def rank_main():
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
        two = mesh_2x2()
        cases = [((1, 5), mesh, (R, S0)), ((1, 5), two, (R, S0)), ((1, 5), two, (S0, R)), ((5, 1), two, (S1, R))]
        tensors = [sharded(shape, torch.bfloat16, *where) for shape, *where in cases]
        values = [numbers(shape, torch.bfloat16, i) for i, (shape, *_) in enumerate(cases)]
        return deliver(tensors, values), [local_of(tensor).numel() for tensor in tensors]

    results = run_ranks(4, rank_main)
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert [sizes for _, sizes in results] == [[5, 5, 5, 5], [0, 0, 5, 5], [0, 5, 0, 0], [0, 0, 0, 0]]


def test_two_replicated_axes_are_reached_over_both(run_ranks):
    # The one in charge is each of the four in turn, so every chain of two hops is used.
    def rank_main():
        mesh = mesh_2x2()
        tensors = [sharded((9,), torch.float32, mesh, (R, R)) for _ in range(4)]
        shares = list(share_out(tensors))
        values = [torch.arange(9.0) + 100 * i for i in range(4)]
        return [share.mine for share in shares], deliver(tensors, values), [len(share.hops) for share in shares]

    results = run_ranks(4, rank_main)
    assert sorted([mine for mine, _, _ in results], reverse=True) == [
        [i == rank for i in range(4)] for rank in range(4)
    ]
    assert all(wrong == [] and hops == [2] * 4 for _, wrong, hops in results)
