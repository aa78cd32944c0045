"""FP8 weights with factors, as DeepSeek-V3's (arXiv:2412.19437, section 3.3): dequantized while they are read.

`name.weight` (R, C) is float8_e4m3fn; `name.weight_scale_inv` (ceil(R / 128), ceil(C / 128)) has one factor per block
of 128 x 128. The weight is the product of both. A factor may also serve a part of a row, a row, or the whole tensor.
"""

from collections.abc import Mapping

import torch

from titanlite.checkpoint.header import StoredTensor, shown

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def companions(key: str) -> list[str]:
    """Return the keys that the factors of an FP8 weight may have, and those for activations, which are not used."""
    module = key.removesuffix(".weight")
    own = (".scale", ".qscale_weight", ".activation_scale", ".input_scale") if module != key else ()
    return [f"{key}_scale_inv", f"{key}_scale", *(module + suffix for suffix in own)]


def find_scale(
    stored: StoredTensor, tensors: Mapping[str, StoredTensor], declared: tuple[int, int] | None
) -> tuple[StoredTensor, tuple[int, int]]:
    """Return the factors (r, c) of an FP8 weight (R, C), of (E, R, C) (E, r, c), and what (rows, columns) one serves.

    Args:
        stored: the weight.
        tensors: all that is stored, by key.
        declared: rows and columns of a block, as config.json has them; edges may cut blocks.

    Raises ValueError: there are none, or they do not fit.
    """
    scale = next((tensors[key] for key in companions(stored.key)[:4] if key in tensors), None)
    if scale is None:
        raise ValueError(f"{shown(stored.key)} is {stored.dtype} without factors ({shown(stored.key)}_scale_inv)")
    shape, grid = stored.shape, scale.shape
    if grid in ((), (1,)):  # one for all
        scale, grid = scale._replace(shape=(1, 1)), (1, 1)
    if len(shape) in (2, 3) and len(grid) == len(shape) and grid[:-2] == shape[:-2] and all((*shape, *grid)):
        if declared is not None and grid[-2:] == scale_shape(shape[-2:], declared):
            return scale, declared
        (r, c), block = grid[-2:], (shape[-2] // grid[-2], shape[-1] // grid[-1])
        # Rows, parts of rows, and all of it speak for themselves; other blocks only where config.json has none.
        if scale_shape(shape[-2:], (r, c)) == block and (declared is None or block[0] == 1 or (r, c) == (1, 1)):
            return scale, block
    raise ValueError(
        f"{shown(scale.key)} has shape {scale.shape}, which does not fit {shape} in blocks of {declared or 'any size'}"
    )


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the factors of a weight of `shape`."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))
