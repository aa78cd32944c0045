"""From the model's tensors to Hugging Face's checkpoint keys: which part of a tensor is stored under which key.

Run-time names are Hugging Face's already; on disk, experts are stored one by one with gate and up apart, and the
router's bias has the family's own name, or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.materialize import Region
from titanlite.models.families import Family

# Holds the tensors for which the family's architecture has no key; they are kept, never dropped.
SIDECAR_FILE = "expert_bias.safetensors"
# Full-precision parameters of a run whose model files have fewer bits.
MASTER_PREFIX = "master."
# Written by other programs, computed from the configuration here.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor.

    Attributes:
        key: its key on disk.
        shape: its shape on disk.
        region: the part of the run-time tensor that it stores; leading dims of length 1 are dropped on disk.
    """

    key: str
    shape: tuple[int, ...]
    region: Region


def is_sidecar(name: str, family: Family) -> bool:
    """Return True if Hugging Face's architecture has no place for the tensor `name`."""
    return name.endswith(".expert_bias") and family.expert_bias_key is None


def whole(key: str, shape: tuple[int, ...]) -> Piece:
    """All of a tensor under one key."""
    return Piece(key, shape, Region((0,) * len(shape), shape))


def checkpoint_pieces(name: str, shape: tuple[int, ...], family: Family) -> Iterator[Piece]:
    """Checkpoint tensors that together store the run-time tensor `name` of global `shape`."""
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
