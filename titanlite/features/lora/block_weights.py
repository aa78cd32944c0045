"""Frozen weights in few bits: the matrices of decoder layers as records of a block format (QLoRA, arXiv:2305.14314).

`encode_weights` exchanges parameters of a model on meta, in place: what was `weight` (out, in) holds records
(out, n, r) afterwards and says so (`materialize.layout.Encoding`). Its name stays, and so does what a checkpoint, a
recipe or a plan know of it. Sharding splits rows, or columns in whole records.

Records are stored in the matmul dtype, so that FSDP all-gathers them without a cast; r is their size in its elements.
Products decode them where they are used, and again in backward: autograd keeps the records alone.

Shapes: M rows, E groups, K reduction, N columns, n records per row.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from titanlite.features.lora.block_formats import (
    BLOCK_FORMATS,
    FP8,
    BlockFormat,
    count_not_finite,
    decode_blocks,
    encode_blocks,
    keep_fp8,
)
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize.layout import Region, set_encoding
from titanlite.models.interface import Model
from titanlite.models.layers import Linear, OutputHead
from titanlite.models.moe import Experts
from titanlite.ops.grouped_gemm import GroupedGemmBackend, grouped_gemm
from titanlite.ops.matmul import linear


@dataclass(frozen=True)
class BlockEncoding:
    """An `Encoding` that keeps each row of a weight as `num_records` records."""

    layout: BlockFormat
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.layout.name

    def values_in(self, stored: Region) -> Region:
        """Rows as they are; of the columns those of the records."""
        *rows, first, _ = stored.starts
        *heights, count, _ = stored.lengths
        start = min(first * self.layout.block, self.shape[-1])
        end = min((first + count) * self.layout.block, self.shape[-1])
        return Region((*rows, start), (*heights, end - start))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return encode_blocks(values, self.layout).flatten(1)

    def keeps(self, dtype: torch.dtype, block: tuple[int, int]) -> bool:
        return self.layout is FP8 and dtype == torch.float8_e4m3fn and block[1] == FP8.block

    def keep(self, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return keep_fp8(codes, factors).flatten(1)

    def count_not_finite(self, local: torch.Tensor) -> int:
        return count_not_finite(local, self.layout)


def encode_weights(model: Model, format_name: str) -> None:
    """Keep the frozen matrices of linear layers and experts of `model` in the format of this name, in place, on meta.

    Before sharding. Not embedding, output head and routers, nor what `TransformersModel` has.
    """
    assert not isinstance(model, TransformersModel), "refused by the configuration"
    layout = BLOCK_FORMATS[format_name]
    # The same two for all layers: a compiled graph is then one for all of them.
    multiply, multiply_grouped = partial(frozen_linear, layout), partial(frozen_grouped_gemm, layout)
    for module in model.modules():
        if isinstance(module, Linear) and not isinstance(module, OutputHead):
            module.weight = _encoded(module.weight, layout)
            module.multiply = multiply
        elif isinstance(module, Experts):
            module.gate_up_proj = _encoded(module.gate_up_proj, layout)
            module.down_proj = _encoded(module.down_proj, layout)
            module.multiply = multiply_grouped


def _encoded(weight: nn.Parameter, layout: BlockFormat) -> nn.Parameter:
    assert weight.is_meta and not weight.requires_grad, "encoded after materialization, or trained"
    shape = (*weight.shape[:-1], layout.num_records(weight.shape[-1]), layout.record_bytes // weight.dtype.itemsize)
    records = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device="meta"), requires_grad=False)
    vars(records).update(vars(weight))
    set_encoding(records, BlockEncoding(layout, tuple(weight.shape)))
    return records


def frozen_linear(
    layout: BlockFormat, x: torch.Tensor, records_Nnr: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, (..., N), of x (..., K) and the records of weight (N, K); differentiable in x."""
    return _FrozenLinear.apply(x, records_Nnr, layout, bias_N)


def frozen_grouped_gemm(
    layout: BlockFormat,
    x_MK: torch.Tensor,
    records_ENnr: torch.Tensor,
    offsets_E: torch.Tensor,
    backend: GroupedGemmBackend,
) -> torch.Tensor:
    """`grouped_gemm` (M, N) of the weights (E, N, K) in the records, transposed; differentiable in x, once."""
    return _FrozenGroupedGemm.apply(x_MK, records_ENnr, layout, offsets_E, backend)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, records: torch.Tensor, layout: BlockFormat, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(records)
        ctx.layout, ctx.width = layout, x.shape[-1]
        return linear(x, decode_blocks(records, layout, x.shape[-1], x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (records,) = ctx.saved_tensors
        weight = decode_blocks(records, ctx.layout, ctx.width, dy.dtype, in_backward=True)
        return linear(dy, weight.mT), None, None, None


class _FrozenGroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        records: torch.Tensor,
        layout: BlockFormat,
        offsets: torch.Tensor,
        backend: GroupedGemmBackend,
    ) -> torch.Tensor:
        ctx.save_for_backward(records, offsets)
        ctx.layout, ctx.width, ctx.backend = layout, x.shape[-1], backend
        return grouped_gemm(x, decode_blocks(records, layout, x.shape[-1], x.dtype).mT, offsets, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        records, offsets = ctx.saved_tensors
        weight = decode_blocks(records, ctx.layout, ctx.width, dy.dtype, in_backward=True)
        return grouped_gemm(dy.contiguous(), weight, offsets, ctx.backend), None, None, None, None
