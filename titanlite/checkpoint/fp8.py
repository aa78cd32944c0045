"""Block-scaled FP8 weights, DeepSeek-V3's format (arXiv:2412.19437, section 3.3): dequantized while they are read.

`name.weight` (R, C) is float8_e4m3fn; `name.weight_scale_inv` (ceil(R / 128), ceil(C / 128)) has one factor per block
of 128 x 128. The weight is the product of both.
"""

import numpy as np
import torch

SCALE_SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the factors of a weight of `shape`."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def dequantize(
    raw: torch.Tensor, first: np.ndarray, cols: int, scale: torch.Tensor, first_scale_row: int, block: tuple[int, int]
) -> torch.Tensor:
    """Elements (N, L) of a weight with `cols` columns, as float32.

    Args:
        raw: (N, L) float8; each row is a segment of elements inside one row of the weight.
        first: (N,) index of each segment's first element in the weight; all segments begin at the same column.
        cols: columns of the weight.
        scale: (S, ceil(cols / block[1])) the rows of factors from `first_scale_row` on, those that the segments need.
        first_scale_row: see `scale`.
        block: rows and columns of a block.
    """
    each_column = torch.arange(raw.shape[1])
    return raw.to(torch.float32).mul_(factors_at(each_column, first, cols, scale, first_scale_row, block))


def factors_at(
    columns: torch.Tensor,
    first: np.ndarray,
    cols: int,
    scale: torch.Tensor,
    first_scale_row: int,
    block: tuple[int, int],
) -> torch.Tensor:
    """Factors (N, C), float32, of the elements at `columns` (C,) of each segment; the rest as in `dequantize`."""
    scale_rows = torch.from_numpy(first // cols // block[0] - first_scale_row)
    scale_cols = (int(first[0]) % cols + columns) // block[1]
    return scale.to(torch.float32)[scale_rows][:, scale_cols]
