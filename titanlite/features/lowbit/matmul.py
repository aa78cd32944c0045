"""Products with frozen weights that are kept in a block format: decoded where they are used, and again in backward.

So between forward and backward there is one copy of a weight, in few bits, and what autograd keeps of it is that copy,
also in compiled code.

Shapes: M rows, E groups, K reduction, N columns, n records per row, r the size of a record in the weight's dtype.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from titanlite.features.lowbit.formats import BlockFormat, decode_blocks
from titanlite.ops.grouped_gemm import GroupedGemmBackend, grouped_gemm
from titanlite.ops.matmul import linear


def frozen_linear(
    layout: BlockFormat, x: torch.Tensor, records_Nnr: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`, (..., N), of x (..., K) and the weight (N, K) in the records.

    Differentiable in x, once; the bias is as frozen as the weight.
    """
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
