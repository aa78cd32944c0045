"""Reads of shards from safetensors files: exactly this rank's bytes, directly into the tensors that
they belong to.

A rank's requests are sorted by file and offset, cut into jobs of a few MiB, and carried out by a
few threads with positioned reads. Where dtype, device and layout allow it, the kernel copies from
the page cache into the shard. Otherwise a job uses a buffer of a MiB, pinned if it goes to a GPU,
and the values are cast.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from titanlite.base.errors import CheckpointError
from titanlite.base.log import logger
from titanlite.base.process import read_ranks_here
from titanlite.base.text import format_size
from titanlite.checkpoint import mxfp4
from titanlite.checkpoint.folder import FP8, Stored, StoredTensor, find_scale
from titanlite.checkpoint.pieces import bytes_of, whole
from titanlite.materialize import ReadRequest, Region, TensorReader
from titanlite.materialize.layout import Encoding, rows_of

JOB_BYTES, DIRECT_BYTES = 1 << 20, 8 << 20  # with a buffer, and without


@dataclass(frozen=True)
class Placed:
    """A stored tensor and the region of the run-time tensor that it holds; `scale` has the scales
    of an FP8 weight, or of an MXFP4 weight, whose codes are uint8.
    """

    stored: StoredTensor
    region: Region
    scale: StoredTensor | None = None
    block: tuple[int, int] = (128, 128)
    row: int = 0  # first row of `stored` in the tensor that `scale` belongs to
    is_transposed: bool = False  # the last two dims of `stored` are those of `region`, swapped

    @property
    def is_packed(self) -> bool:
        """Return True for an MXFP4 weight."""
        return self.scale is not None and self.stored.dtype == torch.uint8

    def box_of(self, box: Region) -> Region:
        """Return `box`, a part of the run-time tensor, in coordinates of `stored`."""
        here = box.within(self.region)
        return here.transposed() if self.is_transposed else here


def place_packed(
    packed: tuple[StoredTensor, StoredTensor], region: Region, *, is_transposed: bool = False
) -> list[Placed]:
    """Return an MXFP4 weight that fills `region`, as a stored tensor of its codes with its
    scales.
    """
    blocks, scales = packed
    *outer, count, size = blocks.shape
    codes = blocks._replace(shape=(*outer, count * size))
    block = (1, mxfp4.BLOCK)
    return [Placed(codes, region, scales, block, is_transposed=is_transposed)]


def place(
    stored: StoredTensor,
    region: Region,
    tensors: Mapping[str, StoredTensor],
    block: tuple[int, int] | None,
    row: int = 0,
    *,
    is_transposed: bool = False,
) -> list[Placed]:
    """Return a stored tensor with its region; in FP8 one entry per matrix, with its scales. Raises
    as `find_scale`. If the region has fewer rows, it is stored from `row` on.
    """
    if is_transposed:
        placed = place(stored, region.transposed(), tensors, block, row)
        return [
            replace(each, region=each.region.transposed(), is_transposed=True) for each in placed
        ]
    part = stored
    if len(region.lengths) == len(stored.shape) and region.lengths[:1] < stored.shape[:1]:
        part = stored.rows(row, region.lengths[0])
    if stored.dtype not in FP8:
        return [Placed(part, region)]
    scale, block = find_scale(stored, tensors, block)
    if len(stored.shape) == 2:
        return [Placed(part, region, scale, block, row)]
    return [
        Placed(
            stored.index(i),
            Region((start, *region.starts[1:]), (1, *region.lengths[1:])),
            scale.index(i),
            block,
        )
        # one entry per expert
        for i, start in enumerate(range(region.starts[0], region.starts[0] + stored.shape[0]))
    ]


@dataclass(frozen=True)
class _Overlap:
    """The overlap `box`, in the run-time tensor's coordinates, of a stored tensor and a request."""

    placed: Placed
    request: ReadRequest
    box: Region

    @property
    def stored(self) -> StoredTensor:
        return self.placed.stored

    @property
    def is_copy(self) -> bool:
        """Return True if the file's bytes are the shard's bytes, in memory on the host."""
        target = self.request.destination
        is_raw = self.placed.scale is None and self.request.encoding is None
        is_raw = is_raw and not self.placed.is_transposed
        return is_raw and target.device.type == "cpu" and target.dtype == self.stored.dtype


class SafetensorsReader:
    """A `TensorReader` over safetensors files; `name` is their folder, for messages.

    `tensors` maps run-time names to the global shape and the stored tensors that it consists of. A
    file is refused if its size differs from `file_bytes`, its size when the header was read.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, tuple[tuple[int, ...], Sequence[Placed]]],
        file_bytes: Mapping[Path, int],
        threads: int = 0,
    ) -> None:
        self.name = name
        self.proves_coverage = True
        self._tensors = tensors
        self._file_bytes = file_bytes
        self._threads = threads or io_threads()

    @classmethod
    def of_keys(cls, name: str, stored: Stored, keys: Iterable[str]) -> "SafetensorsReader":
        """Return a reader of whole stored tensors; their names are their `keys` on disk."""
        placed = {}
        for key in keys:
            tensor = stored.tensors[key]
            region = whole(key, tensor.shape).region
            placed[key] = tensor.shape, place(tensor, region, stored.tensors, stored.block)
        return cls(name, placed, stored.file_bytes)

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Write every requested region into its destination, cast to the destination's dtype.

        Raises CheckpointError: a file was removed, has a different size than when its header was
        read, or cannot be read.
        """
        nbytes = sum(request.destination.nbytes for request in requests)
        with timed(f"reading {self.name}", nbytes, sum(self._file_bytes.values())):
            self.read_quietly(requests)

    def read_quietly(self, requests: Sequence[ReadRequest]) -> None:
        """Read as `read` does, without a log line."""
        parts = [part for request in requests for part in self._parts(request)]
        parts.sort(key=lambda part: (str(part.stored.file), part.stored.offset, part.box.starts))
        needed = {part.stored.file for part in parts}
        needed.update(part.placed.scale.file for part in parts if part.placed.scale is not None)
        with opened(self._file_bytes, needed) as files:
            run_jobs(_jobs(parts, files), self._threads)

    def read_whole(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Return whole tensors in these dtypes, by name, without a log line."""
        values = {
            name: torch.empty(self._tensors[name][0], dtype=dtype) for name, dtype in dtypes.items()
        }
        self.read_quietly(
            [
                ReadRequest(name, whole(name, tuple(value.shape)).region, value)
                for name, value in values.items()
            ]
        )
        return values

    def _parts(self, request: ReadRequest) -> Iterator[_Overlap]:
        where = f"checkpoint {self.name}"
        region = request.region
        if not request.destination.is_contiguous():
            raise CheckpointError(
                f"{where}: {request.name} has a shard that is not contiguous in memory."
            )
        left = region.numel
        for placed in self._tensors[request.name][1]:
            if box := placed.region.overlap(region):
                left -= box.numel
                if request.encoding is not None and box.lengths[-1] < region.lengths[-1]:
                    raise CheckpointError(
                        f"{where}: {placed.stored.key} has parts of rows of {request.name}, which "
                        f"cannot be kept as {request.encoding.name}."
                    )
                yield _Overlap(placed, request, box)
        if left:
            raise CheckpointError(
                f"{where}: {request.name} is incomplete: {left} elements are missing."
            )


def read_quietly(reader: TensorReader, requests: Sequence[ReadRequest]) -> None:
    """Read without log lines, if the reader can."""
    getattr(reader, "read_quietly", reader.read)(requests)


def read_region(
    reader: TensorReader, name: str, region: Region, dtype: torch.dtype
) -> torch.Tensor:
    """Return a region of a tensor in `dtype`, without log lines."""
    values = torch.empty(region.lengths, dtype=dtype)
    read_quietly(reader, [ReadRequest(name, region, values)])
    return values


def io_threads() -> int:
    """Return the number of I/O threads of a rank: its share of this machine's cores, 1 to 16."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(max(cores // read_ranks_here(), 1), 16)


@contextmanager
def opened(file_bytes: Mapping[Path, int], files: Iterable[Path]) -> Generator[Mapping[Path, int]]:
    """Open `files`, for all threads, and yield their descriptors.

    Raises CheckpointError: a file cannot be opened, or its size differs from `file_bytes`.
    """
    descriptors: dict[Path, int] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                descriptors[file] = stack.enter_context(open(file, "rb", buffering=0)).fileno()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {file}: cannot be opened: {error.strerror}."
                ) from None
            if (size := os.fstat(descriptors[file]).st_size) != file_bytes[file]:
                raise CheckpointError(
                    f"checkpoint {file}: has {size} bytes, but had {file_bytes[file]} when its "
                    "header was read. Something is changing it, or this machine sees another copy."
                )
        yield descriptors


def read_bytes(files: Mapping[Path, int], file: Path, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes of `file`, which `opened` has opened, from `offset` on.

    Raises CheckpointError: the file cannot be read, or is too short.
    """
    while True:
        try:
            count = os.preadv(files[file], [view], offset)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {file}: cannot be read at byte {offset}: {error.strerror}."
            ) from None
        if count == len(view):
            return
        if not count:
            raise CheckpointError(
                f"checkpoint {file}: ended at byte {offset} while it was read; it was cut off."
            )
        view = view[count:]
        offset = offset + count


_T = TypeVar("_T")


@contextmanager
def timed(text: str, nbytes: int, folder_bytes: int) -> Generator[None]:
    """Log how fast the body reads or writes a folder of `folder_bytes`, if this rank transfers some
    of it (`nbytes`).
    """
    start = time.perf_counter()
    yield
    if nbytes:
        seconds = max(time.perf_counter() - start, 1e-9)
        size = format_size(folder_bytes)
        rate = folder_bytes / 1e9 / seconds
        logger.info("checkpoint: %s: %s in %.1f s, %.2f GB/s", text, size, seconds, rate)


def run_jobs(jobs: Iterable[Callable[[], _T]], threads: int) -> list[_T]:
    """Run `jobs` and return their results; the first error cancels the rest."""
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
        return list(pool.map(lambda job: job(), jobs))


def _jobs(parts: Sequence[_Overlap], files: Mapping[Path, int]) -> Iterator[Callable[[], None]]:
    """Yield jobs for the threads; each job reads one part of a stored tensor."""
    buffers = threading.local()
    for part in parts:
        size = part.stored.dtype.itemsize
        memory = _memory(part)
        if memory is not None:
            for box in part.box.within(part.placed.region).slabs(DIRECT_BYTES // size):
                nbytes = box.numel * size
                yield partial(_read_bytes, files, part.placed, box, memory[:nbytes])
                memory = memory[nbytes:]
            continue
        elements = JOB_BYTES // size
        if part.placed.scale is not None:
            # one byte on disk becomes four bytes of the float32 value, and four of its scale
            elements //= 8
        is_transposed = part.placed.is_transposed
        if part.request.encoding is not None:  # whole rows
            elements = max(elements, math.prod(part.box.lengths[-2 if is_transposed else -1 :]))
        for box in slabs(part.box, elements, is_transposed=is_transposed):
            yield partial(_read, files, replace(part, box=box), buffers)


def slabs(box: Region, elements: int, *, is_transposed: bool) -> Iterator[Region]:
    """Yield parts of `box` of at most `elements` elements, in the order in which they are
    stored.
    """
    if not is_transposed:
        return box.slabs(elements)
    return (slab.transposed() for slab in box.transposed().slabs(elements))


@torch.no_grad()
def _memory(part: _Overlap) -> memoryview | None:
    """Return the memory that a part is read into without a buffer; None if it is not contiguous."""
    if not part.is_copy:
        return None
    request = part.request
    (first, count), *more = islice(part.box.within(request.region).runs(request.region.lengths), 2)
    if more:
        return None
    size = part.stored.dtype.itemsize
    return bytes_of(request.destination.view(-1))[first * size : (first + count) * size]


@dataclass
class _Buffer:
    memory: torch.Tensor
    stream: "torch.cuda.Stream | None" = None


def _buffer(buffers: threading.local, device: torch.device, nbytes: int) -> _Buffer:
    """Return this thread's buffer for bytes to cast, dequantize, encode, or copy to a GPU."""
    buffer: _Buffer | None = getattr(buffers, "buffer", None)
    if buffer is None or buffer.memory.numel() < nbytes:
        on_gpu = device.type == "cuda"
        buffer = _Buffer(torch.empty(max(nbytes, JOB_BYTES), dtype=torch.uint8, pin_memory=on_gpu))
        if on_gpu:
            # When a stream's context ends, torch makes the thread's device current and creates a
            # CUDA context there. Unless this thread has the rank's device, that costs half a GiB on
            # GPU 0 for every rank.
            torch.cuda.set_device(device)
            buffer.stream = torch.cuda.Stream(device)
            # the default stream allocated the shards
            buffer.stream.wait_stream(torch.cuda.default_stream(device))
        buffers.buffer = buffer
    return buffer


@torch.no_grad()
def _read(files: Mapping[Path, int], part: _Overlap, buffers: threading.local) -> None:
    """Read one part into this thread's buffer, and copy it from there into the shard."""
    request = part.request
    placed = part.placed
    stored = part.stored
    encoding = request.encoding
    device = request.destination.device
    box = placed.box_of(part.box)
    nbytes = box.numel * stored.dtype.itemsize
    buffer = _buffer(buffers, device, nbytes)
    raw = buffer.memory[:nbytes]
    if not placed.is_packed:
        _read_bytes(files, placed, box, bytes_of(raw))
    values = raw.view(stored.dtype).view(box.lengths)
    is_kept = False
    if placed.scale is not None:
        is_kept = encoding is not None and encoding.keeps(stored.dtype, placed.block)
        is_kept = is_kept and not placed.is_transposed
        kept_by = encoding if is_kept else None
        values = (
            _read_packed(files, placed, box, kept_by)
            if placed.is_packed
            else _dequantize(files, placed, box, values, kept_by)
        )
    if placed.is_transposed:
        values = values.mT
    with nullcontext() if buffer.stream is None else torch.cuda.stream(buffer.stream):
        values = values.to(device, non_blocking=True)  # cast on the GPU, at no cost
        here = part.box.within(request.region)
        if encoding is None:
            request.destination.view(request.region.lengths)[here.slices].copy_(values)
        else:
            rows = values if is_kept else encoding.encode(values.reshape(-1, here.lengths[-1]))
            places = rows_of(request.destination, rows.shape[-1])
            for first, count in here.row_runs(request.region.lengths):
                places[first : first + count] = rows[:count]
                rows = rows[count:]
    if buffer.stream is not None:
        buffer.stream.synchronize()  # the buffer is reused at once; other threads continue


def _read_bytes(files: Mapping[Path, int], placed: Placed, box: Region, memory: memoryview) -> None:
    """Read `box`, in coordinates of the stored tensor, into `memory`."""
    stored = placed.stored
    size = stored.dtype.itemsize
    for first, length in box.runs(placed.box_of(placed.region).lengths):
        nbytes = length * size
        read_bytes(files, stored.file, memory[:nbytes], stored.offset + first * size)
        memory = memory[nbytes:]


def _read_packed(
    files: Mapping[Path, int], placed: Placed, box: Region, kept_by: Encoding | None
) -> torch.Tensor:
    """Read the blocks and scales of an MXFP4 weight in `box`; return float32 values, or blocks and
    scales packed as `kept_by` stores them.
    """
    assert placed.scale is not None
    (*starts, left), (*lengths, width) = box.starts, box.lengths
    first = left // mxfp4.BLOCK
    count = -(-(left + width) // mxfp4.BLOCK) - first
    found = []
    for part, size in ((placed.stored, mxfp4.BLOCK // 2), (placed.scale, 1)):
        touched = Region((*starts, first * size), (*lengths, count * size))
        held = torch.empty(math.prod(lengths), count * size, dtype=torch.uint8)
        memory = bytes_of(held.view(-1))
        for start, length in touched.runs(part.shape):
            read_bytes(files, part.file, memory[:length], part.offset + start)
            memory = memory[length:]
        found.append(held)
    blocks, scales = found
    if kept_by is not None:
        return kept_by.keep(blocks, mxfp4.read_scales(scales))
    values = mxfp4.unpack(blocks.unflatten(1, (count, -1)), scales)
    before = left - first * mxfp4.BLOCK
    return values[:, before : before + width].reshape(box.lengths)


def _dequantize(
    files: Mapping[Path, int],
    placed: Placed,
    box: Region,
    codes: torch.Tensor,
    kept_by: Encoding | None,
) -> torch.Tensor:
    """Read the scales; return float32 values, or codes and scales packed as `kept_by` stores
    them.
    """
    assert placed.scale is not None
    (top, left), (height, width), block = box.starts[-2:], box.lengths[-2:], placed.block
    top += placed.row
    rows = torch.arange(top, top + height) // block[0]
    columns = torch.arange(left, left + width, 1 if kept_by is None else block[1]) // block[1]
    needed = placed.scale.rows(int(rows[0]), int(rows[-1] - rows[0]) + 1)
    dtype = torch.float8_e8m0fnu if needed.dtype == torch.uint8 else needed.dtype  # exponents
    factors = torch.empty(needed.shape, dtype=dtype)
    read_bytes(files, needed.file, bytes_of(factors.view(-1)), needed.offset)
    factors = factors.to(torch.float32)[(rows - rows[0])[:, None], columns]
    codes = codes.view(height, width)
    if kept_by is not None:
        return kept_by.keep(codes, factors)
    return codes.to(torch.float32).mul_(factors).view(box.lengths)
