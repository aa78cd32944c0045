"""Save the sharded model as a Hugging Face folder that `from_pretrained` loads as it stands.

The bytes of every file are laid out from names, shapes and dtypes alone, so each rank knows where its own shards go and
writes them in place: nothing is gathered, and no rank holds more than it already does.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.keys import SIDECAR_FILE, Piece, checkpoint_pieces, is_sidecar
from titanlite.errors import CheckpointError, raise_problems
from titanlite.logger import logger
from titanlite.materialize import Plan, Region, TensorEntry
from titanlite.materialize.layout import local_of
from titanlite.models.decoder import Decoder
from titanlite.models.families import family_of

_FILE_BYTES = 4 * 1024**3
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
}


@dataclass(frozen=True)
class Placed:
    """A checkpoint tensor with its place: `offset` bytes into the data of `file`, in `dtype`."""

    entry: TensorEntry
    piece: Piece
    dtype: torch.dtype
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.piece.region.numel * self.dtype.itemsize


def save_hf_model(model: Decoder, plan: Plan, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write weights, config.json, generation_config.json and tokenizer into `folder`, as `save_pretrained` would.

    The folder appears in one step: everything is written under a temporary name, flushed, and renamed. Parameters are
    cast to `dtype`; buffers keep theirs.

    Raises:
        CheckpointError: on all ranks, if any rank could not write; `folder` is untouched.

    Collectives: four small ones; every rank must call, and all ranks must see the same file system.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    layout = lay_out(plan, model, dtype)
    files = sorted({placed.file for placed in layout})
    on_first = dist.get_rank() == 0
    try:
        _on_all_ranks(folder, (lambda: _start(temporary, layout, files)) if on_first else None)
        _on_all_ranks(folder, lambda: _write_own_shards(temporary, layout))
        _on_all_ranks(
            folder, (lambda: _finish(temporary, folder, model, tokenizer, dtype, layout)) if on_first else None
        )
    except CheckpointError:
        if on_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if on_first and SIDECAR_FILE in files:
        logger.warning(
            "checkpoint: %s has no place for expert_bias, so transformers will choose other experts than this run "
            "did; the %d tensors are kept in %s. For an exact export balance with moe.aux_loss_coeff instead.",
            *(family_of(model.config).architecture, sum(p.file == SIDECAR_FILE for p in layout), SIDECAR_FILE),
        )


def lay_out(plan: Plan, model: Decoder, dtype: torch.dtype) -> list[Placed]:
    """File and offset of every checkpoint tensor, the same on all ranks: in the model's order, files of up to 4 GiB."""
    family = family_of(model.config)
    placed: list[tuple[TensorEntry, Piece, torch.dtype, int, int]] = []
    sidecar: list[Placed] = []
    number, offset, sidecar_offset = 1, 0, 0
    for entry in plan.entries:
        if not entry.info.persistent:
            continue
        stored = dtype if entry.info.kind == "parameter" else entry.dtype
        for piece in checkpoint_pieces(entry.fqn, entry.info.shape, family):
            nbytes = piece.region.numel * stored.itemsize
            if is_sidecar(entry.fqn, family):
                if not bool(entry.tensor.count_nonzero()):  # a replicated buffer: every rank decides alike
                    continue
                sidecar.append(Placed(entry, piece, stored, SIDECAR_FILE, sidecar_offset))
                sidecar_offset += nbytes
                continue
            if offset and offset + nbytes > _FILE_BYTES:
                number, offset = number + 1, 0
            placed.append((entry, piece, stored, number, offset))
            offset += nbytes
    names = {
        i: f"model-{i:05d}-of-{number:05d}.safetensors" if number > 1 else "model.safetensors"
        for i in range(number + 1)
    }
    return [Placed(e, p, d, names[file], start) for e, p, d, file, start in placed] + sidecar


def _header(tensors: Sequence[Placed]) -> bytes:
    """Safetensors header: length, then JSON, padded so that the data is 8-byte aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for t in tensors:
        table[t.piece.key] = {
            "dtype": _DTYPE_NAMES[t.dtype],
            "shape": list(t.piece.shape),
            "data_offsets": [t.offset, t.offset + t.nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _start(temporary: Path, layout: Sequence[Placed], files: Sequence[str]) -> None:
    """Make the files, full size, with their headers."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in files:
        tensors = [t for t in layout if t.file == name]
        header = _header(tensors)
        size = len(header) + sum(t.nbytes for t in tensors)
        with open(temporary / name, "wb") as file:
            file.write(header)
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows now, not in the middle
            file.truncate(size)


def _write_own_shards(temporary: Path, layout: Sequence[Placed]) -> None:
    """Write this rank's part of every tensor in place; of several replicas the first one writes."""
    descriptors: dict[str, int] = {}
    data_starts: dict[str, int] = {}
    try:
        for placed in layout:
            if not _is_first_replica(placed.entry.tensor):
                continue
            if placed.file not in descriptors:
                descriptors[placed.file] = os.open(temporary / placed.file, os.O_RDWR)
                data_starts[placed.file] = 8 + struct.unpack("<Q", os.pread(descriptors[placed.file], 8, 0))[0]
            _write_piece(placed, descriptors[placed.file], data_starts[placed.file])
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _is_first_replica(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(index == 0 for index, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate())


def _write_piece(placed: Placed, descriptor: int, data_start: int) -> None:
    """Write the rows of `placed` that this rank holds: in one call if they are whole rows, else row by row."""
    mine, piece = placed.entry.region, placed.piece.region
    starts = [max(a, b) for a, b in zip(mine.starts, piece.starts, strict=True)]
    ends = [
        min(a + n, b + m) for a, n, b, m in zip(mine.starts, mine.lengths, piece.starts, piece.lengths, strict=True)
    ]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return
    index = tuple(slice(s - a, e - a) for s, e, a in zip(starts, ends, mine.starts, strict=True))
    local = local_of(placed.entry.tensor)[index].to("cpu", placed.dtype).contiguous()

    # Place of the part in the piece; both have the same dims, those dropped on disk have length 1.
    part = Region(
        tuple(s - b for s, b in zip(starts, piece.starts, strict=True)),
        tuple(e - s for s, e in zip(starts, ends, strict=True)),
    )
    part, cols = _at_least_2d(part), piece.lengths[-1] if piece.lengths else 1
    data = local.flatten().view(torch.uint8).numpy().data
    row_bytes, done = part.lengths[-1] * placed.dtype.itemsize, 0
    for row, count in part.row_runs(_at_least_2d(piece).lengths):
        whole_rows = part.lengths[-1] == cols
        for first, rows in [(row, count)] if whole_rows else [(row + i, 1) for i in range(count)]:
            offset = data_start + placed.offset + (first * cols + part.starts[-1]) * placed.dtype.itemsize
            _write_all(descriptor, data[done : done + rows * row_bytes], offset)
            done += rows * row_bytes


def _at_least_2d(region: Region) -> Region:
    """The region of a scalar or vector as one row of a matrix."""
    missing = max(2 - len(region.lengths), 0)
    return Region((0,) * missing + region.starts, (1,) * missing + region.lengths)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """`pwrite` until everything is written; one call writes at most 2 GiB on Linux."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _finish(
    temporary: Path, folder: Path, model: Decoder, tokenizer: Any, dtype: torch.dtype, layout: Sequence[Placed]
) -> None:
    """Write index, configuration and tokenizer, flush, and let the folder appear; an older one is replaced."""
    from transformers import AutoConfig, GenerationConfig  # costs a second, and only saving needs it

    weights = [t for t in layout if t.file != SIDECAR_FILE]
    if len({t.file for t in weights}) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in weights)},
            "weight_map": {t.piece.key: t.file for t in sorted(weights, key=lambda t: t.piece.key)},
        }
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = AutoConfig.for_model(
        model.config.family,
        **family_of(model.config).to_hf(model.config),
        dtype=str(dtype).removeprefix("torch."),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(temporary)
    GenerationConfig.from_model_config(config).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    for path in [*temporary.iterdir(), temporary]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def _on_all_ranks(folder: Path, action: Callable[[], None] | None) -> None:
    """Run `action` where there is one, then let all ranks go on, or all raise what went wrong on any of them."""
    failure = None
    try:
        if action is not None:
            action()
    except (OSError, ValueError, RuntimeError) as error:
        failure = f"{error} (rank {dist.get_rank()})"
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    problems = [text for text in failures if text is not None]
    raise_problems(
        CheckpointError, f"checkpoint: cannot save to {folder}; free space or change job.dump_folder", problems
    )
