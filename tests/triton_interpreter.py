"""Make bfloat16 right in Triton's interpreter, which keeps it as raw 16-bit integers and multiplies
the bit patterns.

`tl.dot` gets float32 operands, and float32 is rounded to the nearest bfloat16 (ties to even)
instead of cut off. See triton #11584. Imported before kernels run; needs TRITON_INTERPRET=1, which
is read when they are decorated.

And make it faster by a quarter: it looks through all of triton.language at each call of a function
by a kernel, and makes a table of dtypes at each operation.
"""

from functools import cache

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from titanlite.ops.launchers import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
NEEDS_KERNELS = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)
ON_GPU = [] if INTERPRETED else [pytest.mark.gpu]  # part of `pytest -m gpu`

_Builder = interpreter.InterpreterBuilder
_cast_impl = _Builder.cast_impl


def _values(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _dot(self, a, b, accumulator, input_precision, max_num_imprecise_acc):
    product = np.matmul(_values(a), _values(b), dtype=accumulator.data.dtype)
    return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def _cast(self, source, to):
    if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
        return _cast_impl(self, source, to)
    bits = np.ascontiguousarray(source.data, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return interpreter.TensorHandle(
        np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16), to.scalar
    )


def _call(self, *args, **kwargs):
    if any(tl.core.is_builtin(place.arange) for place in (tl, tl.core)):  # or it is patched already
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


_np_dtype_of = cache(interpreter._get_np_dtype)


def _get_np_dtype(type_):
    scalar = type_.scalar  # unlike blocks and pointers, it can be the key of a cache
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _np_dtype_of(scalar)


def repair():
    """Patch the interpreter of this process."""
    interpreter._get_np_dtype = _get_np_dtype
    interpreter.InterpretedFunction.__call__ = _call
    _Builder.create_dot = _dot
    _Builder.cast_impl = _Builder.create_fp_trunc = _cast


if INTERPRETED:
    repair()
