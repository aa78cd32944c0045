"""Initialization recipes, drawn from a counter-based generator that does not know how the tensor is sharded.

The global tensor, seen as (rows, last dim), is cut into tiles of 256 x 256. Each tile has its own Philox stream, keyed
by (seed, tensor name, tile row, tile column). A rank draws the tiles that overlap its shard: O(shard) time and memory
for any mesh, and the same bits on every mesh, on CPU and on CUDA (drawing is done on the host).

PyTorch's own DTensor initialization on a CPU mesh gives every rank the same numbers, and on CUDA depends on the layout.
"""

import hashlib
import math
from dataclasses import dataclass, fields

import numpy as np
import torch

from titanlite.materialize.layout import Region

_TILE = 256


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A distribution to draw one tensor from, tile by tile."""

    zero_row: int | None = None  # index along dim 0 that is zero instead (`padding_idx`), from the end if negative

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        listed = ", ".join(f"{name}={value:g}" for name, value in given if value or (name == "zero_row" and value == 0))
        return f"{type(self).__name__.lower()}({listed})"

    def tile(self, generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        """Draw a (rows, cols) float32 tile."""
        raise NotImplementedError

    def fill(self, local: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int, name: str) -> None:
        """Write `region` of the tensor `name` of global `shape` into `local`, in place, cast to its dtype."""
        if local.numel() == 0:
            return
        rows = local if local.is_contiguous() else torch.empty_like(local, memory_format=torch.contiguous_format)
        self._draw(rows, region, shape, seed, name)
        if self.zero_row is not None:
            index = self.zero_row % shape[0] - region.starts[0]
            if 0 <= index < region.lengths[0]:
                rows[index].zero_()
        if rows is not local:
            local.copy_(rows)

    def _draw(self, local: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int, name: str) -> None:
        cols = shape[-1] if len(shape) > 1 else 1
        col_start, col_count = (region.starts[-1], region.lengths[-1]) if len(shape) > 1 else (0, 1)
        flat = local.view(-1, col_count)
        key = np.frombuffer(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), dtype=np.uint64)
        total_rows = math.prod(shape) // cols
        done = 0
        for row_start, row_count in region.row_runs(shape):
            row_end = row_start + row_count
            for tile_row in range(row_start // _TILE, -(-row_end // _TILE)):
                top = tile_row * _TILE
                height = min(_TILE, total_rows - top)
                first, last = max(row_start, top), min(row_end, top + height)
                band = np.empty((last - first, col_count), dtype=np.float32)
                for tile_col in range(col_start // _TILE, -(-(col_start + col_count) // _TILE)):
                    left = tile_col * _TILE
                    width = min(_TILE, cols - left)
                    begin, end = max(col_start, left), min(col_start + col_count, left + width)
                    stream = np.random.Philox(key=key, counter=[0, 0, tile_row, tile_col])
                    tile = self.tile(np.random.Generator(stream), height, width)
                    band[:, begin - col_start : end - col_start] = tile[
                        first - top : last - top, begin - left : end - left
                    ]
                flat[done : done + last - first].copy_(torch.from_numpy(band))
                done += last - first


@dataclass(frozen=True, kw_only=True)
class Normal(Recipe):
    mean: float = 0.0
    std: float = 1.0

    def tile(self, generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        x = generator.standard_normal((rows, cols), dtype=np.float32)
        x *= np.float32(self.std)
        return x + np.float32(self.mean) if self.mean else x


@dataclass(frozen=True, kw_only=True)
class TruncatedNormal(Recipe):
    """Normal distribution cut off at `bound` standard deviations (before scaling by `std`)."""

    mean: float = 0.0
    std: float = 1.0
    bound: float = 3.0

    def tile(self, generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
        inside = math.erf(self.bound / math.sqrt(2.0))  # inverse CDF: one draw per element, no rejection loop
        u = torch.from_numpy(generator.uniform(-inside, inside, (rows, cols)))
        return (torch.erfinv(u) * (math.sqrt(2.0) * self.std) + self.mean).to(torch.float32).numpy()


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

    def _draw(self, local: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int, name: str) -> None:
        local.fill_(self.value)


def Zeros() -> Constant:  # noqa: N802 - reads as a recipe beside Normal
    """Return the recipe of zeros."""
    return Constant(value=0.0)


def Ones() -> Constant:  # noqa: N802
    """Return the recipe of ones."""
    return Constant(value=1.0)
