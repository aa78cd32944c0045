"""A folder of safetensors files: the file, offset, dtype and shape of each tensor, found from the
headers alone.

Format: the length of the header as 8 little-endian bytes, the header as JSON, then the data. The
header maps each name to `dtype`, `shape` and `data_offsets`, the half-open byte range of the tensor
in the data. https://huggingface.co/docs/safetensors
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from titanlite.base import files
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.base.files import open_regular, parse_json

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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file: `dtype` and `shape` are as on disk, and `offset` is the
    position of its first byte in the file. `file_bytes` is the size of the file when its header was
    read.

    A quantized weight has scales, one for each `block` of (rows, columns): see `quantized`.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    file_bytes: int
    scale: "StoredTensor | None" = None
    block: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Return True for an MXFP4 weight, which has two values per byte; `shape` counts values."""
        return self.scale is not None and self.dtype == torch.uint8

    def moved(self, folder: Path, to: Path) -> "StoredTensor":
        """Return the same tensor in the copy of `folder` at `to`."""
        scale = self.scale and self.scale.moved(folder, to)
        return self._replace(file=to / self.file.relative_to(folder), scale=scale)


# The tensors of some files, by key.
Stored = dict[str, StoredTensor]


def read_header(path: Path) -> Stored:
    """Return the tensors of the safetensors file `path` by key, in file order. Reads only the
    header.

    Raises CheckpointError: `path` cannot be read or is not a regular file, or the safetensors
    library rejects it: the file is cut off, the header is not JSON, or offsets are out of range,
    overlap, leave a gap, or contradict dtype and shape.
    """
    where = f"checkpoint {path}"
    try:
        with open_regular(path) as file:
            # checks all of the header: ranges, overlaps, gaps, shapes
            with safe_open(path, "numpy"):
                pass
            (length,) = struct.unpack("<Q", file.read(8))
            table = parse_json(file.read(length).decode("utf-8"))
            size = os.fstat(file.fileno()).st_size
        table.pop("__metadata__", None)
        for key, entry in table.items():
            if not isinstance(entry, dict) or entry["dtype"] not in DTYPES:
                raise ValueError(f"{key}: {entry} is not a tensor of a known dtype")
    except FileNotFoundError:
        raise CheckpointError(
            f"{where}: there is no such file. Copy it again from where the checkpoint came."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}.") from None
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{where}: is cut off, damaged, or not a safetensors file: {shown(error)}. Copy it "
            "again from where it came."
        ) from None
    found = []
    for key, entry in table.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        found.append(StoredTensor(key, dtype, shape, path, 8 + length + begin, end - begin, size))
    return {
        tensor.key: tensor
        for tensor in sorted(found, key=lambda tensor: (tensor.offset, tensor.nbytes))
    }


def encode_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], int]]) -> bytes:
    """Return the header of a file, padded to a page; each tensor is given as (key, dtype, shape,
    position of its first byte in the data).
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for key, dtype, shape, start in tensors:
        end = start + math.prod(shape) * dtype.itemsize
        table[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    # Padded to a page, so that no other rank writes to a page of the header.
    text += b" " * (-(len(text) + 8) % _PAGE_BYTES)
    return struct.pack("<Q", len(text)) + text


def shown(text: object) -> str:
    """Return `text` from a file in a form fit for a message: printable and short."""
    safe = str(text).encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= 200 else f"{safe[:197]}..."


INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# Files that titanlite adds to a Hugging Face model are in a subfolder: vLLM reads every
# *.safetensors next to a model without an index, and people copy folders with a glob.
OWN_FOLDER = "titanlite"
CERTIFICATE_FILE = f"{OWN_FOLDER}/certificate.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_model_headers(folder: Path) -> Stored:
    """Return the tensors of the Hugging Face model in `folder` by key, from the headers of
    model.safetensors, or of the files that the index names.

    Raises CheckpointError: there is no model or only pickle files, a file is missing or damaged, or
    two files have the same key. Lists all problems.
    """
    where = f"checkpoint {folder}"
    try:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be listed: {error.strerror}.") from None
    if names is None:
        raise CheckpointError(
            f"{where}: is not a folder. Give a folder with {SINGLE_FILE} or {INDEX_FILE}."
        )
    if SINGLE_FILE in names:
        return read_headers([folder / SINGLE_FILE], where)
    if INDEX_FILE in names:
        weight_map = _read_index(folder / INDEX_FILE)
        return read_headers(
            [folder / name for name in sorted(set(weight_map.values()))], where, weight_map
        )
    if ADAPTER_FILE in names:
        raise CheckpointError(
            f"{where}: has {ADAPTER_FILE}, adapters without their model. Set lora.rank to train "
            f"them on, or merge them: python -m titanlite export {folder} OUT --merge."
        )
    pickles = sorted(name for name in names if name.endswith(_PICKLE_SUFFIXES))
    if pickles:
        raise CheckpointError(
            f"{where}: has {shown(pickles[0])}, but no safetensors file. Pickle files can run code "
            "when they are read, so they never are; convert the model with transformers' "
            "save_pretrained."
        )
    raise CheckpointError(f"{where}: has neither {SINGLE_FILE} nor {INDEX_FILE}.")


def read_headers(
    paths: Iterable[Path], where: str, weight_map: Mapping[str, str] | None = None
) -> Stored:
    """Return the tensors of the files at `paths` by key, from the headers alone; `weight_map` says
    which keys should be in which of them.

    Raises CheckpointError: a file is missing or damaged, or two files have the same key. Lists all
    problems.
    """
    found: Stored = {}
    problems: list[str] = []
    for file in paths:
        try:
            tensors = read_header(file)
        except CheckpointError as error:
            lost = [shown(key) for key, name in (weight_map or {}).items() if name == file.name]
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            of_index = f" {INDEX_FILE} says that it has {lost[0]}{more}." if lost else ""
            problems.append(str(error).removeprefix("checkpoint ") + of_index)
            continue
        problems += [
            f"{shown(key)}: is in {found[key].file.name} and in {file.name}."
            for key in tensors
            if key in found
        ]
        found |= tensors
    raise_problems(CheckpointError, where, problems)
    return found


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises CheckpointError: the file cannot be read (its cause is the OSError), or is not a JSON
    object.
    """
    try:
        value = files.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{where}: there is no {path.name}.") from None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot read {path.name}: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: {path.name} is not valid JSON: {shown(error)}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {path.name} is not a JSON object.")
    return value


def _read_index(path: Path) -> dict[str, str]:
    where = f"checkpoint {path.parent}"
    weight_map = read_json(path, where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: {path.name} has no weight_map.")
    bad = [
        f"{path.name} maps {shown(key)} to {shown(repr(file))}, which is not the name of a "
        "safetensors file in this folder."
        for key, file in weight_map.items()
        # A path could point out of the folder.
        if not isinstance(file, str)
        or not file.endswith(".safetensors")
        or file != Path(file).name
        or not file.isprintable()
        or "\\" in file
    ]
    raise_problems(CheckpointError, where, bad)
    return weight_map
