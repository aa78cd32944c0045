"""The model's tensors and what is stored: keys on disk, and segments that are contiguous in file and shard.

Run-time names are Hugging Face's already; on disk, experts are stored one by one with gate and up apart, and the
router's bias has the family's own name, or none.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from titanlite.materialize import Region
from titanlite.models.families import Family

# Holds the tensors for which the family's architecture has no key; they are kept, never dropped.
SIDECAR_FILE = "expert_bias.safetensors"
# Full-precision parameters of a run whose model files have fewer bits.
MASTER_PREFIX = "master."
# Written by other programs, computed from the configuration here.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
# A layer, or a part of a whole model that a class of text leaves out; and the projection of a layer for multi-token
# prediction, which combines the last layer's result with an embedding.
_PART = re.compile(r"(?:model\.)?(mtp\w*|visual|vision_\w+|audio_\w+|multi_modal_projector)\.|(?:.*?\.)?layers\.\d+\.")
PREDICTION_KEY = "eh_proj.weight"


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor: key and shape are those on disk."""

    key: str
    shape: tuple[int, ...]
    region: Region  # of the run-time tensor; leading dims of length 1 are dropped on disk


def is_sidecar(name: str, family: Family) -> bool:
    """Return True if Hugging Face's architecture has no place for the tensor `name`."""
    return name.endswith(".expert_bias") and family.expert_bias_key is None


def whole(key: str, shape: tuple[int, ...]) -> Piece:
    """Return all of a tensor under one key."""
    return Piece(key, shape, Region((0,) * len(shape), shape))


def checkpoint_pieces(name: str, shape: tuple[int, ...], family: Family) -> Iterator[Piece]:
    """Yield the checkpoint tensors that together store the run-time tensor `name` of global `shape`."""
    prefix, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj" and len(shape) == 3:
        half, width = shape[1] // 2, shape[2]
        for expert in range(shape[0]):
            for part, start in (("gate_proj", 0), ("up_proj", half)):
                region = Region((expert, start, 0), (1, half, width))
                yield Piece(f"{prefix}.{expert}.{part}.weight", (half, width), region)
    elif leaf == "down_proj" and len(shape) == 3:
        for expert in range(shape[0]):
            region = Region((expert, 0, 0), (1, *shape[1:]))
            yield Piece(f"{prefix}.{expert}.down_proj.weight", shape[1:], region)
    else:
        yield whole(
            f"{prefix}.{family.expert_bias_key}" if leaf == "expert_bias" and family.expert_bias_key else name, shape
        )


def find_passengers(keys: Iterable[str], used: Collection[str], patterns: Iterable[str] = ()) -> list[str]:
    """Return the passengers among the stored `keys`: those that a model, which uses `used`, leaves out on purpose.

    Transformers' class passes them over (`patterns`), or they are in a part that `_PART` names, or in a layer for
    multi-token prediction after the last layer; nothing of such a part or layer is used.
    """
    rest = [key for key in keys if key not in used and not key.endswith(IGNORED_SUFFIXES)]
    found = [(key, match) for key in rest if (match := _PART.match(key))]
    parts = {match[0] for key, match in found if match[1] or key == match[0] + PREDICTION_KEY}
    parts -= {part_of(key) for key in used}
    passed = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
    return [key for key in rest if part_of(key) in parts or passed.search(key)]


def part_of(key: str) -> str:
    """Return the layer or part of a model that the stored tensor `key` is in, up to its last dot; or nothing."""
    match = _PART.match(key)
    return match[0] if match else ""


def explain_unexpected(where: str) -> str:
    """Return why a stored tensor that `find_passengers` does not name is refused."""
    return f"unexpected, {where} has it and the model does not. Correct its name, or remove it there."


@dataclass(frozen=True)
class Segments:
    """Equally long segments, in the order of the stored tensor."""

    stored: np.ndarray  # int64 (N,), first element of each segment in the stored tensor
    local: np.ndarray  # the same in the shard
    length: int  # elements per segment

    @property
    def numel(self) -> int:
        return len(self.stored) * self.length

    @property
    def is_local_contiguous(self) -> bool:
        return len(self.local) < 2 or bool((np.diff(self.local) == self.length).all())

    def split(self, max_elements: int, unit: int = 1) -> Iterator["Segments"]:
        """Yield parts of at most `max_elements`; long segments are cut at multiples of `unit` elements."""
        if self.length > max_elements:
            step = max(max_elements // unit, 1) * unit
            for stored, local in zip(self.stored, self.local, strict=True):
                for start in range(0, self.length, step):
                    yield Segments(
                        np.array([stored + start]), np.array([local + start]), min(step, self.length - start)
                    )
        else:
            count = max(max_elements // max(self.length, 1), 1)
            for start in range(0, len(self.stored), count):
                yield Segments(self.stored[start : start + count], self.local[start : start + count], self.length)


def overlap(stored: Region, local: Region) -> Segments | None:
    """Return the elements of `stored` that `local` holds, two regions of one tensor stored row by row; None if none."""
    starts: list[int] = []
    lengths: list[int] = []
    for a, n, b, m in zip(stored.starts, stored.lengths, local.starts, local.lengths, strict=True):
        starts.append(a if a > b else b)
        lengths.append(min(a + n, b + m) - starts[-1])
        if lengths[-1] <= 0:
            return None  # most experts are other ranks'
    run, outer = 1, len(lengths)
    while outer:
        outer -= 1
        run *= lengths[outer]
        if not lengths[outer] == stored.lengths[outer] == local.lengths[outer]:
            break
    return Segments(_offsets(starts, lengths, stored, outer), _offsets(starts, lengths, local, outer), run)


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous one-dimensional CPU tensor."""
    return flat.view(torch.uint8).numpy().data


def _offsets(starts: list[int], lengths: list[int], box: Region, outer: int) -> np.ndarray:
    """Return the first element of every segment inside `box`; the dims before `outer` are walked through."""
    first = 0
    walked: list[tuple[int, int]] = []  # length and stride
    stride = 1
    for dim in reversed(range(len(starts))):
        first += (starts[dim] - box.starts[dim]) * stride
        if dim < outer and lengths[dim] > 1:
            walked.append((lengths[dim], stride))
        stride *= box.lengths[dim]
    offsets = np.array([first], dtype=np.int64)
    for length, stride in reversed(walked):
        offsets = (offsets[:, None] + np.arange(length, dtype=np.int64) * stride).reshape(-1)
    return offsets
