"""Triton kernel of the block formats: records are read once, values written once.

Torch's operators would go through memory several times, and look codes up with an index of four bytes each.
"""

import triton
import triton.language as tl


@triton.jit
def decode_blocks_kernel(
    codes_ptr, factors_ptr, table_ptr, out_ptr, num_records, records_per_row, width,
    BLOCK: tl.constexpr, CODE_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Values of RECORDS records. `codes` and `factors` are the same memory, as bytes and as float32."""
    PER_BYTE: tl.constexpr = BLOCK // CODE_BYTES
    record = tl.program_id(0).to(tl.int64) * RECORDS + tl.arange(0, RECORDS)
    here = record < num_records
    j = tl.arange(0, BLOCK)
    code = tl.load(
        codes_ptr + record[:, None] * RECORD_BYTES + (j // PER_BYTE)[None, :], mask=here[:, None], other=0
    ).to(tl.int32)
    if PER_BYTE == 2:
        code = (code >> ((1 - j % 2) * 4)[None, :]) & 15
    factor = tl.load(factors_ptr + record * (RECORD_BYTES // 4) + CODE_BYTES // 4, mask=here, other=0.0)
    value = tl.load(table_ptr + code) * factor[:, None]
    row = record // records_per_row
    column = ((record - row * records_per_row) * BLOCK)[:, None] + j[None, :]
    tl.store(
        out_ptr + row[:, None] * width + column,
        value.to(out_ptr.dtype.element_ty),
        mask=here[:, None] & (column < width),
    )
