"""Launchers of the kernels of the cross entropy.

Shapes: C rows, V columns.
"""

from typing import Any

import torch
import triton

from titanlite.ops.cross_entropy_triton import softmax_gradient_kernel, softmax_statistics_kernel
from titanlite.ops.grouped_gemm_launch import INTERPRETED, device_of

BLOCK = 64 if INTERPRETED else 8192  # columns at once
WARPS = 8

# `kernel[grid](...)` takes options beside the kernel's own arguments, which its static type does not know.
_statistics: Any = softmax_statistics_kernel
_gradient: Any = softmax_gradient_kernel


def softmax_statistics(
    logits_CV: torch.Tensor, column_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, sum of exp(logit - maximum), logit in `column`) of each row, float32 (C,); columns have stride 1."""
    rows, vocab_size = logits_CV.shape
    maximum_C, sum_C, target_C = (logits_CV.new_empty(rows, dtype=torch.float32) for _ in range(3))
    if rows:
        with device_of(logits_CV):
            _statistics[(rows,)](
                logits_CV, column_C, maximum_C, sum_C, target_C, vocab_size, logits_CV.stride(0),
                BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)), num_warps=WARPS,
            )  # fmt: skip
    return maximum_C, sum_C, target_C


def softmax_gradient_(
    logits_CV: torch.Tensor, shift_C: torch.Tensor, scale_C: torch.Tensor, hit_C: torch.Tensor, column_C: torch.Tensor
) -> None:
    """Write exp(logit - shift) * scale, less `hit` in `column`, over the logits; columns have stride 1."""
    rows, vocab_size = logits_CV.shape
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab_size))
        with device_of(logits_CV):
            _gradient[(rows, triton.cdiv(vocab_size, block))](
                logits_CV, shift_C, scale_C, hit_C, column_C, vocab_size, logits_CV.stride(0),
                BLOCK=block, num_warps=WARPS,
            )  # fmt: skip
