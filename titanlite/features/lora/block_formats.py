"""Block-quantized frozen weights: the values of a block share a scale (`factor` in names), and each
value is a small code (QLoRA, arXiv:2305.14314).

- `fp8`: codes are float8_e4m3fn, and a block has 128 values. It stores DeepSeek-V3's weights
  (arXiv:2412.19437, section 3.3) bit for bit; their scales cover 128 x 128 values.
- `nf4`: codes are 4-bit NormalFloat (arXiv:2305.14314, section 3 and appendix E). A block has 64
  values, and its scale is their largest magnitude. A byte holds two codes, the first one in the
  upper half, as in bitsandbytes.
- `mxfp4`: codes are e2m1 (OCP Microscaling Formats 1.0). A block has 32 values, and its scale is a
  power of two. A byte holds two codes, the first one in the lower half. Only experts have this
  format; published MXFP4 weights are stored bit for bit.

A record holds the codes of one block, followed by its scale, float32 in the byte order of the
machine. Records follow one another along the last dim of a weight and are independent, so a weight
may be split between any rows, and along its columns between records.

`encode_weights` replaces parameters of a model on meta, in place: `weight` (out, in) becomes
records (out, n, r), marked by a `materialize.layout.Encoding`. The parameter's name does not
change; checkpoints, initializers and plans still describe its values. Records are stored in the
matmul dtype, so that FSDP all-gathers them without a cast; r is the record size in elements of this
dtype. Matmuls decode the records in forward and again in backward, so autograd saves only the
records.

Shapes: N rows, W values per row, n records per row. In matmuls: M rows, E groups, K reduction, N
columns.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from titanlite.checkpoint.quantized import E2M1
from titanlite.config.schema import BLOCK_SIZES
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize.layout import Region, set_encoding
from titanlite.models.interface import Model
from titanlite.models.layers import Linear, OutputHead
from titanlite.models.moe import Experts
from titanlite.ops.kernels import has_triton, operator
from titanlite.ops.matmul import GroupedGemmBackend, grouped_gemm

_FACTOR_BYTES = 4
_LARGEST_FP8 = 448.0
_NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution, scaled to -1 and 1, as appendix E prints them."""
_CHUNK = 1 << 20
"""Values that torch's operators decode at a time; their temporaries are a few times as large."""


@dataclass(frozen=True)
class BlockFormat:
    """Layout of a record, which holds the codes and the scale of one block.

    Attributes:
        name: name in the configuration.
        block: number of values in a record.
        code_bytes: bytes of the codes in a record.
        low_first: of two codes in a byte, the first one is in the lower half.
    """

    name: str
    block: int
    code_bytes: int
    low_first: bool = False

    @property
    def record_bytes(self) -> int:
        return self.code_bytes + _FACTOR_BYTES

    def num_records(self, width: int) -> int:
        """Count the records of a row of `width` values; the last one is padded with zeros."""
        return -(-width // self.block)


FP8 = BlockFormat("fp8", BLOCK_SIZES["fp8"], code_bytes=128)
NF4 = BlockFormat("nf4", BLOCK_SIZES["nf4"], code_bytes=32)
MXFP4 = BlockFormat("mxfp4", BLOCK_SIZES["mxfp4"], code_bytes=16, low_first=True)
BLOCK_FORMATS = {layout.name: layout for layout in (FP8, NF4, MXFP4)}


def encode_blocks(values_NW: torch.Tensor, layout: BlockFormat) -> torch.Tensor:
    """Encode values as records (N, n, record_bytes), uint8, on their device.

    A record with a NaN or infinite value becomes all NaN. A value halfway between two codes may get
    either.
    """
    values_NnB = _in_blocks(values_NW.to(torch.float32), layout)
    largest_Nn1 = values_NnB.abs().amax(dim=-1, keepdim=True)
    largest_Nn1 = torch.where(largest_Nn1.isfinite(), largest_Nn1, torch.nan)
    if layout is MXFP4:
        return _encode_mxfp4(values_NnB, largest_Nn1)
    # Clamped to the smallest normal float32, so that a block of zeros does not compute 0 / 0.
    factor_Nn1 = (largest_Nn1 / (_LARGEST_FP8 if layout is FP8 else 1)).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    if layout is FP8:
        codes = (
            (values_NnB / factor_Nn1)
            .clamp(-_LARGEST_FP8, _LARGEST_FP8)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
        )
        return _join(codes, factor_Nn1)
    middles = _table(NF4.name, values_NW.device)
    middles = (middles[1:] + middles[:-1]) / 2
    index_NnB = torch.bucketize(values_NnB / factor_Nn1, middles, out_int32=True).to(torch.uint8)
    return _join(index_NnB[..., 0::2] << 4 | index_NnB[..., 1::2], factor_Nn1)


def _encode_mxfp4(values_NnB: torch.Tensor, largest_Nn1: torch.Tensor) -> torch.Tensor:
    """Encode as in the specification: the largest magnitude gets the largest exponent of e2m1, and
    scaled values above 6 become 6.
    """
    _, exponent_Nn1 = largest_Nn1.frexp()
    factor_Nn1 = torch.ones_like(largest_Nn1).ldexp((exponent_Nn1 - 3).clamp(min=-126))
    factor_Nn1 = torch.where(largest_Nn1.isnan(), torch.nan, factor_Nn1)
    magnitudes = _table(MXFP4.name, values_NnB.device)[:8]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(values_NnB.abs() / factor_Nn1, middles, out_int32=True)
    codes = (codes + 8 * (values_NnB < 0)).to(torch.uint8)
    return _join(codes[..., 0::2] | codes[..., 1::2] << 4, factor_Nn1)


def _in_blocks(values_NW: torch.Tensor, layout: BlockFormat) -> torch.Tensor:
    rows, width = values_NW.shape
    count = layout.num_records(width)
    return F.pad(values_NW, (0, count * layout.block - width)).view(rows, count, layout.block)


def _join(codes: torch.Tensor, factor_Nn1: torch.Tensor) -> torch.Tensor:
    return torch.cat([codes, factor_Nn1.contiguous().view(torch.uint8)], dim=-1)


def decode_blocks(
    records: torch.Tensor,
    layout: BlockFormat,
    width: int,
    dtype: torch.dtype,
    *,
    in_backward: bool = False,
) -> torch.Tensor:
    """Decode records (..., n, record_bytes in any dtype) to values (..., width): code times scale
    in float32, rounded once.

    Not differentiable. `in_backward` stops a compiler from reusing the decoded weight of forward,
    which would stay in memory until backward.
    """
    return decode_blocks_op(records, layout.name, width, dtype, in_backward)


def _like_values(records: torch.Tensor, layout: str, width: int, dtype: torch.dtype, _: bool):
    return records.new_empty((*records.shape[:-2], width), dtype=dtype)


@operator(fake=_like_values)
def decode_blocks_op(
    records: torch.Tensor, layout: str, width: int, dtype: torch.dtype, in_backward: bool
) -> torch.Tensor:
    """Implement `decode_blocks`."""
    form = BLOCK_FORMATS[layout]
    values = records.new_empty((*records.shape[:-2], width), dtype=dtype)
    if not values.numel():
        return values
    if records.is_cuda and has_triton(records.device):
        # nothing else needs triton
        from titanlite.features.lora import block_formats_triton as kernels

        table = _table(layout, records.device)
        kernels.decode_blocks(records.contiguous().view(torch.uint8), table, values, form)
        return values
    records_NnR = records.reshape(-1, *records.shape[-2:])
    values_NW = values.view(-1, width)
    step = max(_CHUNK // width, 1)
    for start in range(0, len(values_NW), step):
        codes, factor = _split(records_NnR[start : start + step], form)
        decoded = _decode_codes(codes, form).mul_(factor).flatten(1)
        values_NW[start : start + step] = decoded[:, :width]
    return values


def _split(records: torch.Tensor, layout: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (..., code_bytes) uint8 and scales (..., 1) float32."""
    data = records.contiguous().view(torch.uint8)
    return data[..., : layout.code_bytes], data[..., layout.code_bytes :].contiguous().view(
        torch.float32
    )


def _decode_codes(codes: torch.Tensor, layout: BlockFormat) -> torch.Tensor:
    """Return the values of codes (N, n, code_bytes) before scaling, float32 (N, n, block)."""
    if layout is FP8:
        return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    return F.embedding(codes.to(torch.int32), _pairs(layout, codes.device)).flatten(-2)


@cache
def _table(layout: str, device: torch.device) -> torch.Tensor:
    """Return the value of each code, float32: (256,) or (16,). Cached, because a copy to a GPU
    makes the host wait.
    """
    with torch.inference_mode(False), torch.device(device):
        if layout == NF4.name:
            return torch.tensor(_NORMAL_FLOAT, dtype=torch.float32)
        if layout == MXFP4.name:
            return torch.tensor(E2M1, dtype=torch.float32)
        return (
            torch.arange(256, dtype=torch.int32)
            .to(torch.uint8)
            .view(torch.float8_e4m3fn)
            .to(torch.float32)
        )


@cache
def _pairs(layout: BlockFormat, device: torch.device) -> torch.Tensor:
    """Return the values of the two codes in each of the 256 bytes, float32 (256, 2)."""
    table = _table(layout.name, device)
    with torch.inference_mode(False):
        pairs = torch.cartesian_prod(table, table)
        return pairs.flip(-1).contiguous() if layout.low_first else pairs


@dataclass(frozen=True)
class BlockEncoding:
    """An `Encoding` that stores each row of a weight as `num_records` records."""

    layout: BlockFormat
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.layout.name

    def values_in(self, stored: Region) -> Region:
        """Return the region of the values in `stored` records: the same rows, and the columns of
        the records.
        """
        *rows, first, _ = stored.starts
        *heights, count, _ = stored.lengths
        start = min(first * self.layout.block, self.shape[-1])
        end = min((first + count) * self.layout.block, self.shape[-1])
        return Region((*rows, start), (*heights, end - start))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return encode_blocks(values, self.layout).flatten(1)

    def can_adopt(self, dtype: torch.dtype, block: tuple[int, ...]) -> bool:
        codes = {FP8: torch.float8_e4m3fn, MXFP4: torch.uint8}.get(self.layout)
        return dtype == codes and block[1] == self.layout.block

    def adopt(self, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        codes = codes.view(torch.uint8)
        if self.layout is FP8:
            parts = _in_blocks(codes, FP8)
        else:
            parts = codes.unflatten(1, (-1, self.layout.code_bytes))
        return _join(parts, factors.to(torch.float32).unsqueeze(-1)).flatten(1)

    def count_not_finite(self, local: torch.Tensor) -> int:
        if not local.numel():  # (0, 0, 0): other pipeline stages hold it
            return 0
        codes, factor = _split(local, self.layout)
        largest = 6 if self.layout is MXFP4 else 1
        bad = ~(factor.squeeze(-1) * largest).isfinite()
        if self.layout is FP8:  # has no infinity, and two NaN
            bad |= ((codes & 0x7F) == 0x7F).any(dim=-1)
        return int(bad.sum())


def encode_weights(model: Model, format_name: str) -> None:
    """Quantize the frozen matrices of linear layers and experts of `model` to the named format, in
    place, on meta.

    Call this before sharding. Embedding, output head, routers, and layers of `TransformersModel`
    are not quantized; `mxfp4` quantizes only experts.
    """
    assert not isinstance(model, TransformersModel), "refused by the configuration"
    layout = BLOCK_FORMATS[format_name]
    # All layers use the same two objects, so that they share one compiled graph.
    multiply, multiply_grouped = (
        partial(frozen_linear, layout),
        partial(frozen_grouped_gemm, layout),
    )
    for module in model.modules():
        if isinstance(module, Linear) and not isinstance(module, OutputHead):
            if layout is MXFP4:
                continue
            module.weight = _encoded(module.weight, layout)
            module.multiply = multiply
        elif isinstance(module, Experts):
            module.gate_up_proj = _encoded(module.gate_up_proj, layout)
            module.down_proj = _encoded(module.down_proj, layout)
            module.multiply = multiply_grouped


def _encoded(weight: nn.Parameter, layout: BlockFormat) -> nn.Parameter:
    assert weight.is_meta and not weight.requires_grad, "encoded after materialization, or trained"
    shape = (
        *weight.shape[:-1],
        layout.num_records(weight.shape[-1]),
        layout.record_bytes // weight.dtype.itemsize,
    )
    records = nn.Parameter(
        torch.empty(shape, dtype=weight.dtype, device="meta"), requires_grad=False
    )
    vars(records).update(vars(weight))
    set_encoding(records, BlockEncoding(layout, tuple(weight.shape)))
    return records


def frozen_linear(
    layout: BlockFormat,
    x: torch.Tensor,
    records_Nnr: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, (..., N), of x (..., K) and the records of weight (N, K);
    differentiable in x.
    """
    return _FrozenProduct.apply(x, records_Nnr, layout, bias_N, None, "auto")


def frozen_grouped_gemm(
    layout: BlockFormat,
    x_MK: torch.Tensor,
    records_ENnr: torch.Tensor,
    offsets_E: torch.Tensor,
    backend: GroupedGemmBackend,
) -> torch.Tensor:
    """Return `grouped_gemm` (M, N) of x and the transposed weights (E, N, K) in the records; once
    differentiable in x.
    """
    return _FrozenProduct.apply(x_MK, records_ENnr, layout, None, offsets_E, backend)


class _FrozenProduct(torch.autograd.Function):
    """A matmul with one quantized weight, or with `offsets` one weight for each group of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        records: torch.Tensor,
        layout: BlockFormat,
        bias: torch.Tensor | None,
        offsets: torch.Tensor | None,
        backend: GroupedGemmBackend,
    ) -> torch.Tensor:
        ctx.save_for_backward(records, offsets)
        ctx.layout = layout
        ctx.width = x.shape[-1]
        ctx.backend = backend
        weight = decode_blocks(records, layout, x.shape[-1], x.dtype)
        return (
            F.linear(x, weight, bias)
            if offsets is None
            else grouped_gemm(x, weight.mT, offsets, backend)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        records, offsets = ctx.saved_tensors
        weight = decode_blocks(records, ctx.layout, ctx.width, dy.dtype, in_backward=True)
        dx = (
            F.linear(dy, weight.mT)
            if offsets is None
            else grouped_gemm(dy.contiguous(), weight, offsets, ctx.backend)
        )
        return dx, None, None, None, None, None
