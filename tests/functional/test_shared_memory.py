"""Exchange through memory that ranks share: any sizes in any order; errors name the rank, and nothing hangs."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titanlite.distributed.collectives import sum_pieces
from titanlite.features.cpu import shared_memory
from titanlite.features.cpu.shared_memory import SharedMemory, open_shared_memory

RANKS = 4
SMALL = 1 << 10  # bytes of a region: most exchanges take several rounds


def open_world(timeout_s: float = 60.0, region_bytes: int = SMALL) -> SharedMemory:
    assert dist.group.WORLD is not None
    memory = open_shared_memory(dist.group.WORLD, timeout_s, region_bytes)
    assert memory is not None
    return memory


def of_rank(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What `rank` sends in collective `number`; every rank can tell."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("region_bytes", [64, SMALL, 1 << 20])
def test_any_collectives_in_any_order(run_ranks, region_bytes):
    def check() -> None:
        memory, rank, draw = open_world(region_bytes=region_bytes), dist.get_rank(), random.Random(0)
        for number in range(150):
            dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64, torch.float64])
            width, kind = draw.choice([1, 3, 16]), draw.choice(list(shared_memory._KINDS))
            if kind == "all_to_all":
                splits = [[draw.choice([0, 0, 1, 5, 90]) for _ in range(RANKS)] for _ in range(RANKS)]
                sent = [of_rank(r, number, (sum(splits[r]), width), dtype) for r in range(RANKS)]
                received = [splits[r][rank] for r in range(RANKS)]
                out = torch.full((sum(received), width), -1).to(dtype)
                memory.all_to_all(out, sent[rank], received, splits[rank])
                expected = torch.cat([sent[r].split(splits[r])[rank] for r in range(RANKS)])
            elif kind == "all_reduce":
                length = draw.choice([0, 1, 7, 200])
                sent = torch.stack([of_rank(r, number, (length, width), dtype) for r in range(RANKS)])
                out, expected = sent[rank].clone(), torch.empty_like(sent[0])
                memory.all_reduce(out)
                sum_pieces(expected, sent)
            else:
                length = draw.choice([0, 1, 7, 200])
                whole = kind == "reduce_scatter"
                shape = (length * (RANKS if whole else 1), width)
                sent = [of_rank(r, number, shape, dtype) for r in range(RANKS)]
                out = torch.full((length if whole else length * RANKS, width), -1).to(dtype)
                getattr(memory, kind)(out, sent[rank])
                if whole:
                    expected = torch.empty_like(out)
                    sum_pieces(expected, torch.stack(sent)[:, rank * length : (rank + 1) * length])
                else:
                    expected = torch.cat(sent)
            assert torch.equal(out, expected), (number, kind, dtype)

    run_ranks(RANKS, check)


def test_groups_of_some_ranks_do_not_meet(run_ranks):
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for place, name in enumerate(("outer", "inner")):
            group = mesh[name].get_group()
            memory = open_shared_memory(group)
            assert memory is not None
            out = torch.zeros(2)
            for _ in range(1 + 5 * mesh.get_coordinate()[1 - place]):  # the two groups of an axis take their own time
                memory.all_gather(out, torch.tensor([float(dist.get_rank())]))
            assert out.tolist() == dist.get_process_group_ranks(group)

    run_ranks(RANKS, check)


def test_a_group_of_one_shares_nothing(run_ranks):
    def check() -> None:
        assert dist.group.WORLD is not None
        assert open_shared_memory(dist.group.WORLD) is None

    run_ranks(1, check)


def test_ranks_of_two_machines_share_nothing(run_ranks, monkeypatch):
    def check() -> None:
        monkeypatch.setenv("GROUP_RANK", str(dist.get_rank() // 2))
        assert dist.group.WORLD is not None
        assert open_shared_memory(dist.group.WORLD) is None
        pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "rank"))["rank"].get_group()
        assert open_shared_memory(pair) is not None

    run_ranks(RANKS, check)


@pytest.mark.parametrize("what", ["forbidden", "unknown machine"])
def test_where_one_rank_has_no_such_memory_none_takes_it(run_ranks, monkeypatch, what):
    def forbid(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    def check() -> None:
        if dist.get_rank() == 2 and what == "forbidden":
            monkeypatch.setattr(os, "memfd_create", forbid)
        elif dist.get_rank() == 2:
            monkeypatch.setattr(shared_memory, "_machine", lambda: forbid(""))
        assert dist.group.WORLD is not None
        assert open_shared_memory(dist.group.WORLD) is None

    run_ranks(RANKS, check)


def test_nothing_is_left_open(run_ranks):
    """Descriptors of the setup are closed; a group that is let go of has none left, and one that never was neither."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def check() -> None:
        before = count()
        memory = open_world()
        assert count() == before + RANKS  # a socket per peer, and the one that mmap keeps of the memory
        memory.close()
        del memory
        assert count() == before
        os.environ["GROUP_RANK"] = str(dist.get_rank())
        assert dist.group.WORLD is not None
        assert open_shared_memory(dist.group.WORLD) is None
        assert count() == before

    run_ranks(RANKS, check)


def test_the_sum_is_in_order_and_rounded_once():
    pieces = torch.tensor([[1.0], [2**-8], [2**-8], [2**-8]], dtype=torch.bfloat16)
    out = torch.zeros(1, dtype=torch.bfloat16)
    sum_pieces(out, pieces)
    assert out.item() == 1 + 2**-6  # 1 + 3 / 256; with a rounding after every addition it would stay 1
    large = torch.tensor([[1e8], [1.0], [-1e8]])
    total = torch.zeros(1)
    sum_pieces(total, large)
    assert total.item() == 0.0  # (1e8 + 1) - 1e8 in float32, not 1e8 + (1 - 1e8)


def test_where_ranks_do_not_find_one_another_none_shares(run_ranks, monkeypatch):
    """One rank cannot map the memory: all learn it before anybody uses theirs."""

    def fail(*args: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    def check() -> None:
        if dist.get_rank() == 1:
            monkeypatch.setattr(shared_memory, "_share", fail)
        monkeypatch.setattr(shared_memory, "_SETUP_TIMEOUT_S", 5.0)
        assert dist.group.WORLD is not None
        assert open_shared_memory(dist.group.WORLD) is None

    run_ranks(RANKS, check)


def test_splits_that_are_not_those_of_the_tensors_are_refused(run_ranks):
    def check() -> None:
        memory, x, even = open_world(), torch.zeros(RANKS, 3), [1] * RANKS
        for rows, into in ((x[1:], x), (x, x[1:])):
            with pytest.raises(ValueError, match=r"\[1, 1, 1, 1\] of \d rows to send, \[1, 1, 1, 1\] of \d to receive"):
                memory.all_to_all(into, rows, even, even)

    run_ranks(RANKS, check)


def test_one_rank_that_fails_is_not_waited_for(run_ranks):
    """Only rank 1 sees that rank 2 sends too much to it. It hangs up, and the others need not wait for their limit."""

    def check() -> str:
        memory, rank = open_world(), dist.get_rank()
        splits = [[1] * RANKS for _ in range(RANKS)]
        splits[2][1] = 2  # and rank 1 expects 1
        start = time.monotonic()
        with pytest.raises(dist.DistNetworkError) as raised:
            for _ in range(2):
                memory.all_to_all(torch.zeros(RANKS), torch.zeros(sum(splits[rank])), [1] * RANKS, splits[rank])
        assert time.monotonic() - start < 30
        dist.barrier()
        return str(raised.value)

    texts = run_ranks(RANKS, check)
    assert "rank 2 sent more rows than the 1 that were announced" in texts[1]
    assert all("rank 1 ended, failed, or left the group" in texts[rank] for rank in (0, 2, 3)), texts


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        (
            torch.zeros(3),
            torch.zeros(5),
            "rank 1 is in all_gather of 5 float32 (round 1), this rank in ",
        ),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32), "rank 1 is in all_gather of 3 int32 (round 1)"),
    ],
    ids=["sizes", "dtypes"],
)
def test_what_does_not_fit_together_is_refused(run_ranks, mine, theirs, text):
    def check() -> str:
        memory, x = open_world(), mine if dist.get_rank() == 0 else theirs
        with pytest.raises(dist.DistNetworkError) as raised:
            for _ in range(2):
                memory.all_gather(torch.zeros(2 * x.numel(), dtype=x.dtype), x)
        dist.barrier()
        return str(raised.value)

    assert text in run_ranks(2, check)[0]


@pytest.mark.parametrize("how", ["ends", "is late", "differs", "sends more", "sends fewer"])
def test_what_goes_wrong_is_said_by_all_others(run_ranks, how):
    """Rank 2 errs; every other rank gets an error that names it, soon."""
    timeout_s = 2.0 if how == "is late" else 60.0

    def check() -> str:
        memory, rank = open_world(timeout_s), dist.get_rank()
        out, x, even = torch.zeros(RANKS, 3), torch.zeros(RANKS, 3), [1] * RANKS
        memory.all_to_all(out, x, even, even)
        start = time.monotonic()
        if rank == 2:
            if how == "ends":
                memory.close()
            elif how == "differs":
                with pytest.raises(dist.DistNetworkError):
                    memory.all_gather(torch.zeros(4 * RANKS), torch.zeros(4))
            elif how in ("sends more", "sends fewer"):
                rows = 2 if how == "sends more" else 0
                memory.all_to_all(out, torch.zeros(rows * RANKS + (1 - rows), 3), even, [rows, rows, 1, rows])
            dist.barrier()
            return ""
        with pytest.raises(dist.DistNetworkError) as raised:
            memory.all_to_all(out, x, even, even)
        assert time.monotonic() - start < 30
        dist.barrier()
        return str(raised.value)

    expected = {
        "ends": ("ended, failed, or left the group, before all_to_all", "has hung up"),
        "is late": ("did not come to all_to_all within the time limit",),
        "differs": ("is in all_gather of 4 float32 (round 2), this rank in all_to_all of float32 (round 2)",),
        "sends more": ("sent more rows than the 1 that were announced",),
        "sends fewer": ("sent fewer rows than the 1 that were announced",),
    }[how]
    for rank, text in enumerate(run_ranks(RANKS, check)):
        if rank != 2:
            assert text.startswith("shared memory of ranks [0, 1, 2, 3]: rank 2 "), text
            assert any(part in text for part in expected), text
