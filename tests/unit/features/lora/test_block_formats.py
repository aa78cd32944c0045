"""Block formats: what codes mean, against plain loops; what rounding costs; products; the
kernel.
"""

import math

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from traced_layers import TORCH_COMPILE_WARNINGS
from triton_interpreter import DEVICE, NEEDS_KERNELS, ON_GPU

from titanlite.features.lora import block_formats, block_formats_triton
from titanlite.features.lora.block_formats import (
    BLOCK_FORMATS,
    FP8,
    MXFP4,
    BlockEncoding,
    decode_blocks,
    encode_blocks,
    frozen_grouped_gemm,
    frozen_linear,
)

FORMATS = list(BLOCK_FORMATS.values())
WIDTHS = [200, 384, 5]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weights(*shape, seed=0, std=0.02):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def fp8_value(code):
    """float8_e4m3fn by its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = (-1) ** (code >> 7), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (
        mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )


def record_values(record, layout):
    """A plain loop over one record, in Python's floats."""
    (factor,) = (
        torch.tensor(record[layout.code_bytes :], dtype=torch.uint8).view(torch.float32).tolist()
    )
    if layout is FP8:
        return [fp8_value(code) * factor for code in record[: layout.code_bytes]]
    pairs = [(byte >> 4, byte & 15) for byte in record[: layout.code_bytes]]
    if layout is MXFP4:
        return [e2m1_value(code) * factor for high, low in pairs for code in (low, high)]
    return [block_formats._NORMAL_FLOAT[code] * factor for pair in pairs for code in pair]


def e2m1_value(code):
    """By its definition: sign, 2 bits of exponent with bias 1, 1 of mantissa."""
    sign, exponent, mantissa = (-1) ** (code >> 3), (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


@pytest.mark.parametrize("layout", FORMATS)
def test_decoding_is_a_plain_loop(layout):
    for width in WIDTHS:
        records = encode_blocks(weights(3, width), layout)
        assert (
            records.shape == (3, -(-width // layout.block), layout.record_bytes)
            and records.dtype == torch.uint8
        )
        expected = torch.tensor(
            [
                [value for record in row for value in record_values(record, layout)]
                for row in records.tolist()
            ],
            dtype=torch.float64,
        )[:, :width]
        decoded = decode_blocks(records, layout, width, torch.float32)
        torch.testing.assert_close(decoded.double(), expected, rtol=1e-7, atol=0)
        for dtype in DTYPES[1:]:
            assert torch.equal(decode_blocks(records, layout, width, dtype), decoded.to(dtype))


@pytest.mark.parametrize("layout", FORMATS)
def test_every_value_gets_the_nearest_code(layout):
    values = weights(64, layout.block, seed=1)
    records = encode_blocks(values, layout)
    decoded = decode_blocks(records, layout, layout.block, torch.float32)
    factor = records[..., layout.code_bytes :].contiguous().view(torch.float32).flatten(1)
    table = block_formats._table(layout.name, values.device)
    table = table[table.isfinite()]
    nearest = (values[:, :, None] - factor[:, :, None] * table).abs().amin(dim=-1)
    torch.testing.assert_close((values - decoded).abs(), nearest, rtol=0, atol=1e-8)
    # What is largest in a block is kept, to the factor's rounding; with a power of two as the
    # factor, to that of the code.
    torch.testing.assert_close(
        decoded.abs().amax(dim=1),
        values.abs().amax(dim=1),
        rtol=0.25 if layout is MXFP4 else 3e-7,
        atol=0,
    )
    expected = {"fp8": 0.0257, "nf4": 0.0920, "mxfp4": 0.117}[layout.name]
    assert ((values - decoded).norm() / values.norm()).item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("layout", FORMATS)
def test_zeros_and_extreme_blocks(layout):
    for scale in [0.0, 1e-44, 1e-38, 3e38]:
        values = weights(2, 2 * layout.block, std=0.2).clamp(-1, 1)
        values[1, layout.block :] = 0
        values *= scale
        decoded = decode_blocks(
            encode_blocks(values, layout), layout, 2 * layout.block, torch.float32
        )
        assert decoded.isfinite().all() and not decoded[1, layout.block :].any()
        if scale > 1e-37:
            bound = 0.16 if layout is MXFP4 else 0.11
            assert (decoded - values).double().norm() < bound * values.double().norm()


@pytest.mark.parametrize("layout", FORMATS)
def test_what_is_not_finite_stays_so_and_is_counted(layout):
    for bad in [math.nan, math.inf, -math.inf]:
        values = weights(4, 3 * layout.block)
        encoding = BlockEncoding(layout, tuple(values.shape))
        assert encoding.count_not_finite(encode_blocks(values, layout)) == 0
        values[1, layout.block + 3] = values[1, layout.block + 4] = values[3, 0] = bad
        records = encode_blocks(values, layout)
        assert encoding.count_not_finite(records) == 2
        assert encoding.count_not_finite(records.view(torch.float32)) == 2, "in another unit"
        decoded = decode_blocks(records, layout, values.shape[1], torch.float32)
        assert (
            decoded[1, layout.block : 2 * layout.block].isnan().any()
            and decoded[0].isfinite().all()
        )


@TORCH_COMPILE_WARNINGS[0]
@TORCH_COMPILE_WARNINGS[1]
def test_what_compiled_code_keeps_is_the_records():
    """By the partitioner of torch's compiler, which keeps results of operators that it does not
    know.
    """
    layout = FP8
    kept, decoded = [], []

    def look(into):
        def compiler(graph, inputs):
            (output,) = (node for node in graph.graph.nodes if node.op == "output")
            leaves = torch.utils._pytree.tree_leaves(output.args)
            into.extend(
                tuple(leaf.meta["val"].shape) for leaf in leaves if isinstance(leaf, torch.fx.Node)
            )
            decoded.append(sum("decode_blocks" in str(node.target) for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=look(kept),
        bw_compiler=look([]),
        partition_fn=min_cut_rematerialization_partition,
    )
    linear_records = encode_blocks(weights(512, 256), layout)
    expert_records = encode_blocks(weights(2 * 64, 512), layout).unflatten(0, (2, 64))
    offsets = torch.tensor([10, 32], dtype=torch.int32)

    def compute(x):
        y = torch.nn.functional.silu(frozen_linear(layout, x, linear_records))
        return frozen_grouped_gemm(layout, y, expert_records, offsets, "auto")

    torch._dynamo.reset()
    x = weights(32, 256, std=1.0).requires_grad_()
    torch.compile(compute, backend=backend, fullgraph=True)(x).sum().backward()
    actual, x.grad = x.grad, None
    compute(x).sum().backward()
    torch.testing.assert_close(actual, x.grad)
    assert decoded == [2, 2], "in forward, and again in backward"
    assert not {(512, 256), (256, 512), (2, 64, 512), (2, 512, 64)}.intersection(kept)


def test_operator_passes_opcheck():
    records = encode_blocks(weights(3, 100), FP8)
    arguments = records, "fp8", 100, torch.bfloat16, False
    torch.library.opcheck(torch.ops.titanlite.decode_blocks_op.default, arguments)


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [pytest.param(*pair, marks=ON_GPU) for pair in zip(FORMATS, DTYPES, strict=True)],
)
def test_kernel_equals_the_operators(layout, dtype):
    """Also on a part of a buffer that is not aligned."""
    for width in WIDTHS:
        records = encode_blocks(weights(67, width), layout)
        expected = decode_blocks(records, layout, width, dtype)
        actual = torch.full((67 + 1, width), math.nan, dtype=dtype, device=DEVICE)
        table = block_formats._table(layout.name, actual.device)
        part = torch.zeros(2 + records.numel(), dtype=torch.uint8, device=DEVICE)[2:].view(
            records.shape
        )
        for stored in (records.to(DEVICE), part.copy_(records)):
            block_formats_triton.decode_blocks(stored, table, actual[:67].fill_(math.nan), layout)
            assert torch.equal(actual[:67].cpu(), expected)
        assert actual[67].isnan().all(), "wrote behind the end"
