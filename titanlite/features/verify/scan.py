"""One pass over the stored tensors of a folder, and of the model that training began with.

Tensors are streamed: a thread holds 1 MiB of each folder at a time, and computes all facts while it
is in the cache.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.base.process import keep_freed_memory
from titanlite.checkpoint.folder import Stored, StoredTensor
from titanlite.checkpoint.pieces import bytes_of
from titanlite.checkpoint.reader import JOB_BYTES, io_threads, opened, read_bytes, run_jobs
from titanlite.materialize.digest import MODULUS, digest, shift

PLAIN = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_SAMPLE = 1 << 16


# A tensor belongs to the first group whose pattern matches its key.
GROUPS = {
    "norms": "norm",
    "routers, biases": r"(gate|router)\.|bias$",
    "experts": "expert",
    "embedding": "embed|wte",
    "head": "head",
    "attention": "attn|attention",
    "others": "",
}


@dataclass
class Look:
    """Facts of a stored tensor, or of an expert in it.

    Attributes:
        place: 64-bit words of the stored tensor before this part.
        compared: True if the base has it too.
        digest, base_digest: summands of the digests; the second is of the base's tensor with the
            same key and shape.
        finite: no element is NaN or infinite.
        varied: its elements differ, within 1 MiB.
        exact: its first float32 elements have more than 16 bits.
        distance, extent: squared norms of the difference from the base, and of the base, of the
            first 65,536 elements of each MiB.
        power, fourth: mean square, and mean fourth power, of the first 65,536 elements.
        dtype, before, row: as in a certificate: the tensor's dtype, its digest in the base, and its
            whole entry; `scan` leaves them empty.
        is_kept: True if it equals the base's tensor.
    """

    key: str
    shape: tuple[int, ...]
    place: int
    compared: bool
    digest: int = 0
    base_digest: int = 0
    finite: bool = True
    varied: bool = False
    exact: bool = False
    distance: float = 0.0
    extent: float = 0.0
    power: float = 0.0
    fourth: float = 0.0
    dtype: str = ""
    before: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    is_kept: bool = False

    @property
    def own(self) -> int:
        """Digest of its bits, independent of its position."""
        return self.digest * shift(-self.place) % MODULUS

    @property
    def group(self) -> str:
        return next(name for name, pattern in GROUPS.items() if re.search(pattern, self.key))

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and self.varied

    @property
    def change(self) -> float:
        """Norm of the difference from the base, relative to the norm of the base."""
        return math.sqrt(self.distance / self.extent) if self.extent else 0.0

    def is_normal(self, deviation: float) -> bool:
        """Return True if the sample looks like a normal distribution around 0 with standard
        deviation `deviation`, to a tolerance of 5 percent.
        """
        squares = (self.power, deviation**2), (self.fourth, 3 * self.power**2)
        return all(math.isclose(value, wanted, rel_tol=0.05) for value, wanted in squares)


def scan(stored: Stored, base: Stored) -> dict[str, list[Look]]:
    """Read every tensor of `stored` once, and the tensors of `base` with the same key and shape.
    Experts that are stored in one tensor have separate entries.

    Raises CheckpointError: a file cannot be read, or does not match its header.
    """
    found = {key: list[Look]() for key in stored.tensors}
    jobs = []
    for key, tensor in stored.tensors.items():
        other = base.tensors.get(key)
        if other is not None:
            dtypes = {tensor.dtype, other.dtype}
            is_alike = tensor.shape == other.shape and (len(dtypes) == 1 or dtypes <= PLAIN)
            other = other if is_alike else None
        is_split = "expert" in key and len(tensor.shape) > 2
        rows = math.prod(tensor.shape[:1]) if is_split else 1
        count = math.prod(tensor.shape) // max(rows, 1)
        for row in range(rows):
            part = range(row * count, (row + 1) * count)
            look = Look(
                f"{key}[{row}]" if is_split else key,
                tensor.shape[1:] if is_split else tensor.shape,
                part.start * tensor.dtype.itemsize // 8,
                other is not None,
            )
            found[key].append(look)
            jobs.append(partial(_look, look, tensor, other, part))
    keep_freed_memory()  # blocks that are given back cost more than what is done with them
    sizes = stored.file_bytes | base.file_bytes
    with opened(sizes, sizes) as handles:
        run_jobs((partial(job, handles) for job in jobs), io_threads())
    return found


@torch.no_grad()
def _look(
    found: Look,
    stored: StoredTensor,
    base: StoredTensor | None,
    part: range,
    handles: Mapping[Path, int],
) -> None:
    def read(tensor: StoredTensor) -> tuple[torch.Tensor, int]:
        size = tensor.dtype.itemsize
        raw = torch.empty(len(block) * size, dtype=torch.uint8)
        read_bytes(handles, tensor.file, bytes_of(raw), tensor.offset + block.start * size)
        return raw, digest(raw, block.start * size)

    size = stored.dtype.itemsize
    for at in range(0, len(part), JOB_BYTES // size):
        block = part[at : at + JOB_BYTES // size]
        raw, summand = read(stored)
        values = raw.view(stored.dtype)
        found.digest += summand
        found.varied = found.varied or not torch.equal(raw[size:], raw[:-size])
        found.exact = found.exact or bool(raw[:256:4].any())
        if stored.dtype in PLAIN:
            # the sum of finite elements may overflow, rarely
            found.finite &= bool(values.sum().isfinite()) or bool(values.isfinite().all())
            if not at:
                squares = values[:_SAMPLE].float().square()
                found.power, found.fourth = squares.mean().item(), squares.square().mean().item()
        if base is not None:
            raw, summand = read(base)
            before = raw.view(base.dtype)[:_SAMPLE].float()
            found.base_digest += summand
            found.extent += torch.dot(before, before).item()
            before -= values[:_SAMPLE]
            found.distance += torch.dot(before, before).item()
