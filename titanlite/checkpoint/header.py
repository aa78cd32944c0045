"""Safetensors headers: which bytes of a file are which tensor. Whatever a file says is checked before it is believed.

Format: the length of the header as 8 little-endian bytes, the header as JSON, then the data. The header maps each name
to `dtype`, `shape` and `data_offsets`, the half-open byte range of the tensor in the data.
https://huggingface.co/docs/safetensors
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.base.files import open_regular, parse_json

# The reference implementation refuses longer headers too.
MAX_HEADER_BYTES = 100_000_000
_PAGE_BYTES = 4096
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file: dtype and shape are those on disk, `offset` is that of its first byte in the
    file.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def rows(self, start: int, length: int) -> "StoredTensor":
        """Return `length` indices of the first dim, from `start` on, as a stored tensor of its own."""
        size = self.nbytes // max(self.shape[0], 1)
        return self._replace(shape=(length, *self.shape[1:]), offset=self.offset + start * size, nbytes=length * size)

    def index(self, i: int) -> "StoredTensor":
        """Return index `i` of the first dim, without that dim."""
        return self.rows(i, 1)._replace(shape=self.shape[1:])


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the safetensors file `path` by key, in the order of their bytes. Reads the header only.

    Raises CheckpointError: `path` cannot be read, is no regular file, is shorter than its header says, or its header is
    not what the format allows: no JSON, a name twice, an unknown dtype, offsets that are out of range, overlap, leave a
    gap, or contradict dtype and shape. Names the file and every such tensor.
    """
    text, file_bytes = _read_text(path)
    table = _parse(path, text)
    data_start = 8 + len(text)
    problems: list[str] = []
    tensors: list[StoredTensor] = []
    for key, entry in table.items():
        if key == "__metadata__":
            continue
        try:
            tensors.append(_check_entry(key, entry, path, data_start, file_bytes))
        except ValueError as error:
            problems.append(f"{shown(key)}: {error}.")
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    if not problems:
        problems = list(_gaps(tensors, data_start, file_bytes))
    raise_problems(CheckpointError, f"checkpoint {path}", problems)
    return {tensor.key: tensor for tensor in tensors}


def encode_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], int]]) -> bytes:
    """Return the header of a file with the given (key, dtype, shape, first byte in the data), padded to a page."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for key, dtype, shape, start in tensors:
        end = start + math.prod(shape) * dtype.itemsize
        table[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    # No other rank writes to a page of the header.
    text += b" " * (-(len(text) + 8) % _PAGE_BYTES)
    return struct.pack("<Q", len(text)) + text


def shown(text: object) -> str:
    """Return `text` from a file fit for a message: printable, and not long."""
    safe = str(text).encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= 200 else f"{safe[:197]}..."


def _read_text(path: Path) -> tuple[bytes, int]:
    where = f"checkpoint {path}"
    try:
        with open_regular(path) as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(8)
            if len(head) < 8:
                raise CheckpointError(
                    f"{where}: has {size} bytes, less than the 8 that a safetensors file begins with."
                )
            (length,) = struct.unpack("<Q", head)
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{where}: says that its header has {length} bytes, but the file has {size} (the most that a "
                    f"header may have is {MAX_HEADER_BYTES}). It is cut off, or no safetensors file."
                )
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(
            f"{where}: there is no such file. Copy it again from where the checkpoint came."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}.") from None
    if len(text) < length:
        raise CheckpointError(f"{where}: ended while its header was read; something is changing it.")
    return text, size


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    where = f"checkpoint {path}"
    try:
        table = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{where}: the header is not valid JSON: {shown(error)}.") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: the header is not a JSON object.")
    metadata = table.get("__metadata__")
    if metadata is not None and not (
        isinstance(metadata, dict)
        and all(isinstance(v, str) and _is_text(k) and _is_text(v) for k, v in metadata.items())
    ):
        raise CheckpointError(f"{where}: __metadata__ in the header is not an object of texts.")
    return table


def _is_text(text: str) -> bool:
    """JSON can spell halves of surrogate pairs, which are no characters."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _check_entry(key: str, entry: Any, path: Path, data_start: int, file_bytes: int) -> StoredTensor:
    """Check the header's entry `key` and return its tensor. Raises ValueError with what is wrong."""
    if not _is_text(key):
        raise ValueError("the name is not valid Unicode")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("its entry is not an object with dtype, shape and data_offsets")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"dtype {shown(repr(name))} is unknown; there are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError(f"shape {shown(shape)} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"data_offsets {shown(offsets)} are not two integers")
    begin, end = offsets
    data_bytes = file_bytes - data_start
    if not 0 <= begin <= end <= data_bytes:
        raise ValueError(
            f"bytes [{shown(begin)}, {shown(end)}) are not within the {data_bytes} bytes of data; "
            "the file is cut off or damaged"
        )
    needed = 0 if 0 in shape else dtype.itemsize
    for size in shape if needed else ():
        needed *= size
        if needed > data_bytes:  # before the product of hostile sizes has a million digits
            raise ValueError(f"{name} {shown(shape)} needs more than the {data_bytes} bytes of data")
    if needed != end - begin:
        raise ValueError(f"{name} {shown(shape)} has {needed} bytes, but its data_offsets span {end - begin}")
    return StoredTensor(key, dtype, tuple(shape), path, data_start + begin, end - begin)


def _gaps(tensors: Iterable[StoredTensor], data_start: int, file_bytes: int) -> Iterable[str]:
    end, before = data_start, "the header"
    for tensor in tensors:
        if tensor.offset < end:
            yield f"{shown(tensor.key)}: its bytes overlap those of {before}."
        elif tensor.offset > end:
            yield f"{shown(tensor.key)}: {tensor.offset - end} bytes before it belong to no tensor."
        if tensor.offset + tensor.nbytes >= end:
            end, before = tensor.offset + tensor.nbytes, shown(tensor.key)
    if end < file_bytes:
        yield f"{file_bytes - end} bytes at its end belong to no tensor."


# FP8 weights with factors, as DeepSeek-V3's (arXiv:2412.19437, section 3.3), are dequantized while they are read.
# `name.weight` (R, C) is float8_e4m3fn; `name.weight_scale_inv` (ceil(R / 128), ceil(C / 128)) has one factor per block
# of 128 x 128. The weight is the product of both. A factor may also serve a part of a row, a row, or the whole tensor.


def companions(key: str) -> list[str]:
    """Return the keys that the factors of an FP8 weight may have, and those for activations, which are not used."""
    module = key.removesuffix(".weight")
    own = (".scale", ".qscale_weight", ".activation_scale", ".input_scale") if module != key else ()
    return [f"{key}_scale_inv", f"{key}_scale", *(module + suffix for suffix in own)]


def find_scale(
    stored: StoredTensor, tensors: Mapping[str, StoredTensor], declared: tuple[int, int] | None
) -> tuple[StoredTensor, tuple[int, int]]:
    """Return the factors (r, c) of an FP8 weight (R, C), of (E, R, C) (E, r, c), and what (rows, columns) one serves.

    `tensors` is all that is stored. `declared` are the rows and columns of a block in config.json; edges may cut
    blocks.

    Raises ValueError: there are none, or they do not fit.
    """
    scale = next((tensors[key] for key in companions(stored.key)[:4] if key in tensors), None)
    if scale is None:
        raise ValueError(f"{shown(stored.key)} is {stored.dtype} without factors ({shown(stored.key)}_scale_inv)")
    shape, grid = stored.shape, scale.shape
    if grid in ((), (1,)):  # one for all
        scale, grid = scale._replace(shape=(1, 1)), (1, 1)
    if len(shape) in (2, 3) and len(grid) == len(shape) and grid[:-2] == shape[:-2] and all((*shape, *grid)):
        if declared is not None and grid[-2:] == scale_shape(shape[-2:], declared):
            return scale, declared
        (r, c), block = grid[-2:], (shape[-2] // grid[-2], shape[-1] // grid[-1])
        # Rows, parts of rows, and all of it speak for themselves; other blocks only where config.json has none.
        if scale_shape(shape[-2:], (r, c)) == block and (declared is None or block[0] == 1 or (r, c) == (1, 1)):
            return scale, block
    raise ValueError(
        f"{shown(scale.key)} has shape {scale.shape}, which does not fit {shape} in blocks of {declared or 'any size'}"
    )


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the factors of a weight of `shape`."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))
