"""MXFP4 weights of gpt-oss (OCP Microscaling Formats 1.0, sections 5.3 and 6): dequantized while they are read.

`experts.gate_up_proj_blocks` (E, R, C / 32, 16) has two values of 4 bits (e2m1) in a byte, the first one in the lower
half; `_scales` (E, R, C / 32) an exponent (e8m0) for each 32 values of a row. The class of transformers has the matrix
transposed: (E, C, R).
"""

from collections.abc import Generator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F

from titanlite.checkpoint.folder import StoredTensor, shown
from titanlite.checkpoint.pieces import bytes_of
from titanlite.checkpoint.reader import Files, io_threads, run_jobs, timed
from titanlite.materialize import ReadRequest, Region

_BLOCK, _BYTES = 32, 16
_JOB_BYTES = 1 << 18
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Packed = tuple[StoredTensor, StoredTensor]  # blocks and scales of one weight


def find_packed(tensors: Mapping[str, StoredTensor]) -> dict[str, Packed]:
    """Return the MXFP4 weights among `tensors`, by the name without `_blocks` and `_scales`."""
    names = [key.removesuffix("_blocks") for key in tensors if key.endswith("_blocks")]
    return {n: (tensors[f"{n}_blocks"], tensors[f"{n}_scales"]) for n in names if f"{n}_scales" in tensors}


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values (N, 32 G), float32, of blocks (N, G, 16) and scales (N, G), both uint8, on their device.

    The scale 255 stands for NaN.
    """
    values = F.embedding(blocks.to(torch.int32), _pairs(blocks.device)).flatten(-2)
    return values.mul_(scales.view(torch.float8_e8m0fnu).to(torch.float32).unsqueeze(-1)).flatten(1)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Return the two values in each of the 256 bytes, float32 (256, 2)."""
    with torch.inference_mode(False):
        table = torch.tensor(_E2M1, device=device)
        return torch.cartesian_prod(table, table).flip(-1).contiguous()


class Mxfp4Reader:
    """A `TensorReader` of MXFP4 weights: it reads the blocks that a region touches, and transposes them."""

    proves_coverage = True  # a region is written as a whole

    def __init__(self, folder: str, file_bytes: Mapping[Path, int]) -> None:
        self.name = folder
        self._file_bytes = file_bytes
        self._tensors: dict[str, tuple[tuple[int, ...], Packed]] = {}

    def add(self, name: str, shape: tuple[int, ...], blocks: StoredTensor, scales: StoredTensor) -> str:
        """Add the tensor `name` of `shape` (E, C, R), from `blocks` and `scales`; or return what is wrong."""
        expected = (shape[0], shape[2], shape[1] // _BLOCK) if len(shape) == 3 and not shape[1] % _BLOCK else ()
        if not expected or (blocks.shape, scales.shape) != ((*expected, _BYTES), expected):
            return (
                f"{shown(blocks.key)} has shape {blocks.shape} and {shown(scales.key)} {scales.shape}, which is not "
                f"{shape} in MXFP4"
            )
        if {blocks.dtype, scales.dtype} != {torch.uint8}:
            return f"{shown(blocks.key)} is {blocks.dtype} and {shown(scales.key)} {scales.dtype}, not uint8"
        self._tensors[name] = shape, (blocks, scales)
        return ""

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Write every requested region into its destination, cast to its dtype.

        Raises CheckpointError: a file is gone, has another size than when its header was read, or cannot be read.
        """
        needed = {part.file for request in requests for part in self._tensors[request.name][1]}
        total = sum(sum(self.plan_bytes(request.name, request.region).values()) for request in requests)
        stored = sum(part.nbytes for _, parts in self._tensors.values() for part in parts)
        with timed(f"reading MXFP4 of {self.name}", total, stored), Files(self._file_bytes, needed) as files:
            run_jobs(self._jobs(requests, files), io_threads())

    def plan_bytes(self, name: str, region: Region) -> dict[Path, int]:
        """Bytes of each file that a read of `region` of tensor `name` takes; reads nothing."""
        found: dict[Path, int] = {}
        groups = _groups(region)
        for part in self._tensors[name][1]:
            each = len(groups) * (_BYTES if part.shape[-1] == _BYTES and len(part.shape) == 4 else 1)
            nbytes = region.lengths[0] * region.lengths[2] * each
            found[part.file] = found.get(part.file, 0) + nbytes
        return {file: nbytes for file, nbytes in found.items() if nbytes}

    def _jobs(self, requests: Sequence[ReadRequest], files: Files) -> Generator[partial[None], None, None]:
        for request in requests:
            first, count = request.region.starts[2], request.region.lengths[2]
            step = max(_JOB_BYTES // max(len(_groups(request.region)) * _BYTES, 1), 1)
            for expert in range(request.region.lengths[0] if request.region.numel else 0):
                for row in range(0, count, step):
                    rows = range(first + row, first + min(row + step, count))
                    yield partial(self._read_rows, files, request, expert, rows)

    def _read_rows(self, files: Files, request: ReadRequest, expert: int, rows: range) -> None:
        """Read `rows` of the stored matrix of the region's expert number `expert`."""
        region, groups = request.region, _groups(request.region)
        read = []
        for part in self._tensors[request.name][1]:
            of_expert = part.index(region.starts[0] + expert).rows(rows.start, len(rows))
            nbytes = of_expert.nbytes // (len(rows) * of_expert.shape[1])  # of a group
            raw = torch.empty(len(rows), len(groups), nbytes, dtype=torch.uint8)
            stride, length = nbytes * of_expert.shape[1], nbytes * len(groups)
            memory, offset = bytes_of(raw.view(-1)), of_expert.offset + nbytes * groups.start
            if stride == length:  # whole rows follow one another
                stride = length = length * len(rows)
            for i in range(0, len(memory), length):
                files.read(part.file, [memory[i : i + length]], offset + i // length * stride)
            read.append(raw.to(request.destination.device))
        start = region.starts[1] - groups.start * _BLOCK
        values = decode(read[0], read[1].squeeze(-1))[:, start : start + region.lengths[1]]
        at = rows.start - region.starts[2]
        request.destination[expert, :, at : at + len(rows)].copy_(values.mT)


def _groups(region: Region) -> range:
    """Return the blocks of each row that a region of (E, C, R) touches."""
    return range(region.starts[1] // _BLOCK, -(-(region.starts[1] + region.lengths[1]) // _BLOCK))
