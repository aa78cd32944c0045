"""Launcher of the kernel of the block formats."""

from typing import Any

import torch
import triton

from titanlite.features.lowbit.formats import BlockFormat
from titanlite.features.lowbit.formats_triton import decode_blocks_kernel
from titanlite.ops.launchers import device_of

VALUES, WARPS = 4096, 8  # of one program

# `kernel[grid](...)` takes options beside the kernel's own arguments, which its static type does not know.
_decode: Any = decode_blocks_kernel


def decode_blocks(records: torch.Tensor, table: torch.Tensor, out: torch.Tensor, layout: BlockFormat) -> None:
    """Write the values of contiguous uint8 `records` (..., n, record_bytes) to contiguous `out` (..., width)."""
    if records.data_ptr() % 4:  # a part of a larger buffer, in which a factor is no aligned float32
        records = records.clone()
    count, at_once = records.numel() // layout.record_bytes, VALUES // layout.block
    with device_of(records):
        _decode[(triton.cdiv(count, at_once),)](
            records, records.view(torch.float32), table, out, count, records.shape[-2], out.shape[-1],
            BLOCK=layout.block, CODE_BYTES=layout.code_bytes, RECORD_BYTES=layout.record_bytes, RECORDS=at_once,
            num_warps=WARPS,
        )  # fmt: skip
