"""Reading parts of safetensors files: only the requested bytes are read, once each, even if the
system returns short reads.
"""

import itertools
import os
import random
import threading
import time

import pytest
import torch
from files import error_of, first_bytes
from safetensors.torch import save_file
from tensors import bits, everything, random_tensor

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint import pieces
from titanlite.checkpoint.folder import DTYPES, read_header
from titanlite.checkpoint.reader import Placed, SafetensorsReader
from titanlite.materialize import ReadRequest, Region

MIB = 1 << 20


def write_files(folder, *files):
    paths = [folder / f"{i}.safetensors" for i in range(len(files))]
    for path, tensors in zip(paths, files, strict=True):
        save_file(tensors, path)
    return paths


def open_reader(paths, threads=0):
    """Open a reader that has every stored tensor under its own key."""
    stored = {key: tensor for path in paths for key, tensor in read_header(path).items()}
    placed = {
        key: [Placed(tensor, pieces.whole(key, tensor.shape))] for key, tensor in stored.items()
    }
    return SafetensorsReader("here", placed, threads), stored


def empty(shape, dtype):
    """Return a destination in which an unwritten byte shows."""
    tensor = torch.empty(shape, dtype=dtype)
    bits(tensor).fill_(0 if dtype == torch.bool else 0x5A)
    return tensor


class Calls:
    """`os.preadv`, which records each call as (descriptor, first byte, end, number of buffers)."""

    def __init__(self, monkeypatch, most_bytes=None):
        self.made, self._original, self._lock = [], os.preadv, threading.Lock()
        self._most_bytes = most_bytes
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor, buffers, offset, *flags):
        given = buffers
        if self._most_bytes is not None:
            given = first_bytes(buffers, self._most_bytes())
        count = self._original(descriptor, given, offset, *flags)
        with self._lock:
            self.made.append((descriptor, offset, offset + count, len(buffers)))
        return count

    @property
    def nbytes(self):
        return sum(end - start for _, start, end, _ in self.made)

    def assert_disjoint(self):
        ordered = sorted(self.made)
        for (descriptor, _, end, _), (next_descriptor, start, _, _) in itertools.pairwise(ordered):
            assert descriptor != next_descriptor or end <= start, "bytes were read twice"


def random_region(shape, rng):
    starts = [rng.randint(0, size) for size in shape]
    return Region(
        tuple(starts), tuple(rng.randint(0, n - s) for n, s in zip(shape, starts, strict=True))
    )


SHAPES = [(), (1,), (17,), (0, 5), (6, 7), (300, 11), (5, 1, 9), (4, 6, 10), (2, 3, 4, 5)]


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("cast", [False, True], ids=["direct", "staged"])
def test_random_regions_of_every_dtype(tmp_path, cast, threads, monkeypatch):
    rng = random.Random(threads)
    files = [{}, {}, {}]
    for i, dtype in enumerate(DTYPES.values()):
        for j, shape in enumerate(SHAPES):
            rng.choice(files)[f"{i}.{j}"] = random_tensor(shape, dtype, seed=100 * i + j)
    tensors = files[0] | files[1] | files[2]
    reader, _ = open_reader(write_files(tmp_path, *files), threads)
    requests = []
    for key, tensor in tensors.items():
        to = (
            rng.choice([torch.float32, torch.bfloat16, torch.int32, torch.float64])
            if cast
            else tensor.dtype
        )
        regions = [everything(tensor.shape), *(random_region(tensor.shape, rng) for _ in range(3))]
        requests += [ReadRequest(key, region, empty(region.lengths, to)) for region in regions]
    rng.shuffle(requests)
    calls = Calls(monkeypatch)
    reader.read(requests)
    for request in requests:
        expected = tensors[request.name][request.region.slices].to(request.destination.dtype)
        assert torch.equal(bits(request.destination), bits(expected)), request
    assert calls.nbytes == sum(r.region.numel * tensors[r.name].dtype.itemsize for r in requests)


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((5 * MIB + 3,), ((7,), (4 * MIB + 1,))),
        ((3000, 1700), None),
        ((2, 2600, 1000), ((1, 3, 0), (1, 2595, 1000))),
        ((2, 3 * MIB), ((0, 1), (2, 3 * MIB - 2))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["direct", "staged"])
def test_tensors_larger_than_a_block(tmp_path, shape, region, dtype, monkeypatch):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    reader, _ = open_reader(write_files(tmp_path, {"w": tensor}), 8)
    region = everything(shape) if region is None else Region(*region)
    shard = empty(region.lengths, dtype)
    calls = Calls(monkeypatch)
    reader.read([ReadRequest("w", region, shard)])
    assert torch.equal(shard, tensor[region.slices].to(dtype))
    assert calls.nbytes == 4 * region.numel
    calls.assert_disjoint()
    assert max(end - start for _, start, end, _ in calls.made) <= (
        8 * MIB if dtype == torch.float32 else MIB
    )


def test_stored_tensors_side_by_side_in_one(tmp_path):
    """Neither is contiguous in the shard, although no value is converted."""
    tensors = {"a": random_tensor((6, 8)), "b": random_tensor((6, 5), seed=1)}
    (path,) = write_files(tmp_path, tensors)
    placed = [
        Placed(stored, pieces.Piece(key, stored.shape, Region((0, 8 * (key == "b")), stored.shape)))
        for key, stored in read_header(path).items()
    ]
    region = Region((1, 3), (4, 7))
    shard = empty(region.lengths, torch.float32)
    SafetensorsReader("here", {"w": placed}).read([ReadRequest("w", region, shard)])
    assert torch.equal(shard, torch.cat([*tensors.values()], dim=1)[region.slices])


def test_only_the_files_that_are_needed_are_opened(tmp_path):
    paths = write_files(tmp_path, {"a": torch.ones(4)}, {"b": torch.ones(4, 4)})
    reader, _ = open_reader(paths)
    paths[1].unlink()
    shard = empty((4,), torch.float32)
    reader.read(
        [
            ReadRequest("a", everything((4,)), shard),
            ReadRequest("b", Region((4, 0), (0, 4)), torch.empty(0, 4)),
        ]
    )
    assert shard.tolist() == [1.0] * 4


def test_short_reads_are_continued(tmp_path, monkeypatch):
    rng = random.Random(3)
    tensors = {f"{i}": random_tensor((rng.randint(1, 40), 13), torch.float32, i) for i in range(50)}
    reader, _ = open_reader(write_files(tmp_path, tensors), 4)
    calls = Calls(monkeypatch, most_bytes=lambda: rng.choice([1, 3, 52, 53, 200]))
    for dtype in (torch.float32, torch.float64):
        requests = [
            ReadRequest(key, everything(t.shape), empty(t.shape, dtype))
            for key, t in tensors.items()
        ]
        done = calls.nbytes
        reader.read(requests)
        assert all(torch.equal(r.destination, tensors[r.name].to(dtype)) for r in requests)
        assert calls.nbytes - done == sum(t.nbytes for t in tensors.values())


def test_a_file_that_changed_after_its_header_was_read_is_named(tmp_path):
    paths = write_files(tmp_path, {"a": torch.ones(4)}, {"b": torch.ones(4)})
    reader, stored = open_reader(paths, 1)

    def refusal(*names):
        requests = [
            ReadRequest(
                name, everything(stored[name].shape), empty(stored[name].shape, torch.float32)
            )
            for name in names
        ]
        return error_of(CheckpointError, reader.read, requests), requests

    size = paths[1].stat().st_size
    for change in (-1, 1):
        os.truncate(paths[1], size + change)
        text, requests = refusal("a", "b")
        words = (
            f"checkpoint {paths[1]}: has {size + change} bytes, but had {size} when its header was "
            "read."
        )
        assert text.startswith(words) and all(
            bits(request.destination).eq(0x5A).all() for request in requests
        )
    paths[1].unlink()
    assert refusal("b")[0] == f"checkpoint {paths[1]}: cannot be opened: No such file or directory."


@pytest.mark.parametrize(
    ("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 8)], ids=["direct", "staged"]
)
def test_an_error_in_one_thread_ends_all(tmp_path, dtype, threads, monkeypatch):
    (path,) = write_files(tmp_path, {"a": torch.ones(10, 2 * MIB)})  # 80 MiB: 80 jobs
    reader, _ = open_reader([path], threads)
    made, original, running = [], os.preadv, threading.active_count()

    def fail_once(*args):
        made.append(args)
        if len(made) == 2:
            raise OSError(5, "Input/output error")
        if len(made) > 2:
            time.sleep(0.02)  # gives threads time to see the error
        return original(*args)

    monkeypatch.setattr(os, "preadv", fail_once)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        CheckpointError,
        match=f"checkpoint {path}: cannot be read at byte [0-9]+: Input/output error.",
    ):
        reader.read(
            [ReadRequest("a", everything((10, 2 * MIB)), torch.empty(10, 2 * MIB, dtype=dtype))]
        )
    assert threading.active_count() == running
    assert len(os.listdir("/proc/self/fd")) == descriptors
    if threads == 1:
        assert len(made) < 20  # of 80 jobs; most were never started
