"""Triton kernels of the cross entropy: softmax over rows of the vocabulary, read and written in the model's dtype.

As single operators of torch, a chunk of logits goes through memory a dozen times, most of them in float32; here it is
read once for the loss, and once more when the gradient takes its place. All arithmetic is in float32; one program owns
each row or part of it, so sums have one order.

Shapes: C rows, V columns.
"""

import triton
import triton.language as tl


@triton.jit
def softmax_statistics_kernel(logits_ptr, column_ptr, max_ptr, sum_ptr, target_ptr, V, stride_c, BLOCK: tl.constexpr):
    """Maximum of a row, sum of exp(logit - maximum), and the logit in its column (arXiv:1805.02867, algorithm 3)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_c
    v = tl.arange(0, BLOCK)
    most = tl.full((), -3.0e38, tl.float32)  # finite: a block of -inf is no NaN
    total = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + v, mask=start + v < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), 0)
        most = higher
    tl.store(max_ptr + row, most)
    tl.store(sum_ptr + row, total)
    tl.store(target_ptr + row, tl.load(logits_ptr + tl.load(column_ptr + row)).to(tl.float32))


@triton.jit
def softmax_gradient_kernel(logits_ptr, shift_ptr, scale_ptr, hit_ptr, column_ptr, V, stride_c, BLOCK: tl.constexpr):
    """Overwrite a part of a row by exp(logit - shift) * scale, less `hit` in the row's column."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + row * stride_c + v
    x = tl.load(pointers, mask=v < V, other=0.0).to(tl.float32)
    grad = tl.exp(x - tl.load(shift_ptr + row)) * tl.load(scale_ptr + row)
    grad -= tl.where(v == tl.load(column_ptr + row), tl.load(hit_ptr + row), 0.0)
    tl.store(pointers, grad.to(logits_ptr.dtype.element_ty), mask=v < V)
