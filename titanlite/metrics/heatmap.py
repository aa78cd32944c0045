"""The expert-load heat map, drawn with numpy alone: matplotlib would be a large dependency for one picture."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Nine samples of viridis: lightness rises evenly, readable for the colour-blind and in greyscale.
_VIRIDIS = np.array(
    [
        *((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141)),
        *((39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37)),
    ],
    dtype=np.float64,
)
_MAX_SIDE_PX = 1024
_CELL_PX = 24
_GAP_FROM_CELL_PX = 12


def expert_load_image(tokens_per_expert: Tensor) -> NDArray[np.uint8]:
    """Draw token counts (layers, E) as an RGB picture (height, width, 3): layer 0 on top, expert 0 on the left.

    Colour is log2 of load / mean load of the layer: 1/4 and less is dark violet, 1 (balanced) is the teal in the
    middle, 4 and more is yellow. An expert without any token is black. The scale is fixed, so pictures of different
    steps compare.
    """
    counts = tokens_per_expert.detach().to("cpu", torch.float64).numpy()
    mean = counts.mean(axis=1, keepdims=True)
    ratio = counts / np.where(mean > 0, mean, 1.0)
    position = (np.log2(np.clip(ratio, 0.25, 4.0)) + 2.0) / 4.0 * (len(_VIRIDIS) - 1)
    samples = np.arange(len(_VIRIDIS))
    cells = np.stack([np.interp(position, samples, _VIRIDIS[:, channel]) for channel in range(3)], axis=-1)
    cells[counts == 0] = 0.0

    height_px, width_px = (max(1, min(_CELL_PX, _MAX_SIDE_PX // size)) for size in counts.shape)
    image = cells.round().astype(np.uint8).repeat(height_px, axis=0).repeat(width_px, axis=1)
    # One dark pixel between cells, where they are wide enough to spare it.
    if height_px >= _GAP_FROM_CELL_PX:
        image[height_px - 1 :: height_px] = 0
    if width_px >= _GAP_FROM_CELL_PX:
        image[:, width_px - 1 :: width_px] = 0
    return image
