"""Writes of shards into safetensors files: every rank writes its own bytes, at their final offsets.

Headers follow from names, shapes and dtypes, so every rank knows the layout of every file without
communication. Nothing is gathered. A shard that must be cast, or is on a GPU, is copied a MiB at a
time.
"""

import os
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from titanlite.base.agree import get_rank_and_size
from titanlite.checkpoint.folder import encode_header
from titanlite.checkpoint.pieces import Piece, bytes_of, whole
from titanlite.checkpoint.reader import (
    DIRECT_BYTES,
    JOB_BYTES,
    run_jobs,
)
from titanlite.materialize import Region, assign_owners, local_of, region_of
from titanlite.materialize.digest import bytes_in, digest
from titanlite.materialize.execute import timed

FILE_BYTES = 4 * 1024**3
_ADLER_BASE = 65521
# The sums of a file's Adler-32: of its bytes, and of its bytes times their distances from the end.
_ADLER_SUMS = ("bytes", "places")
_Identity = tuple[int, torch.dtype, torch.Size]
_Copies = dict[_Identity, torch.Tensor]


class Item(NamedTuple):
    """A piece of a tensor to save in `dtype`, and this rank's shard of the run-time tensor. Items
    of one key follow one another, in the order of their rows.

    If the tensor is not in memory, `local` is on meta, and `read` returns a part of the piece's
    region in `dtype`. The rank that writes it reads consecutive parts, from several threads.
    """

    piece: Piece
    dtype: torch.dtype
    # this rank's shard of the run-time tensor, not a DTensor, on any device; a write casts it
    local: torch.Tensor
    local_region: Region
    is_owner: bool  # True if this rank writes the shard, of all ranks that hold it
    name: str = ""  # name of the run-time tensor, if it belongs to the model
    read: Callable[[Region], torch.Tensor] | None = None
    offset: int = 0  # of its stored tensor in the data of the file that `lay_out` chose

    @property
    def key(self) -> str:
        return self.piece.key

    @property
    def nbytes(self) -> int:
        return self.piece.region.numel * self.dtype.itemsize


class FileLayout(NamedTuple):
    """One file: its header, and the items in it."""

    name: str
    header: bytes
    items: tuple[Item, ...]
    nbytes: int

    @property
    def is_of_model(self) -> bool:
        """Return True for a file of the Hugging Face model, next to its config.json."""
        return "/" not in self.name


def lay_out(items: Iterable[Item], stem: str, file_bytes: int | None = None) -> list[FileLayout]:
    """Put `items` one after another into `stem`.safetensors, or into numbered files of up to
    `file_bytes` (4 GiB).
    """
    limit = FILE_BYTES if file_bytes is None else file_bytes
    groups: list[list[Item]] = [[]]
    used = 0
    for _, same_key in groupby(items, key=lambda item: item.key):
        pieces = list(same_key)
        nbytes = sum(item.nbytes for item in pieces)
        if groups[-1] and used + nbytes > limit:
            groups.append([])
            used = 0
        groups[-1] += [item._replace(offset=used) for item in pieces]
        used += nbytes
    files = []
    for i, held in enumerate(groups):
        header = encode_header(
            (item.key, item.dtype, item.piece.shape, item.offset) for item in held
        )
        nbytes = len(header) + sum(item.nbytes for item in held)
        number = f"-{i + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        files.append(FileLayout(f"{stem}{number}.safetensors", header, tuple(held), nbytes))
    return files


def lay_out_tensors(
    tensors: Sequence[tuple[str, torch.Tensor]], stem: str, group: dist.ProcessGroup | None
) -> list[FileLayout]:
    """Put whole `tensors`, given with their keys, into files as `lay_out` does; no files if there
    are none. `group` is as in `assign_owners`.
    """
    owners = assign_owners((tensor for _, tensor in tensors), group)
    items = [
        Item(
            whole(key, tuple(tensor.shape)),
            tensor.dtype,
            local_of(tensor),
            region_of(tensor),
            owner.is_owner,
        )
        for (key, tensor), owner in zip(tensors, owners, strict=True)
    ]
    return lay_out(items, stem) if items else []


def create_files(folder: Path, files: Iterable[FileLayout]) -> None:
    """Create the files at full size, with their headers."""
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as handle:
            handle.write(file.header)
            handle.truncate(file.nbytes)


def write_items(
    folder: Path, files: Sequence[FileLayout], text: str, digested: Iterable[str] = ()
) -> dict[Hashable, int]:
    """Write this rank's items in place and flush them to the disk; return this rank's summands of
    each file's `checksum`, and of the digests of the items with keys in `digested`.

    `text` begins the log line. The summands have the same keys on all ranks, in the same order.
    """
    of_files = [(file.name, which) for file in files for which in _ADLER_SUMS]
    sums: Counter[Hashable] = Counter(dict.fromkeys([*digested, *of_files], 0))
    rank, world_size = get_rank_and_size()
    first = rank * len(files) // world_size
    with timed(text, sum(file.nbytes for file in files)):
        for file in [*files[first:], *files[:first]]:  # ranks begin with different files
            parts = [(item, box) for item in file.items if item.is_owner for box in _boxes(item)]
            if not parts:
                continue
            # Not O_RDWR: NFS would read the rest of a page and write it back, over bytes that
            # another machine wrote there.
            descriptor = os.open(folder / file.name, os.O_WRONLY)
            try:
                jobs = (
                    partial(_write, descriptor, file, item, box, item.key in sums)
                    for item, box in parts
                )
                for summands in run_jobs(jobs):
                    sums.update(summands)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    return sums


def _boxes(item: Item) -> Iterator[Region]:
    """Yield boxes, one per write, that cover this rank's part of an item."""
    held = item.piece.region.overlap(item.local_region)
    if held is None:
        return
    is_copy = item.local.device.type == "cpu" and item.local.dtype == item.dtype
    elements = (DIRECT_BYTES if is_copy else JOB_BYTES) // item.dtype.itemsize
    yield from item.piece.slabs(held, elements)


@torch.no_grad()
def _write(
    descriptor: int, file: FileLayout, item: Item, box: Region, has_digest: bool
) -> dict[Hashable, int]:
    """Write one part of an item; return its summands, as `write_items` does."""
    if item.read is not None:
        values = item.read(box)
    else:  # cast on the shard's device
        values = item.local[box.within(item.local_region).slices].to(item.dtype).to("cpu")
    if item.piece.is_transposed:
        values = values.mT
    memory = bytes_in(values.contiguous())
    size = item.dtype.itemsize
    sums: Counter[Hashable] = Counter()
    for first, length in item.piece.runs(box):
        run = memory[: length * size]
        memory = memory[length * size :]
        if has_digest:
            sums[item.key] += digest(run, first * size)
        view = bytes_of(run)
        end = len(file.header) + item.offset + first * size + len(view)
        sums.update(_adler_sums(file, view, end))
        while view:
            view = view[os.pwritev(descriptor, [view], end - len(view)) :]
    return sums


def checksum(file: FileLayout, sums: Mapping[Hashable, int]) -> str:
    """Return the Adler-32 of a file in hex, from the sums over all ranks.

    The two sums of Adler-32, of the bytes and of the bytes times their distances from the end, can
    be added up in any order.
    """
    header = _adler_sums(file, memoryview(file.header), len(file.header))
    plain, weighted = (header[key] + sums[key] for key in header)
    first = (1 + plain) % _ADLER_BASE
    second = (file.nbytes + weighted) % _ADLER_BASE
    return f"{second << 16 | first:08x}"


def _adler_sums(file: FileLayout, view: memoryview, end: int) -> dict[Hashable, int]:
    """Return the summands of `view`, a part of `file` that ends before byte `end`."""
    value = zlib.adler32(view, 0)
    plain = value & 0xFFFF
    weighted = (value >> 16) + (file.nbytes - end) * plain
    return {(file.name, "bytes"): plain, (file.name, "places"): weighted % _ADLER_BASE}


def snapshot(
    files: Sequence[FileLayout], reused: Mapping[_Identity, torch.Tensor]
) -> tuple[list[FileLayout], _Copies]:
    """Copy this rank's shards to the host; return `files` with the copies as shards, and the
    copies.

    Pass the copies to the next call as `reused`: allocating and pinning memory takes longer than
    copying.
    """
    copies: _Copies = {}

    def copy(item: Item) -> Item:
        if not item.is_owner or item.local.is_meta:
            return item
        local = item.local
        # `local_of` makes a new tensor object of the same memory each time
        identity = local.data_ptr(), local.dtype, local.shape
        if identity not in copies:
            memory = reused.get(identity)
            if memory is None:
                memory = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            copies[identity] = memory.copy_(local, non_blocking=local.is_cuda)
        return item._replace(local=copies[identity])

    copied = [file._replace(items=tuple(map(copy, file.items))) for file in files]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copied, copies
