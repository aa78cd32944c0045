"""Quantized weights of published folders: each value is a code times the scale of its block.

They are dequantized while they are read. There are two formats:

- FP8, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3). `name.weight` (R, C) or (E, R, C) is
  float8_e4m3fn, and `name.weight_scale_inv` has one scale per block of 128 x 128, or of the size
  that config.json declares. Blocks may be cut at the edges.
- MXFP4 (OCP Microscaling Formats 1.0, sections 5.3 and 6). `name_blocks` (E, R, C / 32, 16) has two
  values of 4 bits (e2m1) in a byte, the first one in the lower half. `name_scales` (E, R, C / 32)
  has an exponent (e8m0) for each block of 1 x 32.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from titanlite.checkpoint.folder import StoredTensor, shown

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MXFP4_BLOCK = (1, 32)


def attach_scales(
    tensors: Mapping[str, StoredTensor], declared: tuple[int, int] | None
) -> dict[str, StoredTensor]:
    """Return `tensors` with the scales of each quantized weight in the weight's entry; separate
    entries of scales are removed. Scales of activations are dropped.

    The two stored tensors of an MXFP4 weight become one entry, `name`, with the shape of the
    weight's values. `declared` is the size of a block of FP8 weights in config.json, or None for
    one scale per tensor.
    """
    found = dict(tensors)
    for key, tensor in tensors.items():
        if tensor.dtype in FP8:
            module = key.removesuffix(".weight")
            suffixes = () if module == key else (".scale", ".qscale_weight")
            keys = [f"{key}_scale_inv", f"{key}_scale", *(module + suffix for suffix in suffixes)]
            scale = next((tensors[k] for k in keys if k in tensors), None)
            if declared is None and scale is not None and scale.shape in ((), (1,)):
                scale = scale._replace(shape=(1, 1))
            found[key] = tensor._replace(scale=scale, block=declared or tensor.shape[-2:])
            for unused in (*keys, f"{module}.activation_scale", f"{module}.input_scale"):
                found.pop(unused, None)
        elif key.endswith("_blocks"):
            name = key.removesuffix("_blocks")
            scale = tensors.get(f"{name}_scales")
            if scale is not None and tensor.dtype == scale.dtype == torch.uint8:
                del found[key], found[scale.key]
                values = (*tensor.shape[:-2], 2 * math.prod(tensor.shape[-2:]))
                found[name] = tensor._replace(
                    key=name, shape=values, scale=scale, block=_MXFP4_BLOCK
                )
    return found


def detach_scales(tensor: StoredTensor) -> list[StoredTensor]:
    """Return the tensors that a folder stores for `tensor`: codes and scales of an MXFP4 weight,
    otherwise `tensor` itself.
    """
    if not tensor.is_packed or tensor.scale is None:
        return [tensor]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // _MXFP4_BLOCK[1], _MXFP4_BLOCK[1] // 2)
    return [tensor._replace(key=f"{tensor.key}_blocks", shape=shape, scale=None), tensor.scale]


def describe_misfit(tensor: StoredTensor) -> str:
    """Return why `tensor` cannot be dequantized: its scales are missing, or do not fit; "" if it
    can, or is not quantized.
    """
    key = shown(tensor.key)
    scale = tensor.scale
    if scale is None:
        is_fp8 = tensor.dtype in FP8
        return f"{key} is {tensor.dtype} without scales ({key}_scale_inv)" if is_fp8 else ""
    if len(tensor.shape) in (2, 3):
        blocks = zip(tensor.shape[-2:], tensor.block, strict=True)
        if scale.shape == (*tensor.shape[:-2], *(-(-size // length) for size, length in blocks)):
            return ""
    return (
        f"{shown(scale.key)} has shape {scale.shape}, which does not fit {tensor.shape} in blocks "
        f"of {tensor.block}"
    )


def read_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32. Scales in uint8 are exponents (e8m0), of which 255 is NaN."""
    is_exponent = scales.dtype == torch.uint8
    return (scales.view(torch.float8_e8m0fnu) if is_exponent else scales).to(torch.float32)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes (..., N) before scaling, in float32: (..., N) of FP8, (..., 2 N)
    of the bytes of MXFP4.
    """
    if codes.dtype in FP8:
        return codes.to(torch.float32)
    table = torch.tensor(E2M1)
    pairs = torch.cartesian_prod(table, table).flip(-1).contiguous()  # both values of each byte
    return F.embedding(codes.to(torch.int32), pairs).flatten(-2)
