"""Map from run-time tensors to Hugging Face's checkpoint keys: which part of a tensor is stored
under which key.

Run-time names are Hugging Face's. On disk, experts are stored one by one with gate and up apart, or
fused as in memory, or transposed. The key of the router's bias depends on the family, or does not
exist. A family may have its own names, rows in a different order, and names of a larger model that
contains it.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from titanlite.checkpoint.folder import OWN_FOLDER
from titanlite.config.model import ModelConfig
from titanlite.materialize import Region
from titanlite.models.families import family_of
from titanlite.models.families.family import Family

# Holds the tensors for which the family's architecture has no key.
SIDECAR_FILE = f"{OWN_FOLDER}/expert_bias.safetensors"
# Prefix of full-precision parameters, for runs whose model files are in a smaller dtype.
MASTER_PREFIX = "master."
# Written by other programs; titanlite computes these tensors from the configuration.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
# Matches the beginning of keys in a layer, or in a part that text-only classes do not have.
_PART = re.compile(
    r"(?:model\.)?(mtp\w*|visual|vision_\w+|audio_\w+|multi_modal_projector)\.|(?:.*?\.)?layers\.\d+\."
)
# A layer with this weight is for multi-token prediction: the projection combines the last layer's
# result with an embedding.
PREDICTION_KEY = "eh_proj.weight"
# Fused weights of experts, with the matrices that are stored for each expert.
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
BASE = "model."  # prefix of all run-time names except the head's
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Layout:
    """How a model's files name its tensors: the prefix of the base model, and whether all experts
    of a layer are one tensor.
    """

    prefix: str = BASE
    is_fused: bool = False

    def key(self, name: str) -> str:
        """Return the key under which the run-time tensor or module `name` is stored."""
        return self.prefix + name.removeprefix(BASE) if name.startswith(BASE) else name


def find_layout(keys: Collection[str], family: Family) -> Layout:
    """Return the layout of the files with these `keys`."""
    larger = family.larger
    is_part = larger is not None and any(key.startswith(larger.prefix) for key in keys)
    prefix = larger.prefix if larger is not None and is_part else BASE
    experts = re.compile(re.escape(prefix) + r"layers\.\d+\..*\.experts\.gate_up_proj")
    return Layout(prefix, family.keeps_fused_experts and any(map(experts.fullmatch, keys)))


@dataclass(frozen=True)
class Piece:
    """The place of a region of a run-time tensor in a checkpoint tensor; `key` and `shape` are as
    on disk.

    On disk the region is contiguous and starts at `row`; the stored tensor may have a different
    number of dims. Several pieces with the same key are in the order of their rows, and together
    fill the tensor.
    """

    key: str
    shape: tuple[int, ...]
    region: Region
    row: int = 0
    is_transposed: bool = False  # on disk the last two dims of the region are swapped

    def as_stored(self, box: Region) -> Region:
        """Return `box`, a part of the region, in coordinates relative to the region and with dims
        in the order on disk.
        """
        here = box.within(self.region)
        return here.transposed() if self.is_transposed else here

    def runs(self, box: Region) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the checkpoint tensor that hold `box`, as (index of the first
        element, number of elements). One after another, they hold the elements of `as_stored(box)`
        in row-major order.
        """
        before = self.row * math.prod(self.shape[1:])
        for first, count in self.as_stored(box).runs(self.as_stored(self.region).lengths):
            yield before + first, count

    def slabs(self, box: Region, elements: int) -> Iterator[Region]:
        """Return `box` in parts of at most `elements` elements, in the order on disk."""
        if not self.is_transposed:
            return box.slabs(elements)
        return (slab.transposed() for slab in box.transposed().slabs(elements))


def is_sidecar(name: str, family: Family) -> bool:
    """Return True if Hugging Face's architecture has no key for the tensor `name`."""
    return name.endswith(".expert_bias") and family.expert_bias_key is None


def whole(key: str, shape: tuple[int, ...]) -> Piece:
    """Return a piece that is a whole tensor under one key."""
    return Piece(key, shape, Region((0,) * len(shape), shape))


def checkpoint_pieces(
    name: str, shape: tuple[int, ...], config: ModelConfig, layout: Layout
) -> Iterator[Piece]:
    """Yield the checkpoint tensors that together store the run-time tensor `name` of global
    `shape`, in files of this `layout`, or in the sidecar.
    """
    names = family_of(config).stored_names
    if is_sidecar(name, family_of(config)):
        yield whole(name, shape)
        return
    for piece in _named_pieces(name, shape, config, layout):
        key = piece.key
        for pattern, stored_name in names.items():
            key = re.sub(pattern, stored_name, key)
        yield replace(piece, key=key) if names else piece


def _named_pieces(
    name: str, shape: tuple[int, ...], config: ModelConfig, layout: Layout
) -> Iterator[Piece]:
    """Yield pieces under the keys that most families have."""
    family = family_of(config)
    key = layout.key(name)
    prefix, _, leaf = key.rpartition(".")
    if family.transposes_experts and len(shape) == 3:
        region = Region((0, 0, 0), shape)
        yield Piece(key, (shape[0], shape[2], shape[1]), region, is_transposed=True)
    elif rows := list(stored_rows(name, config)):
        yield from in_rows(key, shape, rows)
    elif leaf in _EXPERT_PARTS and len(shape) == 3 and not layout.is_fused:
        parts = _EXPERT_PARTS[leaf]
        experts, rows, width = shape
        rows //= len(parts)
        for expert in range(experts):
            for i, part in enumerate(parts):
                region = Region((expert, i * rows, 0), (1, rows, width))
                yield Piece(f"{prefix}.{expert}.{part}.weight", (rows, width), region)
    elif leaf == "expert_bias" and family.expert_bias_key:
        stored_shape = (*[1] * (family.expert_bias_dims - 1), *shape)
        yield Piece(f"{prefix}.{family.expert_bias_key}", stored_shape, Region((0,), shape))
    else:
        yield whole(key, shape)


def in_rows(key: str, shape: tuple[int, ...], rows: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """Yield the pieces of a tensor under one key, whose `rows` are in the order that `stored_rows`
    returns.
    """
    row = 0
    for start, count in rows:
        region = Region((start, *[0] * (len(shape) - 1)), (count, *shape[1:]))
        yield Piece(key, shape, region, row)
        row += count


def stored_rows(name: str, config: ModelConfig) -> Iterable[tuple[int, int]]:
    """Return the rows of the run-time tensor `name` as (first row, number of rows), in the order in
    which they are stored; empty if that is their order in memory.
    """
    orders = family_of(config).row_orders
    return next((order(config) for key, order in orders.items() if re.search(key, name)), ())


def find_passthrough(
    keys: Iterable[str], used: Collection[str], patterns: Iterable[str] = ()
) -> list[str]:
    """Return the passthrough tensors among the stored `keys`: tensors that the model does not have,
    by design. `used` are the keys that the model reads.

    Such a tensor matches `patterns`, which transformers' class ignores; or it is in a part that
    `_PART` names, or in a layer for multi-token prediction, and the model reads nothing from that
    part or layer.
    """
    rest = [key for key in keys if key not in used and not key.endswith(IGNORED_SUFFIXES)]
    found = [(key, match) for key in rest if (match := _PART.match(key))]
    parts = {match[0] for key, match in found if match[1] or key == match[0] + PREDICTION_KEY}
    parts -= {part_of(key) for key in used}
    passed = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
    return [key for key in rest if part_of(key) in parts or passed.search(key)]


def part_of(key: str) -> str:
    """Return the layer or part of a model that the stored tensor `key` is in, up to its last dot;
    "" if it is in none.
    """
    match = _PART.match(key)
    return match[0] if match else ""


def explain_unexpected(where: str) -> str:
    """Return why a stored tensor is refused that is not among `find_passthrough`."""
    return (
        f"unexpected, {where} has it and the model does not. Correct its name, or remove it there."
    )


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous one-dimensional CPU tensor."""
    return flat.view(torch.uint8).numpy().data
