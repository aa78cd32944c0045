"""Sources: where the value of a tensor comes from. Every tensor has exactly one.

In order of precedence:

1. a tensor that is not on meta keeps its value (`Keep`);
2. a claim from the `sources` of `materialize`: a checkpoint, or a name or pattern; two claims are
an error;
3. the declaration of the module that owns the tensor (`declare_sources`); two declarations are an
error.

A tied tensor is one tensor with several names: the first name is filled, and the rest are `Alias`.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import numpy as np
import torch

from titanlite.materialize.layout import Encoding, Region

_TILE = 256  # rows and columns that an initializer draws from one stream


@dataclass(frozen=True)
class Init:
    """Random or constant initial values, the same for every layout of the tensor."""

    recipe: "Recipe"
    may_be_absent: bool = False  # a checkpoint may omit the tensor; then it is initialized
    dtype: torch.dtype | None = None  # the tensor has this dtype even if the model is cast

    def __str__(self) -> str:
        return f"init {self.recipe}"


@dataclass(frozen=True)
class Compute:
    """A pure function of the configuration (rotary frequencies, position ids)."""

    function: Callable[[], torch.Tensor]  # returns the whole tensor on CPU; called once per rank
    dtype: torch.dtype | None = None  # as in `Init`

    def __str__(self) -> str:
        return f"compute {getattr(self.function, '__name__', 'function')}"


@dataclass(frozen=True)
class Alias:
    """A tie: the same tensor object as `target`. Values are never compared, because meta tensors
    have none.
    """

    target: str

    def __str__(self) -> str:
        return f"alias of {self.target}"


@dataclass(frozen=True)
class Keep:
    """A tensor that was never on meta; its value is preserved bit for bit."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True)
class ReadRequest:
    """One read: `region` of tensor `name` is written into the contiguous `destination`, encoded if
    `encoding` is given.
    """

    name: str
    region: Region
    destination: torch.Tensor
    encoding: Encoding | None = None


class TensorReader(Protocol):
    """A store of named tensors that reads parts of them; `name` is for messages."""

    name: str
    # True if `read` checks in advance that it will write every element of each destination
    proves_coverage: bool

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Write every requested region into its destination, cast to its dtype or encoded."""


@dataclass(frozen=True)
class Read:
    """A read from a checkpoint. A reader gets all its reads in one call, so that it can sort them
    by file offset.
    """

    reader: TensorReader
    name: str
    shape: tuple[int, ...]
    # stored in float32 while other tensors have fewer bits; will be saved in float32 again
    keeps_float32: bool = False

    def __str__(self) -> str:
        return f"checkpoint {self.reader.name}:{self.name}"


Source = Init | Compute | Alias | Keep | Read


@dataclass(frozen=True)
class InvalidClaim:
    """A claim that cannot be followed: the provider's tensor of this name does not fit the model.
    The plan reports `reason`.
    """

    reason: str


@dataclass(frozen=True)
class TensorInfo:
    """Facts about a tensor for its source; `shape` is the global one."""

    fqn: str
    kind: Literal["parameter", "buffer"]
    persistent: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


class SourceProvider(Protocol):
    """A claimant of sources for tensors, by their names; `name` is for messages."""

    name: str
    # True if it must claim every persistent tensor that does not declare `may_be_absent`
    complete: bool

    def __call__(
        self, tensors: Mapping[str, TensorInfo]
    ) -> Iterable[tuple[str, Source | InvalidClaim]]:
        """Yield claims (fully qualified name, source). The plan reports unknown names and double
        claims.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An initializer of one tensor: a distribution with a counter-based generator, independent of
    sharding.

    The global tensor, seen as (rows, last dim), is cut into tiles of 256 x 256. Each tile has its
    own Philox stream, keyed by (seed, tensor name, tile row, tile column). A rank draws on the host
    the tiles that overlap its shard. This takes O(shard) time and memory, and gives the same bits
    on every mesh and device. PyTorch's own DTensor initialization gives every rank of a CPU mesh
    the same numbers, and depends on the layout on CUDA.
    """

    # index along dim 0 of a row of zeros (`padding_idx`), counted from the end if negative
    zero_row: int | None = None

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        listed = ", ".join(
            f"{name}={value:g}"
            for name, value in given
            if value or (name == "zero_row" and value == 0)
        )
        return f"{type(self).__name__.lower()}({listed})"

    def tile(self, generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        """Draw a (rows, cols) float32 tile."""
        raise NotImplementedError

    def fill(
        self, local: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int, name: str
    ) -> None:
        """Write `region` of the tensor `name` of global `shape` into the contiguous `local`, cast
        to its dtype.
        """
        if local.numel() == 0:
            return
        self._draw(local, region, shape, seed, name)
        if self.zero_row is not None:
            index = self.zero_row % shape[0] - region.starts[0]
            if 0 <= index < region.lengths[0]:
                local[index].zero_()

    def _draw(
        self, local: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int, name: str
    ) -> None:
        is_matrix = len(shape) > 1
        cols = shape[-1] if is_matrix else 1
        sizes = (math.prod(shape) // cols, cols)
        left, width = (region.starts[-1], region.lengths[-1]) if is_matrix else (0, 1)
        rest = local.view(-1, width)
        key = np.frombuffer(
            hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), dtype=np.uint64
        )
        for top, height in region.row_runs(shape):
            held = Region((top, left), (height, width))
            blocks = held.in_blocks(_TILE, _TILE)
            for block in itertools.product(*map(range, blocks.starts, blocks.ends)):
                starts = tuple(_TILE * number for number in block)
                lengths = tuple(
                    min(_TILE, size - start) for size, start in zip(sizes, starts, strict=True)
                )
                tile = Region(starts, lengths)
                part = tile.overlap(held)
                assert part is not None, "a tile that the rows do not touch"
                stream = np.random.Philox(key=key, counter=[0, 0, *block])
                values = self.tile(np.random.Generator(stream), *tile.lengths)
                drawn = torch.from_numpy(values[part.within(tile).slices])
                rest[part.within(held).slices].copy_(drawn)
            rest = rest[height:]


@dataclass(frozen=True, kw_only=True)
class Normal(Recipe):
    mean: float = 0.0
    std: float = 1.0

    def tile(self, generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        x = generator.standard_normal((rows, cols), dtype=np.float32)
        x *= np.float32(self.std)
        return x + np.float32(self.mean) if self.mean else x


@dataclass(frozen=True, kw_only=True)
class Uniform(Recipe):
    """Uniform on [low, high)."""

    low: float = 0.0
    high: float = 1.0

    def tile(self, generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        x = generator.random((rows, cols), dtype=np.float32)
        return x * np.float32(self.high - self.low) + np.float32(self.low)


@dataclass(frozen=True, kw_only=True)
class Constant(Recipe):
    value: float = 0.0

    def _draw(
        self, local: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int, name: str
    ) -> None:
        local.fill_(self.value)


def Zeros() -> Constant:  # noqa: N802 - named like the class Normal
    """Return the initializer with zeros."""
    return Constant(value=0.0)


def Ones() -> Constant:  # noqa: N802
    """Return the initializer with ones."""
    return Constant(value=1.0)
