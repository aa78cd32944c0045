"""Read shards out of safetensors files: exactly the bytes of this rank, straight into the tensors they belong to.

The requests of a rank are sorted by file and offset, cut into jobs of a few MiB, and carried out by a few threads with
positioned reads. Where dtype and device allow it, the kernel copies from the page cache into the shard; otherwise a job
passes through a staging buffer of 1 MiB, pinned if it goes to a GPU, and is cast on the way.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from titanlite.base.errors import CheckpointError
from titanlite.base.log import logger
from titanlite.base.process import read_ranks_here
from titanlite.base.text import format_size
from titanlite.checkpoint.folder import FP8, StoredTensor, find_scale
from titanlite.checkpoint.pieces import Segments, bytes_of, overlap
from titanlite.materialize import ReadRequest, Region
from titanlite.materialize.layout import Encoding, rows_of

_DIRECT_BYTES = 8 << 20  # per job; nothing is buffered
_STAGED_BYTES = 1 << 20
_MOST_VECTORS = 1024  # IOV_MAX on Linux


@dataclass(frozen=True)
class Placed:
    """A stored tensor and the region of the run-time tensor that it holds; `scale` has the factors of an FP8 weight."""

    stored: StoredTensor
    region: Region
    scale: StoredTensor | None = None
    block: tuple[int, int] = (128, 128)


def place(
    stored: StoredTensor, region: Region, tensors: Mapping[str, StoredTensor], block: tuple[int, int] | None
) -> list[Placed]:
    """Return a stored tensor with its region, in FP8 each matrix with its factors; errors as those of `find_scale`."""
    if stored.dtype not in FP8:
        return [Placed(stored, region)]
    scale, block = find_scale(stored, tensors, block)
    if len(stored.shape) == 2:
        return [Placed(stored, region, scale, block)]
    return [
        Placed(stored.index(i), Region((start, *region.starts[1:]), (1, *region.lengths[1:])), scale.index(i), block)
        for i, start in enumerate(range(region.starts[0], region.starts[0] + stored.shape[0]))  # experts
    ]


@dataclass(frozen=True)
class _Part:
    """Segments of one stored tensor that go into one flat shard, whose rows have `width` values; if encoded, whole
    rows.
    """

    placed: Placed
    segments: Segments
    target: torch.Tensor
    encoding: Encoding | None = None
    width: int = 1

    @property
    def offset(self) -> int:
        return self.placed.stored.offset + int(self.segments.stored[0]) * self.placed.stored.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.segments.numel * self.placed.stored.dtype.itemsize


class SafetensorsReader:
    """A `TensorReader` over safetensors files, of which `name` is the folder, for messages.

    `tensors` has run-time names with the global shape and the stored tensors that together hold it. A file whose size
    is no longer that of `file_bytes`, when its header was read, is refused.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, tuple[tuple[int, ...], Sequence[Placed]]],
        file_bytes: Mapping[Path, int],
        threads: int = 0,
    ) -> None:
        self.name, self.proves_coverage = name, True
        self._tensors, self._file_bytes = tensors, file_bytes
        self._threads = threads or io_threads()

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Write every requested region into its destination, cast to its dtype.

        Raises CheckpointError: a file is gone, has another size than when its header was read, or cannot be read.
        """
        parts = [part for request in requests for part in self._parts(request)]
        folder_bytes = sum(self._file_bytes.values())
        with timed(f"reading {self.name}", sum(part.nbytes for part in parts), folder_bytes):
            self._read(parts)

    def read_quietly(self, requests: Sequence[ReadRequest]) -> None:
        """Do as `read`, without a log line."""
        self._read([part for request in requests for part in self._parts(request)])

    def _read(self, parts: list[_Part]) -> None:
        parts.sort(key=lambda part: (str(part.placed.stored.file), part.offset))
        if parts:
            needed = {part.placed.stored.file for part in parts}
            needed |= {part.placed.scale.file for part in parts if part.placed.scale is not None}
            with Files(self._file_bytes, needed) as files:
                run_jobs(_jobs(parts, files), self._threads)

    def plan_bytes(self, name: str, region: Region) -> dict[Path, int]:
        """Return the bytes of each file that a read of `region` of tensor `name` takes; reads nothing."""
        found: dict[Path, int] = {}
        for placed in self._tensors[name][1]:
            segments = overlap(placed.region, region)
            if segments is not None:
                file = placed.stored.file
                found[file] = found.get(file, 0) + segments.numel * placed.stored.dtype.itemsize
        return found

    def _parts(self, request: ReadRequest) -> Iterator[_Part]:
        target = request.destination
        if not target.is_contiguous():
            raise CheckpointError(
                f"checkpoint {self.name}: {request.name} has a shard that is not contiguous in memory."
            )
        left = request.region.numel
        for placed in self._tensors[request.name][1]:
            segments = overlap(placed.region, request.region)
            if segments is not None and segments.numel:
                left -= segments.numel
                width = request.region.lengths[-1] if request.region.lengths else 1
                if request.encoding is not None and segments.length % width:
                    raise CheckpointError(
                        f"checkpoint {self.name}: {placed.stored.key} has parts of rows of {request.name}, which "
                        f"cannot be kept as {request.encoding.name}."
                    )
                yield _Part(placed, segments, target.view(-1), request.encoding, width)
        if left:
            raise CheckpointError(f"checkpoint {self.name}: {request.name} is incomplete: {left} elements are missing.")


def io_threads() -> int:
    """Return with how many threads a rank reads or writes: its share of this machine's cores, 1 to 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // read_ranks_here(), 1), 16)


class Files(AbstractContextManager["Files"]):
    """Descriptors of the files, opened once, shared by all threads."""

    def __init__(self, file_bytes: Mapping[Path, int], files: Iterable[Path]) -> None:
        self._descriptors: dict[Path, int] = {}
        try:
            for file in files:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
                size = os.fstat(self._descriptors[file]).st_size
                if size != file_bytes[file]:
                    raise CheckpointError(
                        f"checkpoint {file}: has {size} bytes, but had {file_bytes[file]} when its header was read. "
                        "Something is changing it, or this machine sees another copy."
                    )
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise CheckpointError(f"checkpoint {error.filename}: cannot be opened: {error.strerror}.") from None
            raise

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(self, file: Path, views: list[memoryview], offset: int) -> None:
        """Fill `views`, one after the other, with the bytes of `file` from `offset` on."""
        while views:
            try:
                count = os.preadv(self._descriptors[file], views[:_MOST_VECTORS], offset)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {file}: cannot be read at byte {offset}: {error.strerror}."
                ) from None
            if not count and any(len(view) for view in views):
                raise CheckpointError(f"checkpoint {file}: ended at byte {offset} while it was read; it was cut off.")
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]


_Job = Callable[[], None]
_TAKES_LONG = 1 << 30  # bytes of one rank; from there on a line is logged before, too


@contextmanager
def timed(text: str, nbytes: int, folder_bytes: int) -> Generator[None]:
    """Log how fast the body moves a folder of `folder_bytes`, if this rank moves any of it (`nbytes`)."""
    start = time.perf_counter()
    if nbytes > _TAKES_LONG:
        logger.info("checkpoint: %s: %s", text, format_size(folder_bytes))
    yield
    if nbytes:
        logger.info("checkpoint: %s: %s", text, format_transfer(folder_bytes, time.perf_counter() - start))


def format_transfer(nbytes: int, seconds: float) -> str:
    """Return `0.98 GB in 0.8 s, 1.23 GB/s`; without a rate that would round to 0."""
    rate = nbytes / 1e9 / max(seconds, 1e-9)
    return f"{format_size(nbytes)} in {seconds:.1f} s" + (f", {rate:.2f} GB/s" if rate >= 0.01 else "")


def run_jobs(jobs: Generator[_Job, None, None], threads: int) -> None:
    """Carry out `jobs`; the first error ends the rest."""
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            try:
                job()
            except BaseException:
                with lock:
                    jobs.close()
                raise

    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
        for worker in [pool.submit(work) for _ in range(threads)]:
            worker.result()


def _jobs(parts: Sequence[_Part], files: Files) -> Generator[_Job, None, None]:
    """Yield work for one thread at a time: reads that follow one another in a file."""
    staging = _Staging()
    batch: list[_Part] = []
    batch_bytes = 0
    for whole in parts:
        direct = whole.target.device.type == "cpu" and whole.target.dtype == whole.placed.stored.dtype
        direct &= whole.placed.scale is None and whole.encoding is None
        itemsize = whole.placed.stored.dtype.itemsize
        row = 1
        nbytes = _DIRECT_BYTES if direct else _STAGED_BYTES
        if whole.placed.scale is not None:
            row = whole.placed.stored.shape[-1]
            nbytes //= 8  # a byte on disk is four of its float32 value, and as many of its factor
        elif whole.encoding is not None and whole.target.device.type == "cpu":
            nbytes //= 4  # likewise, where encoding is not done on a GPU
        if whole.encoding is not None:
            row = whole.width
        for segments in whole.segments.split(nbytes // itemsize, max(row, 1)):
            part = replace(whole, segments=segments)
            if not direct:
                yield partial(staging.read, files, part)
                continue
            if batch and (
                batch_bytes + part.nbytes > _DIRECT_BYTES or batch[0].placed.stored.file is not part.placed.stored.file
            ):
                yield partial(_read_direct, files, batch)
                batch, batch_bytes = [], 0
            batch.append(part)
            batch_bytes += part.nbytes
    if batch:
        yield partial(_read_direct, files, batch)


def _read_direct(files: Files, parts: Sequence[_Part]) -> None:
    """Read into the shards; what is contiguous in the file takes one system call, wherever it goes."""
    views: list[memoryview] = []
    start = end = 0
    for part in parts:
        memory, itemsize = bytes_of(part.target), part.target.dtype.itemsize
        base, length = part.placed.stored.offset, part.segments.length * itemsize
        for stored, local in zip(part.segments.stored.tolist(), part.segments.local.tolist(), strict=True):
            offset = base + stored * itemsize
            if offset != end:
                files.read(part.placed.stored.file, views, start)
                views, start = [], offset
            views.append(memory[local * itemsize : local * itemsize + length])
            end = offset + length
    files.read(parts[0].placed.stored.file, views, start)


@dataclass
class _Buffer:
    memory: torch.Tensor
    stream: "torch.cuda.Stream | None" = None


@dataclass
class _Staging:
    """Reads that are cast, dequantized, encoded, or sent to a GPU."""

    _local: threading.local = field(default_factory=threading.local)

    def _buffer(self, device: torch.device, nbytes: int) -> _Buffer:
        buffer: _Buffer | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.memory.numel() < nbytes:
            on_gpu = device.type == "cuda"
            buffer = _Buffer(torch.empty(max(nbytes, _STAGED_BYTES), dtype=torch.uint8, pin_memory=on_gpu))
            if on_gpu:
                # Leaving a stream's context makes the thread's device current, and so makes a CUDA context there: half
                # a GiB on GPU 0 from every rank, unless this thread has the rank's device.
                torch.cuda.set_device(device)
                buffer.stream = torch.cuda.Stream(device)
                buffer.stream.wait_stream(torch.cuda.default_stream(device))  # which allocated the shards
            self._local.buffer = buffer
        return buffer

    @torch.no_grad()
    def read(self, files: Files, part: _Part) -> None:
        buffer = self._buffer(part.target.device, part.nbytes)
        stored, itemsize = part.placed.stored, part.placed.stored.dtype.itemsize
        raw = buffer.memory[: part.nbytes]
        memory, length = bytes_of(raw), part.segments.length * itemsize
        for i, first in enumerate(part.segments.stored.tolist()):
            files.read(stored.file, [memory[i * length : (i + 1) * length]], stored.offset + first * itemsize)
        values = raw.view(stored.dtype).view(len(part.segments.stored), part.segments.length)
        scaled, encoding = part.placed.scale is not None, part.encoding
        is_kept = scaled and encoding is not None and encoding.keeps(stored.dtype, part.placed.block)
        if scaled:
            values = self._dequantize(files, part, values, encoding if is_kept else None)
        if buffer.stream is None:
            _scatter(values, part, is_encoded=is_kept)
        else:
            with torch.cuda.stream(buffer.stream):
                # Cast there, where it is free. The buffer is used again at once, so wait; other threads go on.
                _scatter(values.to(part.target.device, non_blocking=True), part, is_encoded=is_kept)
            buffer.stream.synchronize()

    def _dequantize(self, files: Files, part: _Part, codes: torch.Tensor, kept_by: Encoding | None) -> torch.Tensor:
        """Read the factors; return the values, float32, or codes and factors encoded as they are."""
        scale, block, cols = part.placed.scale, part.placed.block, part.placed.stored.shape[-1]
        assert scale is not None
        first = part.segments.stored
        if part.segments.length > cols:  # whole rows: look at them one by one
            first = (first[:, None] + cols * np.arange(part.segments.length // cols)).reshape(-1)
            codes = codes.view(-1, cols)
        top = int(first.min()) // cols // block[0]
        needed = scale.rows(top, int(first.max()) // cols // block[0] + 1 - top)
        dtype = torch.float8_e8m0fnu if needed.dtype == torch.uint8 else needed.dtype  # exponents
        factors = torch.empty(needed.shape, dtype=dtype)
        files.read(needed.file, [bytes_of(factors.view(-1))], needed.offset)
        columns = torch.arange(codes.shape[1]) if kept_by is None else torch.arange(0, part.width, block[1])
        rows, columns = torch.from_numpy(first // cols // block[0] - top), (int(first[0]) % cols + columns) // block[1]
        factors = factors.to(torch.float32)[rows][:, columns]
        return codes.to(torch.float32).mul_(factors) if kept_by is None else kept_by.keep(codes, factors)


def _scatter(values: torch.Tensor, part: _Part, *, is_encoded: bool) -> None:
    """Copy `values`, segments end to end, to their places in the shard; if encoded, as rows of its encoding."""
    segments, target = part.segments, part.target
    if part.encoding is not None:
        rows = values if is_encoded else part.encoding.encode(values.reshape(-1, part.width))
        places, per_run = rows_of(target, rows.shape[-1]), segments.length // part.width
        for run, local in zip(rows.split(per_run), (segments.local // part.width).tolist(), strict=True):
            places[local : local + per_run] = run
    elif segments.is_local_contiguous:
        target[int(segments.local[0]) : int(segments.local[0]) + segments.numel].copy_(values.reshape(-1))
    else:
        for row, local in zip(values.reshape(-1, segments.length), segments.local.tolist(), strict=True):
            target[local : local + segments.length].copy_(row)
