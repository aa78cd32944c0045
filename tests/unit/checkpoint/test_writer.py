"""Writing safetensors files in place: layout, bits, checksums combined from partial ones, on any
number of ranks.
"""

import os
import random
import zlib
from collections import Counter

import pytest
import torch
from files import first_bytes
from safetensors import safe_open
from safetensors.torch import load_file
from tensors import bits, everything, random_tensor

from titanlite.checkpoint import pieces
from titanlite.checkpoint.folder import DTYPES
from titanlite.checkpoint.writer import (
    Item,
    checksum,
    create_files,
    lay_out,
    snapshot,
    write_items,
)
from titanlite.materialize import Region
from titanlite.materialize.digest import MODULUS, bytes_in, digest

MIB = 1 << 20


def item(key, tensor, dtype=None, local_region=None, is_owner=True):
    """Return an item for `tensor` under `key`; this rank holds `local_region` of it, by default all
    of it.
    """
    local_region = everything(tensor.shape) if local_region is None else local_region
    local = tensor[local_region.slices]
    piece = pieces.whole(key, tuple(tensor.shape))
    return Item(piece, dtype or tensor.dtype, local, local_region, is_owner)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def write(folder, *of_ranks, file_bytes=None):
    """Write the items of each rank into the same files; the first rank creates them. Returns their
    names.
    """
    layouts = [lay_out(items, "model", file_bytes) for items in of_ranks]
    described = [[(file.name, file.header, file.nbytes) for file in files] for files in layouts]
    assert all(files == described[0] for files in described), (
        "every rank must come to the same layout"
    )
    create_files(folder, layouts[0])
    sums = Counter()
    for files in layouts:
        sums.update(write_items(folder, files, "writing"))
    for file in layouts[0]:
        assert (folder / file.name).stat().st_size == file.nbytes
        assert checksum(file, sums) == f"{zlib.adler32((folder / file.name).read_bytes()):08x}"
    return [file.name for file in layouts[0]]


def assert_stored(folder, names, tensors, dtype=None):
    """The files hold these tensors, cast to `dtype`, and nothing else."""
    loaded = {key: value for name in names for key, value in load_file(folder / name).items()}
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert same_bits(loaded[key], tensor.to(dtype or tensor.dtype)), key


# ---- layout ----


def test_one_file_has_a_plain_name_and_more_are_numbered():
    items = [item(f"{i}", torch.zeros(10)) for i in range(5)]  # 40 bytes each
    assert [file.name for file in lay_out(items, "model")] == ["model.safetensors"]
    assert [file.name for file in lay_out(items, "titanlite/optimizer", 200)] == [
        "titanlite/optimizer.safetensors"
    ]
    files = lay_out(items, "titanlite/optimizer", 199)
    assert [file.name for file in files] == [
        "titanlite/optimizer-00001-of-00002.safetensors",
        "titanlite/optimizer-00002-of-00002.safetensors",
    ]
    assert [[held.key for held in file.items] for file in files] == [["0", "1", "2", "3"], ["4"]]


def test_tensor_larger_than_a_file_gets_its_own():
    items = [
        item("a", torch.zeros(1)),
        item("b", torch.zeros(100)),
        item("c", torch.zeros(1)),
        item("d", torch.zeros(0)),
    ]
    files = lay_out(items, "model", 8)
    assert [[held.key for held in file.items] for file in files] == [["a"], ["b"], ["c", "d"]]
    assert [len(file.items) for file in lay_out(items[1:], "model", 8)] == [1, 2], "none is empty"


def test_files_are_created_at_full_size_and_never_over_others(tmp_path):
    files = lay_out([item("a", torch.zeros(1000))], "titanlite/weights")
    create_files(tmp_path, files)
    path = tmp_path / "titanlite" / "weights.safetensors"
    assert path.stat().st_size == files[0].nbytes
    assert path.read_bytes() == files[0].header + bytes(4000)
    with pytest.raises(FileExistsError):
        create_files(tmp_path, files)


# ---- one rank ----


def test_all_dtypes_and_shapes_load_with_equal_bits(tmp_path):
    shapes = [(), (1,), (13,), (0, 4), (3, 5), (2, 3, 7)]
    tensors = {
        f"{i}.{j}": random_tensor(shape, dtype, i + 10 * j)
        for i, dtype in enumerate(DTYPES.values())
        for j, shape in enumerate(shapes)
    }
    tensors |= dict.fromkeys(["\u00e9", "a\nb\x1b[31m", '"\\'], torch.ones(1))
    names = write(tmp_path, [item(key, tensor) for key, tensor in tensors.items()], file_bytes=700)
    assert len(names) > 3
    assert_stored(tmp_path, names, tensors)
    with safe_open(tmp_path / names[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it transformers refuses the file


def test_rows_in_another_order_have_the_digest_of_the_stored_tensor(tmp_path):
    tensor = random_tensor((6, 8))
    items = [
        Item(piece, tensor.dtype, tensor, everything(tensor.shape), is_owner=True)
        for piece in pieces.in_rows("w", (6, 8), [(4, 2), (0, 4)])
    ]
    files = lay_out([item("a", tensor), *items], "model")
    create_files(tmp_path, files)
    digests = write_items(tmp_path, files, "writing", ["w"])
    stored = load_file(tmp_path / "model.safetensors")["w"]
    assert torch.equal(stored, tensor[[4, 5, 0, 1, 2, 3]])
    assert digests["w"] % MODULUS == digest(bytes_in(stored))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_casts_large_tensors_and_shards_that_are_not_contiguous(tmp_path, dtype):
    tensors = {
        "large": random_tensor((5 * MIB + 1,)),
        "rows": random_tensor((700, 1300), seed=1),
        "scalar": random_tensor(()),
        "transposed": random_tensor((40, 30)).T,
        "strided": random_tensor((80, 30), seed=1)[::2, 3:17],
        "expanded": random_tensor((1, 9), seed=2).expand(6, 9),
        "large, transposed": random_tensor((1100, 900), seed=3).T,
    }
    assert [tensor.is_contiguous() for tensor in tensors.values()] == [True] * 3 + [False] * 4
    names = write(tmp_path, [item(key, tensor, dtype) for key, tensor in tensors.items()])
    assert_stored(tmp_path, names, tensors, dtype)


# ---- several ranks ----


def on_ranks(tensors, regions_of, dtype=None):
    """Return the items of each rank; if ranks have equal regions, only the first one writes."""
    ranks = []
    for rank in range(len(regions_of(next(iter(tensors.values()))))):
        ranks.append([])
        for key, tensor in tensors.items():
            regions = regions_of(tensor)
            mine = regions.index(regions[rank]) == rank
            ranks[rank].append(item(key, tensor, dtype, regions[rank], mine))
    return ranks


def columns(tensor):
    """Split the tensor unevenly in its last dim over two ranks."""
    cut = (tensor.shape[-1] + 2) // 2
    outer = tensor.shape[:-1]
    zeros = (0,) * len(outer)
    return [
        Region((*zeros, 0), (*outer, cut)),
        Region((*zeros, cut), (*outer, tensor.shape[-1] - cut)),
    ]


def rows(tensor):
    """Split the tensor over three ranks in `torch.chunk` sizes; the last part may be empty."""
    chunk = -(-tensor.shape[0] // 3)
    starts = [min(rank * chunk, tensor.shape[0]) for rank in range(3)]
    rest = tensor.shape[1:]
    zeros = (0,) * len(rest)
    return [Region((s, *zeros), (min(chunk, tensor.shape[0] - s), *rest)) for s in starts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [columns, rows])
def test_ranks_write_their_shards_into_the_same_files(tmp_path, split, dtype):
    tensors = {
        f"{i}": random_tensor(shape, seed=i)
        for i, shape in enumerate([(7, 10), (4, 3), (30, 1, 9), (600, 901)])
    }
    names = write(tmp_path, *on_ranks(tensors, split, dtype), file_bytes=400)
    assert len(names) == 3
    assert_stored(tmp_path, names, tensors, dtype)


def test_of_replicas_one_writes(tmp_path, monkeypatch):
    written, original = [], os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: written.append(original(*args)) or written[-1])
    tensors = {"a": random_tensor((50, 4)), "b": random_tensor((9,), seed=1)}
    names = write(tmp_path, *on_ranks(tensors, lambda tensor: [everything(tensor.shape)] * 3))
    assert sum(written) == 4 * (200 + 9)
    assert_stored(tmp_path, names, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["direct", "staged"])
def test_short_writes_are_continued(tmp_path, dtype, monkeypatch):
    rng, original = random.Random(5), os.pwritev

    def short(descriptor, buffers, offset, *flags):
        given = first_bytes(buffers, rng.choice([1, 2, 7, 64, 500]))
        return original(descriptor, given, offset, *flags)

    monkeypatch.setattr(os, "pwritev", short)
    tensors = {f"{i}": random_tensor((rng.randint(1, 30), 11), seed=i) for i in range(20)}
    names = write(tmp_path, *on_ranks(tensors, columns, dtype))
    assert_stored(tmp_path, names, tensors, dtype)


# ---- copies for background saves ----


def test_snapshot_copies_each_shard_once_and_reuses_memory():
    first, second = random_tensor((3, 5), torch.bfloat16), random_tensor((7, 2), seed=1)
    tensors = {
        "a": first,
        "tied": first,
        "b": second.T,
        "empty": first[:0],
        "none": second[:0],
        "flag": first > 0,
    }
    tensors["scalar"] = torch.tensor(3.0)
    items = [
        *(item(key, tensor) for key, tensor in tensors.items()),
        item("not mine", first + 1, is_owner=False),
    ]
    files = lay_out(items, "model")
    copied, copies = snapshot(files, {})
    assert sum(copy.nbytes for copy in copies.values()) == 30 + 56 + 15 + 4
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    first.zero_(), second.zero_()
    for copy, original in zip(copied[0].items, files[0].items, strict=True):
        assert copy._replace(local=original.local) == original
        assert (
            copy.local is original.local
            if not copy.is_owner
            else same_bits(copy.local, before[copy.key])
        )
    again, kept = snapshot(files, copies)
    assert (
        all(kept[identity] is copy for identity, copy in copies.items())
        and not again[0].items[0].local.any()
    )
    assert len(snapshot(lay_out(items[:2], "model"), copies)[1]) == 1, (
        "memory of shards that are gone is given back"
    )
