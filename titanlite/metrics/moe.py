"""Health of the MoE layers: how even the load is, also as a picture, where the biases lie, whether rows get lost."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Nine samples of viridis: lightness rises evenly, readable for the colour-blind and in greyscale.
_SAMPLES = bytes.fromhex("440154 472c7a 3b518b 2c718e 21908d 27ad81 5cc863 aadc32 fde725")
_VIRIDIS = np.frombuffer(_SAMPLES, np.uint8).reshape(9, 3).astype(np.float64)
_MAX_SIDE_PX, _CELL_PX, _GAP_FROM_CELL_PX = 1024, 24, 12


@dataclass(frozen=True)
class MoEState:
    """What the MoE layers did in the latest step.

    Attributes:
        tokens_per_expert: rows of valid tokens, (layers, E), over all ranks, any device.
        bias_range: smallest and largest `expert_bias` of each layer, (2, layers); None for routers without.
        row_errors: rows dropped and rows that came twice since the previous point, (2, layers), over all ranks; None
            where no dispatcher tells.
    """

    tokens_per_expert: Tensor
    bias_range: Tensor | None
    row_errors: Tensor | None


def describe_moe(state: MoEState) -> dict[str, list[float]]:
    """Values per layer by metric name. Synchronizes. A layer without tokens has nan for its load."""
    counts = state.tokens_per_expert.detach().to("cpu", torch.float64)
    share = counts / counts.sum(dim=1, keepdim=True)
    # Entropy over that of an even load: 1 is balanced, 0 is one expert that gets all.
    entropy = torch.special.entr(share).sum(dim=1) / math.log(max(counts.shape[1], 2))
    values = {
        "moe/load_max_over_mean": counts.amax(dim=1) / counts.mean(dim=1),
        "moe/load_entropy": entropy,
        "moe/idle_experts": (counts == 0).to(torch.float64).mean(dim=1),
    }
    if state.bias_range is not None:
        low, high = state.bias_range.detach().to("cpu", torch.float64)
        values |= {"moe/expert_bias_min": low, "moe/expert_bias_max": high}
    if state.row_errors is not None:
        values["moe/dropped_rows"], values["moe/duplicated_rows"] = state.row_errors.detach().to("cpu", torch.float64)
    return {name: value.tolist() for name, value in values.items()}


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
