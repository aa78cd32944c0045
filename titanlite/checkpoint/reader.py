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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.base.errors import CheckpointError
from titanlite.base.process import count_threads
from titanlite.checkpoint import quantized
from titanlite.checkpoint.folder import StoredTensor
from titanlite.checkpoint.pieces import Piece, bytes_of, whole
from titanlite.materialize import ReadRequest, Region, TensorReader, region_of
from titanlite.materialize.layout import Encoding, write_rows

JOB_BYTES = 1 << 20  # of a read into a buffer
DIRECT_BYTES = 8 << 20  # of a read into a shard


class Placed(NamedTuple):
    """A stored tensor, and the piece of a run-time tensor that it holds."""

    stored: StoredTensor
    piece: Piece


class _Overlap(NamedTuple):
    """The overlap `box`, in the run-time tensor's coordinates, of a stored tensor and a request."""

    stored: StoredTensor
    piece: Piece
    request: ReadRequest
    box: Region

    def memory(self) -> memoryview | None:
        """Return the memory of the shard into which the file's bytes can be read directly; None if
        they must be converted, or go to a device or to several ranges.
        """
        target = self.request.destination
        is_raw = self.stored.scale is None and self.request.encoding is None
        is_same = target.device.type == "cpu" and target.dtype == self.stored.dtype
        if self.piece.is_transposed or not (is_raw and is_same):
            return None
        here = self.box.within(self.request.region)
        first, count = next(here.runs(self.request.region.lengths))
        return bytes_of(target.view(-1)[first : first + count]) if count == here.numel else None


class SafetensorsReader:
    """A `TensorReader` over safetensors files; `name` is their folder, for messages.

    `tensors` maps run-time names to the stored tensors that they consist of. A file is refused if
    its size differs from its size when the header was read.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, Sequence[Placed]], threads: int = 0
    ) -> None:
        self.name = name
        self.proves_coverage = True
        self._tensors = tensors
        self._threads = threads

    @classmethod
    def of_tensors(
        cls, name: str, stored: Iterable[StoredTensor], threads: int = 0
    ) -> "SafetensorsReader":
        """Return a reader of whole stored tensors; their names are their keys on disk."""
        placed = {
            tensor.key: [Placed(tensor, whole(tensor.key, tensor.shape))] for tensor in stored
        }
        return cls(name, placed, threads)

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Write every requested region into its destination, cast to the destination's dtype.

        Raises CheckpointError: a file was removed, has a different size than when its header was
        read, or cannot be read.
        """
        parts = [part for request in requests for part in self._parts(request)]
        parts.sort(key=lambda part: (str(part.stored.file), part.stored.offset, part.box.starts))
        needed = [part.stored for part in parts]
        needed += [tensor.scale for tensor in needed if tensor.scale is not None]
        with opened(needed) as files:
            run_jobs(_jobs(parts, files), self._threads)

    def _parts(self, request: ReadRequest) -> Iterator[_Overlap]:
        where = f"checkpoint {self.name}"
        region = request.region
        left = region.numel
        for stored, piece in self._tensors[request.name]:
            if box := piece.region.overlap(region):
                left -= box.numel
                if request.encoding is not None and box.lengths[-1] < region.lengths[-1]:
                    raise CheckpointError(
                        f"{where}: {stored.key} has only parts of the rows of {request.name}, and "
                        f"{request.encoding.name} needs whole rows."
                    )
                yield _Overlap(stored, piece, request, box)
        if left:
            raise CheckpointError(
                f"{where}: {request.name} is incomplete: {left} elements are missing."
            )


def read_region(
    reader: TensorReader, name: str, region: Region, dtype: torch.dtype
) -> torch.Tensor:
    """Return a region of a tensor in `dtype`."""
    values = torch.empty(region.lengths, dtype=dtype)
    reader.read([ReadRequest(name, region, values)])
    return values


def read_whole(
    name: str, stored: Sequence[StoredTensor], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return whole stored tensors by key; quantized ones are dequantized to `dtype`. `name` is for
    messages.
    """
    values = {
        tensor.key: torch.empty(tensor.shape, dtype=tensor.dtype if tensor.scale is None else dtype)
        for tensor in stored
    }
    requests = [ReadRequest(key, region_of(value), value) for key, value in values.items()]
    SafetensorsReader.of_tensors(name, stored).read(requests)
    return values


@contextmanager
def opened(tensors: Iterable[StoredTensor]) -> Generator[Mapping[Path, int]]:
    """Open the files of `tensors`, for all threads, and yield their descriptors.

    Raises CheckpointError: a file cannot be opened, or its size changed since its header was read.
    """
    descriptors: dict[Path, int] = {}
    sizes = {tensor.file: tensor.file_bytes for tensor in tensors}
    with ExitStack() as stack:
        for file, file_bytes in sizes.items():
            try:
                descriptors[file] = stack.enter_context(open(file, "rb", buffering=0)).fileno()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {file}: cannot be opened: {error.strerror}."
                ) from None
            if (size := os.fstat(descriptors[file]).st_size) != file_bytes:
                raise CheckpointError(
                    f"checkpoint {file}: has {size} bytes, but had {file_bytes} when its "
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


def run_jobs(jobs: Iterable[Callable[[], Any]], threads: int = 0) -> list[Any]:
    """Run `jobs` and return their results; the first error cancels the rest."""
    with ThreadPoolExecutor(threads or count_threads(), thread_name_prefix="checkpoint") as pool:
        return list(pool.map(lambda job: job(), jobs))


def _jobs(parts: Sequence[_Overlap], files: Mapping[Path, int]) -> Iterator[Callable[[], None]]:
    """Yield jobs for the threads; each job reads one part of a stored tensor."""
    buffer = _Buffer()
    for part in parts:
        size = part.stored.dtype.itemsize
        memory = part.memory()
        if memory is not None:
            for box in part.box.slabs(DIRECT_BYTES // size):
                nbytes = box.numel * size
                runs = part.piece.runs(box)
                yield partial(_read_runs, files, part.stored, runs, memory[:nbytes])
                memory = memory[nbytes:]
            continue
        elements = JOB_BYTES // size
        if part.stored.scale is not None:
            # one byte on disk becomes four bytes of the float32 value, and four of its scale
            elements //= 8
        if part.request.encoding is not None:  # whole rows
            is_transposed = part.piece.is_transposed
            elements = max(elements, math.prod(part.box.lengths[-2 if is_transposed else -1 :]))
        for box in part.piece.slabs(part.box, elements):
            yield partial(_read, files, part._replace(box=box), buffer)


class _Buffer(threading.local):
    """A thread's memory for bytes that must be cast, dequantized, encoded, or copied to a GPU, and
    its stream on that GPU.
    """

    memory = torch.empty(0, dtype=torch.uint8)
    stream: "torch.cuda.Stream | None" = None

    def reserve(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of the memory, for a copy to `device`."""
        on_gpu = device.type == "cuda"
        if self.memory.numel() < nbytes:
            size = max(nbytes, JOB_BYTES)
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        if on_gpu and self.stream is None:
            # When a stream's context ends, torch makes the thread's device current and creates a
            # CUDA context there. Unless this thread has the rank's device, that costs half a GiB on
            # GPU 0 for every rank.
            torch.cuda.set_device(device)
            self.stream = torch.cuda.Stream(device)
            # the default stream allocated the shards
            self.stream.wait_stream(torch.cuda.default_stream(device))
        return self.memory[:nbytes]


@torch.no_grad()
def _read(files: Mapping[Path, int], part: _Overlap, buffer: _Buffer) -> None:
    """Read one part into this thread's buffer, and copy it from there into the shard."""
    stored, piece, request, _ = part
    encoding = request.encoding
    device = request.destination.device
    box = piece.as_stored(part.box)
    memory = buffer.reserve(device, box.numel * stored.dtype.itemsize)
    is_adopted = (
        stored.scale is not None
        and encoding is not None
        and not piece.is_transposed
        and encoding.can_adopt(stored.dtype, stored.block)
    )
    if stored.scale is not None:
        values = _read_quantized(files, stored, piece, box, encoding if is_adopted else None)
    else:
        _read_runs(files, stored, piece.runs(part.box), bytes_of(memory))
        values = memory.view(stored.dtype).view(box.lengths)
    if piece.is_transposed:
        values = values.mT
    with nullcontext() if buffer.stream is None else torch.cuda.stream(buffer.stream):
        values = values.to(device, non_blocking=True)  # cast on the GPU, at no cost
        if encoding is None:
            request.destination[part.box.within(request.region).slices].copy_(values)
        else:
            rows = values
            if not is_adopted:
                rows = encoding.encode(values.reshape(-1, part.box.lengths[-1]))
            write_rows(rows, request.destination, part.box, request.region)
    if buffer.stream is not None:
        buffer.stream.synchronize()  # the buffer is reused at once; other threads continue


def _read_runs(
    files: Mapping[Path, int],
    stored: StoredTensor,
    runs: Iterable[tuple[int, int]],
    memory: memoryview,
) -> None:
    """Read `runs` of elements (first, count) into `memory`, one after another."""
    size = stored.dtype.itemsize
    for first, count in runs:
        nbytes = count * size
        read_bytes(files, stored.file, memory[:nbytes], stored.offset + first * size)
        memory = memory[nbytes:]


def _read_quantized(
    files: Mapping[Path, int],
    stored: StoredTensor,
    piece: Piece,
    box: Region,
    adopted_by: Encoding | None,
) -> torch.Tensor:
    """Read codes and scales in `box`, as `Piece.as_stored` returns it; return float32 values, or
    codes and scales packed as `adopted_by` stores them.
    """
    assert stored.scale is not None
    height, width = stored.block
    # In coordinates of the stored tensor. Dims of length 1 that it does not have come first.
    dims = len(stored.shape)
    *outer, top, left = box.starts[-dims:]
    lengths = box.lengths[-dims:]
    box = Region((*outer, top + piece.row, left), lengths)

    def read(tensor: StoredTensor, rows: int, columns: int) -> torch.Tensor:
        """Read the blocks that `box` touches."""
        touched = box.in_blocks(rows, columns)
        values = torch.empty(touched.lengths, dtype=tensor.dtype)
        _read_runs(files, tensor, touched.runs(tensor.shape), bytes_of(values.view(-1)))
        return values

    per_byte = 2 if stored.is_packed else 1
    shape = (*stored.shape[:-1], stored.shape[-1] // per_byte)
    codes = read(stored._replace(shape=shape), 1, per_byte)
    scales = quantized.read_scales(read(stored.scale, height, width))
    rows = torch.arange(box.starts[-2], box.ends[-2]) // height
    columns = torch.arange(left, left + lengths[-1]) // width
    scales = scales[..., rows - rows[0], :]
    if adopted_by is not None:
        return adopted_by.adopt(codes.flatten(0, -2), scales.flatten(0, -2))
    values = quantized.decode(codes)[..., left % per_byte :][..., : lengths[-1]]
    return values.mul_(scales[..., columns - columns[0]])
