"""Triton kernel that decodes the block formats, with its launcher. It reads records once and writes
values once.

torch's operators would go through memory several times, and need an index of four bytes for each
code.
"""

import torch
import triton
import triton.language as tl

from titanlite.features.lora.block_formats import BlockFormat
from titanlite.ops.launchers import cdiv, launch

# per program
VALUES = 4096
WARPS = 8


def decode_blocks(
    records: torch.Tensor, table: torch.Tensor, out: torch.Tensor, layout: BlockFormat
) -> None:
    """Write the values of contiguous uint8 `records` (..., n, record_bytes) to contiguous `out`
    (..., width).
    """
    if records.data_ptr() % 4:  # in a larger buffer, the float32 scales may not be aligned
        records = records.clone()
    count = records.numel() // layout.record_bytes
    at_once = VALUES // layout.block
    pointers = (records, records.view(torch.float32), table, out)
    sizes = (count, records.shape[-2], out.shape[-1])
    constants = {"BLOCK": layout.block, "CODE_BYTES": layout.code_bytes, "RECORDS": at_once}
    constants["LOW_FIRST"] = layout.low_first
    grid = (cdiv(count, at_once),)
    launch(decode_blocks_kernel, grid, *pointers, *sizes, **constants, num_warps=WARPS)


@triton.jit
def decode_blocks_kernel(
    codes_ptr,
    factors_ptr,
    table_ptr,
    out_ptr,
    num_records,
    records_per_row,
    width,
    BLOCK: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    RECORDS: tl.constexpr,
    LOW_FIRST: tl.constexpr,
):
    """Decode RECORDS records per program. `codes` and `factors` point to the same memory, as bytes
    and as float32.
    """
    PER_BYTE: tl.constexpr = BLOCK // CODE_BYTES
    RECORD_BYTES: tl.constexpr = CODE_BYTES + 4
    record = tl.program_id(0).to(tl.int64) * RECORDS + tl.arange(0, RECORDS)
    here = record < num_records
    j = tl.arange(0, BLOCK)
    code = tl.load(
        codes_ptr + record[:, None] * RECORD_BYTES + (j // PER_BYTE)[None, :],
        mask=here[:, None],
        other=0,
    ).to(tl.int32)
    if PER_BYTE == 2:
        half = j % 2 if LOW_FIRST else 1 - j % 2
        code = (code >> (half * 4)[None, :]) & 15
    factor = tl.load(
        factors_ptr + record * (RECORD_BYTES // 4) + CODE_BYTES // 4, mask=here, other=0.0
    )
    value = tl.load(table_ptr + code) * factor[:, None]
    row = record // records_per_row
    column = ((record - row * records_per_row) * BLOCK)[:, None] + j[None, :]
    tl.store(
        out_ptr + row[:, None] * width + column,
        value.to(out_ptr.dtype.element_ty),
        mask=here[:, None] & (column < width),
    )
