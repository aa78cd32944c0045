"""MXFP4 (OCP Microscaling Formats 1.0, sections 5.3 and 6), the format of experts in some published
folders.

`*_blocks` (E, R, C / 32, 16) has two values of 4 bits (e2m1) in a byte, the first one in the lower
half; `*_scales` (E, R, C / 32) has an exponent (e8m0) for each 32 values of a row.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from titanlite.checkpoint.folder import StoredTensor, shown

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def find_packed(
    tensors: Mapping[str, StoredTensor],
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Return blocks and scales of the MXFP4 weights among `tensors`, by the name without `_blocks`
    and `_scales`.
    """
    names = [key.removesuffix("_blocks") for key in tensors if key.endswith("_blocks")]
    return {
        n: (tensors[f"{n}_blocks"], tensors[f"{n}_scales"])
        for n in names
        if f"{n}_scales" in tensors
    }


def describe_misfit(
    packed: tuple[StoredTensor, StoredTensor], shape: tuple[int, ...], rows: int, columns: int
) -> str:
    """Return why blocks and scales do not hold (E, `rows`, `columns`) values of a weight of
    `shape`; "" if they do.
    """
    expected = (shape[0], rows, columns // BLOCK) if columns % BLOCK == 0 else ()
    wanted = [((*expected, BLOCK // 2), torch.uint8), (expected, torch.uint8)]
    if expected and [(part.shape, part.dtype) for part in packed] == wanted:
        return ""
    found = " and ".join(f"{shown(part.key)} {part.dtype} {part.shape}" for part in packed)
    return f"{found} are not {shape} in MXFP4, which is uint8"


def read_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales, float32, of exponents in uint8; 255 encodes NaN."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values (R, 32 G), float32, of blocks (R, G, 16) and scales (R, G), both uint8."""
    table = torch.tensor(E2M1, device=blocks.device)
    pairs = torch.cartesian_prod(table, table).flip(-1).contiguous()  # both values of each byte
    values = F.embedding(blocks.to(torch.int32), pairs).flatten(-2)
    return values.mul_(read_scales(scales).unsqueeze(-1)).flatten(1)
