"""Launchers of the Triton kernels: grouped GEMM, with the table of its tiles, and cross entropy.

Tiles come from a table, not from an autotuner: that would measure on every rank, choose by chance,
and so give different sums.

Shapes: M rows, E groups, K reduction, N columns, T tokens, I expert width; C rows of logits, V
columns.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titanlite.ops import kernels_triton
from titanlite.ops.kernels_triton import PLAIN, SWIGLU, SWIGLU_BACKWARD
from titanlite.ops.matmul import has_fences
from titanlite.ops.moe_experts import empty_swiglu

# `kernel[grid](...)` takes options in addition to the kernel's own arguments, which its static type
# does not know.
_kernels: Any = kernels_triton

_SWIZZLE = 8  # row tiles that run at about the same time
_ROUNDS_AMONG_RANKS = 4


class Tile(NamedTuple):
    """Tile of a kernel: `rows` and `cols` of the output, `depth` of the reduction, `per_sm`
    programs.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    per_sm: int


# By kernel: for two-byte dtypes on devices with at least 200 KiB of shared memory per block
# (Hopper, data-centre Blackwell), on others (Ampere, Ada), and for float32. The index of a gathered
# row takes a stage of the pipeline.
TILES = {
    "large": {
        "gemm": Tile(128, 256, 64, 8, 4, 1),
        "gemm_few_rows": Tile(64, 128, 64, 4, 4, 2),
        "swiglu": Tile(128, 128, 64, 8, 4, 1),
        "swiglu_backward": Tile(128, 128, 64, 8, 5, 1),
        "wgrad": Tile(128, 256, 64, 8, 3, 1),
        "wgrad_gather": Tile(128, 128, 64, 4, 3, 2),
    },
    "small": {
        "gemm": Tile(128, 128, 32, 8, 4, 1),
        "gemm_few_rows": Tile(64, 64, 32, 4, 4, 2),
        "swiglu": Tile(128, 64, 32, 8, 4, 1),
        "swiglu_backward": Tile(128, 64, 32, 8, 4, 1),
        "wgrad": Tile(128, 64, 32, 8, 4, 1),
        "wgrad_gather": Tile(128, 64, 32, 8, 5, 1),
    },
    "float32": {
        # with 4 warps these spill 8 bytes with Triton 3.6
        "gemm": Tile(64, 64, 32, 8, 3, 2),
        "gemm_few_rows": Tile(64, 64, 32, 8, 3, 2),
        "swiglu": Tile(64, 32, 32, 4, 3, 2),
        "swiglu_backward": Tile(64, 32, 32, 4, 3, 2),
        "wgrad": Tile(64, 64, 32, 4, 3, 2),
        "wgrad_gather": Tile(64, 64, 32, 4, 3, 2),
    },
}
# There the larger tile spills 200 bytes per thread to the stack, up to Triton 3.7.
TILES["blackwell"] = TILES["large"] | {"swiglu_backward": Tile(128, 64, 64, 8, 4, 1)}
_FEW_ROWS = 64  # per group, on average
_EPILOGUES = {SWIGLU: "swiglu", SWIGLU_BACKWARD: "swiglu_backward"}
# small tiles, so that tests of edges and of several tiles per group take seconds, not minutes
_INTERPRETED_TILE = Tile(32, 32, 16, 4, 2, 1)
_INTERPRETED_SMS = 4

# TRITON_INTERPRET=1, read when the kernels were decorated: they run on CPU tensors, slowly.
INTERPRETED = not isinstance(_kernels.row_gemm_kernel, triton.JITFunction)
# columns at once
SOFTMAX_BLOCK = 64 if INTERPRETED else 8192
SOFTMAX_WARPS = 8


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up. Triton's function takes the host 5 us, as does its
    `next_power_of_2`.
    """
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of 2 that is at least `count`, which is positive."""
    return 1 << (count - 1).bit_length()


def row_grouped_gemm(x: Tensor, weight_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return y[m] = x[m] @ weight[group of m], (M, N); rows after the last group are zero.

    Args:
        x: (M, K); K has stride 1.
        weight_EKN: (E, K, N); K or N has stride 1.
        offsets_E: (E,) int32.
    """
    y = x.new_empty(x.shape[0], weight_EKN.shape[2])
    results = (y, None, None, None, None)
    _launch_rows(x, weight_EKN, offsets_E, None, PLAIN, y.shape[1], results)
    return y


def gather_swiglu(
    x: Tensor,
    gate_up: Tensor,
    row_weight: Tensor,
    token: Tensor | None,
    offsets: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the operator's results: z = [gate | up] = x[token] @ gate_up^T, and h = silu(gate) *
    up * row_weight. Without `token`, x has the rows themselves.
    """
    h, z = empty_swiglu(x, gate_up, row_weight, token, offsets, keep)
    results = (None, z if keep else None, h, row_weight, None)
    _launch_rows(x, gate_up.mT, offsets, token, SWIGLU, h.shape[1], results)
    return h, z


def gather_swiglu_backward(
    dout: Tensor,
    down: Tensor,
    row_weight: Tensor,
    token: Tensor | None,
    offsets: Tensor,
    z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator's results, from the gradient of h / row_weight, `dout[token] @ down`."""
    rows, inner = z.shape[0], down.shape[2]
    tile = _tile_of("swiglu_backward", dout, tma=_tma_fits(down))
    dz = z.new_empty(z.shape)
    h = z.new_empty(rows, inner)
    parts = torch.empty(rows, cdiv(inner, tile.cols), dtype=torch.float32, device=z.device)
    results = (dz, z, h, row_weight, parts)
    _launch_rows(dout, down, offsets, token, SWIGLU_BACKWARD, inner, results)
    return dz, h, parts.sum(dim=1)


def grouped_mm_wgrad_into(
    x: Tensor,
    dy: Tensor,
    offsets: Tensor,
    total_ENK: Tensor,
    adds: bool,
    x_rows: Tensor | None = None,
    dy_rows: Tensor | None = None,
) -> None:
    """Write the gradient of weights, dy_e^T @ x_e (E, N, K), to `total` or, with `adds`, add it to
    `total`, which is then float32. Both operands may be gathered.
    """
    E, K, N = offsets.shape[0], x.shape[1], dy.shape[1]
    dw = total_ENK.mT
    if not x.shape[0] or not dy.shape[0] or not dw.numel():
        if not adds:
            dw.zero_()
        return
    unfenced = _is_unfenced(x)
    # On an H200, TMA gains more than a copy costs: 519 instead of 380 TFLOP/s.
    if unfenced or _tma_fits(x, dy):
        if x_rows is not None:
            x = x.index_select(0, x_rows)
        if dy_rows is not None:
            dy = dy.index_select(0, dy_rows)
        x_rows = dy_rows = None
    gathered = x_rows is not None or dy_rows is not None
    tile = _tile_of("wgrad_gather" if gathered else "wgrad", x)
    tma = not gathered and _tma_fits(x, dy)
    operands: list[Any] = [x, dy]
    if tma:
        operands = [
            TensorDescriptor.from_tensor(x, [tile.depth, tile.rows]),
            TensorDescriptor.from_tensor(dy, [tile.depth, tile.cols]),
        ]
    programs = E * cdiv(K, tile.rows) * cdiv(N, tile.cols)
    sizes = (N, K, E, x.stride(0), dy.stride(0), *dw.stride())
    constants = {"BK": tile.rows, "BN": tile.cols, "BM": tile.depth, "TMA": tma, "ADDS": adds}
    constants |= _constants(x, tile, in_one_stage=unfenced and not tma)
    grid = (min(programs, _most_programs(x, tile)),)
    pointers = (dw, x_rows, dy_rows, offsets)
    launch(_kernels.wgrad_kernel, grid, *operands, *pointers, *sizes, **constants)


def gather_sum(y_MN: Tensor, rows_Tk: Tensor) -> Tensor:
    """Return out[t] = sum over j of y[rows[t, j]], (T, N); a row index of M or more counts as a row
    of zeros.
    """
    T, top_k = rows_Tk.shape
    N = y_MN.shape[1]
    out = y_MN.new_empty(T, N)
    block = min(next_power_of_2(N), 1024)
    sizes = (*y_MN.shape, y_MN.stride(0), out.stride(0))
    constants = {"TOP_K": top_k, "BN": block, "num_warps": 4, "enable_fp_fusion": True}
    grid = (T, cdiv(N, block))
    launch(_kernels.gather_sum_kernel, grid, y_MN, rows_Tk, out, *sizes, **constants)
    return out


def _launch_rows(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    epilogue: int,
    N: int,
    results: tuple[Tensor | None, ...],
) -> None:
    """Launch `row_gemm_kernel` for results with N columns. `results` are its pointers y, z, h, to
    the rows' weights and to their gradient, all contiguous; None: not used by the epilogue.
    """
    E, K, _ = weight.shape
    M = len(x if rows is None else rows)
    if not M or not N:
        return
    unfenced = _is_unfenced(x)
    if unfenced and rows is not None:
        x = x.index_select(0, rows)
        rows = None
    kernel = _EPILOGUES.get(epilogue, "gemm")
    if epilogue == PLAIN and M // E <= _FEW_ROWS:
        kernel = "gemm_few_rows"
    k_major = weight.stride(1) == 1
    stored = weight.mT if k_major else weight
    weight_by_tma = _tma_fits(stored)
    x_by_tma = weight_by_tma and rows is None and _tma_fits(x)
    tile = _tile_of(kernel, x, tma=weight_by_tma)
    operands: list[Any] = [x, weight]
    if x_by_tma:
        operands[0] = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
    if weight_by_tma:
        block = [1, tile.cols, tile.depth] if k_major else [1, tile.depth, tile.cols]
        operands[1] = TensorDescriptor.from_tensor(stored, block)
    strides = (x.stride(0), weight.stride(0), weight.stride(2), weight.stride(1))
    constants = {
        "BM": tile.rows,
        "BN": tile.cols,
        "BK": tile.depth,
        "EPILOGUE": epilogue,
        "K_MAJOR": k_major,
        "TMA_X": x_by_tma,
        "TMA_W": weight_by_tma,
        "EVEN_K": K % tile.depth == 0,
        "E_CEIL": next_power_of_2(E + 1),
        **_constants(x, tile, in_one_stage=unfenced and not x_by_tma),
    }
    # an upper bound: only the device knows the exact number
    most_tiles = (M // tile.rows + E + 1) * cdiv(N, tile.cols)
    grid = (min(most_tiles, _most_programs(x, tile)),)
    operands += [*results, rows, offsets, M, N, K, E, *strides]
    launch(_kernels.row_gemm_kernel, grid, *operands, **constants)


def _constants(x: Tensor, tile: Tile, *, in_one_stage: bool) -> dict[str, Any]:
    stages = 1 if in_one_stage else tile.stages
    launch = {"num_warps": tile.warps, "num_stages": stages, "enable_fp_fusion": True}
    # float32 is multiplied as float32 unless the user has allowed TF32.
    is_exact = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return {"BAND": _SWIZZLE, "PRECISION": "ieee" if is_exact else "tf32", **launch}


def _is_unfenced(x: Tensor) -> bool:
    """Return True if Hopper's tensor cores might read shared memory before `cp.async` has written
    it.

    Rows are then copied before they are multiplied, and operands that TMA cannot load go through
    registers, in one stage.
    """
    return (
        not INTERPRETED and not has_fences(triton.__version__) and _properties(x.device).major == 9
    )


def without_tma(kernel: str, tile: Tile) -> Tile:
    """Return the tile to use without TMA: `tile`, or a smaller one if `tile` spills with Triton
    3.8, because pointers to the weight take registers.
    """
    smaller = {"gemm": Tile(128, 128, 64, 8, 4, 1), "swiglu_backward": Tile(128, 64, 64, 8, 4, 1)}
    return smaller.get(kernel, tile) if tile == TILES["large"][kernel] else tile


_bound = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *operands: Any, **options: Any) -> None:
    """Start the programs of `grid`, if there are any, on the device of the first operand: Triton
    launches on the current device, and layers of one model may be on several.
    """
    if all(grid):
        with _make_current(operands[0]):
            kernel[grid](*operands, **options)


def _make_current(operand: Any) -> AbstractContextManager[Any]:
    """Make the operand's device current.

    A thread has no CUDA context until its first call of CUDA's runtime, and without one Triton's
    TMA descriptors fail ("invalid device context"); in autograd's thread our kernel may be that
    first call.
    """
    if INTERPRETED:
        return nullcontext()
    tensor = operand.base if isinstance(operand, TensorDescriptor) else operand
    if getattr(_bound, "device", None) != tensor.device:
        tensor.new_zeros(1)
        _bound.device = tensor.device
    return torch.cuda.device(tensor.device)


@cache
def _properties(device: torch.device) -> Any:
    """Return the device's properties, cached: torch would look them up for every launch, in 0.1
    ms.
    """
    return torch.cuda.get_device_properties(device)


def _tile_of(kernel: str, x: Tensor, *, tma: bool = True) -> Tile:
    if INTERPRETED:
        return _INTERPRETED_TILE
    if x.element_size() != 2:
        return TILES["float32"][kernel]
    tile = TILES[find_table(x.device)][kernel]
    return tile if tma else without_tma(kernel, tile)


@cache
def find_table(device: torch.device) -> str:
    """Return the `table_of` the device."""
    properties = _properties(device)
    return table_of(properties.major, properties.shared_memory_per_block_optin)


def table_of(major: int, shared_bytes: int) -> str:
    """Return the key in `TILES` for two-byte dtypes on a device of compute capability `major`.x
    with that much shared memory.
    """
    if shared_bytes < 200 << 10:
        return "small"
    return "blackwell" if major >= 10 else "large"


def _most_programs(x: Tensor, tile: Tile) -> int:
    """Return the number of programs that the device runs at once; for a run of several ranks, a few
    times that number.

    In such a run, collectives occupy some multiprocessors, so the last programs start only after
    earlier ones have ended. More and smaller programs make this extra round shorter: the kernel
    takes several short rounds and one more, instead of two long ones.
    """
    if INTERPRETED:
        return _INTERPRETED_SMS
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    at_once = _properties(x.device).multi_processor_count * tile.per_sm
    return at_once if alone else at_once * _ROUNDS_AMONG_RANKS


def _tma_fits(*tensors: Tensor) -> bool:
    """Return True if TMA, available from Hopper on, can load `tensors`: it needs bases and outer
    strides at multiples of 16 bytes. With float32 its kernels spill.
    """
    if INTERPRETED or _properties(tensors[0].device).major < 9:
        return False
    return all(
        t.element_size() == 2
        and t.data_ptr() % 16 == 0
        and t.stride(-1) == 1
        and all(stride * 2 % 16 == 0 and stride > 0 for stride in t.stride()[:-1])
        for t in tensors
    )


def softmax_statistics(logits_CV: Tensor, column_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (maximum, sum of exp(logit - maximum), logit in `column`) of each row, float32
    (C,).
    """
    rows, vocab_size = logits_CV.shape
    maximum_C, sum_C, target_C = (logits_CV.new_empty(rows, dtype=torch.float32) for _ in range(3))
    operands = (logits_CV, column_C, maximum_C, sum_C, target_C, vocab_size, logits_CV.stride(0))
    launch(_kernels.softmax_statistics_kernel, (rows,), *operands, **_softmax(vocab_size))
    return maximum_C, sum_C, target_C


def softmax_gradient_(
    logits_CV: Tensor, shift_C: Tensor, scale_C: Tensor, hit_C: Tensor, column_C: Tensor
) -> None:
    """Overwrite the logits by exp(logit - shift) * scale, and subtract `hit` in each row's
    `column`; columns have stride 1.
    """
    rows, vocab_size = logits_CV.shape
    operands = (logits_CV, shift_C, scale_C, hit_C, column_C, vocab_size, logits_CV.stride(0))
    options = _softmax(vocab_size)
    grid = (rows, cdiv(vocab_size, options["BLOCK"]))
    launch(_kernels.softmax_gradient_kernel, grid, *operands, **options)


@cache
def _softmax(vocab_size: int) -> dict[str, Any]:
    return {
        "BLOCK": min(SOFTMAX_BLOCK, next_power_of_2(vocab_size)),
        "num_warps": SOFTMAX_WARPS,
    }
