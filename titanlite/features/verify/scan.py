"""One pass over the stored tensors of a folder.

Tensors are streamed: a thread holds 1 MiB of each folder at a time, and computes all facts while it
is in the cache.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titanlite.base.process import count_threads
from titanlite.checkpoint.folder import Stored, StoredTensor
from titanlite.checkpoint.pieces import bytes_of
from titanlite.checkpoint.reader import JOB_BYTES, opened, read_bytes, run_jobs
from titanlite.materialize.digest import bytes_in, digest

PLAIN = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_SAMPLE = 1 << 15  # elements of a block

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
        key: key of the stored tensor; an expert in it has its index after the key.
        shape: shape of the tensor, or of the expert.
        stored: where its elements are, as one dim.
        row: experts of the stored tensor before this one.
        group: its name in `GROUPS`.
        base: facts of the base's tensor with the same key and shape, if there is one.
        digest: digest of its bits, independent of its position.
        finite: no element is NaN or infinite.
        varied: its elements differ, within 1 MiB.
        exact: its first float32 elements have more than 16 bits.
        change: norm of the difference from the base, relative to the norm of the base, of the
            first 32,768 elements of each MiB.
        deviation: standard deviation of its first 32,768 elements, if they look normal around 0.
        dtype, before, entry: as in a certificate: the tensor's dtype, its digest in the base, and
            its whole entry; `scan` leaves them empty.
        is_kept: True if it equals the base's tensor.
    """

    key: str
    shape: tuple[int, ...]
    stored: StoredTensor
    row: int
    group: str
    base: "Look | None" = None
    digest: int = 0
    finite: bool = True
    varied: bool = False
    exact: bool = False
    change: float = 0.0
    deviation: float = 0.0
    dtype: str = ""
    before: str = ""
    entry: Mapping[str, Any] = field(default_factory=dict)
    is_kept: bool = False

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and self.varied

    @property
    def is_fixed(self) -> bool:
        """True if training should not have changed it."""
        return self.entry.get("state") in ("frozen", "carried")


def scan(stored: Stored, base: Sequence[Look] = ()) -> list[Look]:
    """Read every tensor of `stored` once, and samples of the tensors of `base` with the same key
    and shape. Experts that are stored in one tensor have separate facts.

    Raises CheckpointError: a file cannot be read, or does not match its header.
    """
    looks = [look for tensor in stored.values() for look in _looks(tensor)]
    origin = {_kind_of(look): look for look in base}
    for look in looks:
        look.base = origin.get(_kind_of(look))
    todo = iter(looks)
    with opened([*stored.values(), *(look.stored for look in base)]) as handles:

        def work() -> None:
            # new memory for each block would cost more than what is computed from it
            memory = torch.empty(2, JOB_BYTES, dtype=torch.uint8)
            for look in todo:
                _add_facts(look, handles, memory)

        run_jobs([work] * count_threads(), count_threads())
    return looks


def _kind_of(look: Look) -> object:
    """Return the facts in which a tensor and its counterpart in the base must be equal."""
    return look.key, look.shape, look.stored.dtype in PLAIN or look.stored.dtype


def _looks(stored: StoredTensor) -> Iterator[Look]:
    is_split = "expert" in stored.key and len(stored.shape) > 2
    experts = stored.shape[:is_split]
    shape = stored.shape[is_split:]
    rows = math.prod(experts)
    size = stored.nbytes // max(rows, 1)
    group = next(name for name, pattern in GROUPS.items() if re.search(pattern, stored.key))
    for row in range(rows):
        key = f"{stored.key}[{row}]" if is_split else stored.key
        part = stored._replace(
            shape=(size // stored.dtype.itemsize,), offset=stored.offset + row * size, nbytes=size
        )
        yield Look(key, shape, part, row, group)


@torch.no_grad()
def _add_facts(look: Look, handles: Mapping[Path, int], memory: torch.Tensor) -> None:
    """Read a tensor into `memory`, a block at a time, and add up its facts."""
    stored = look.stored
    size = stored.dtype.itemsize
    # an expert may begin in the middle of a word of the stored tensor
    first = look.row * stored.nbytes % 8
    distance = extent = 0.0

    def read(tensor: StoredTensor, count: int, raw: torch.Tensor) -> torch.Tensor:
        width = tensor.dtype.itemsize
        raw = raw[: min(count, tensor.shape[0] - at) * width]
        read_bytes(handles, tensor.file, bytes_of(raw), tensor.offset + at * width)
        return raw.view(tensor.dtype) if tensor.dtype in PLAIN else raw

    for at in range(0, stored.shape[0], JOB_BYTES // size):
        values = read(stored, JOB_BYTES // size, memory[0])
        look.digest += digest(bytes_in(values), first + at * size)
        look.varied = look.varied or not torch.equal(values[1:], values[:-1])
        # the sum of finite elements may overflow, rarely
        look.finite &= math.isfinite(values.sum()) or bool(values.isfinite().all())
        if not at:
            look.exact = bool(bytes_in(values)[:256:4].any())
            squares = values[:_SAMPLE].float().square()
            power = squares.mean().item()
            fourth = torch.dot(squares, squares).item() / len(squares)
            if math.isclose(fourth, 3 * power**2, rel_tol=0.05):
                look.deviation = math.sqrt(power)
        if look.base is not None:
            before = read(look.base.stored, _SAMPLE, memory[1]).float()
            extent += torch.dot(before, before).item()
            before -= values[: len(before)]
            distance += torch.dot(before, before).item()
    look.change = math.sqrt(distance / extent) if extent else 0.0
