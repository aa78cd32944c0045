"""Look for the best tile of each kernel: compile all candidates side by side, time them, time the
best again.

The kernels are timed as the fused experts use them: what is computed with one tile is added up.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from math import inf
from typing import Any

import torch
from gpu_common import Budget, DeviceLostError, Timer, attempt, free_memory, say
from moe_gpu_cases import OURS, Copy, Inputs, MoEShape, build_inputs, gemms, trying

from titanlite.ops.launchers import TILES, Tile

_SHARED_BYTES = 227 << 10  # of a block on Hopper
_REGISTERS = 65536  # of a multiprocessor
_FEW_TOKENS, _TOKENS = 512, (16384, 65536)
# the kernels are the same for all multiples of 128
_COMPILING_SHAPE = MoEShape("small", 256, 128, 128, 8)

# Kernel of the table -> the matmuls (of moe_gpu_cases.gemms) that it does, in the order in which
# they are swept.
USES = {
    "swiglu": ("gather + gate_up + SwiGLU",),
    "swiglu_backward": ("gather + dgrad down + dSwiGLU",),
    "wgrad_gather": ("gather + wgrad gate_up", "gather + wgrad down"),
    "gemm": ("forward down", "dgrad gate_up"),
    "wgrad": ("wgrad gate_up", "wgrad down"),
    "gemm_few_rows": ("forward down", "dgrad gate_up"),
}


def candidates(kernel: str) -> list[Tile]:
    """Tiles worth a try, the table's own first: shared memory and registers suffice, and each
    thread has work.
    """
    operands = 2 if kernel == "swiglu" else 1  # gate and up
    found = [TILES["large"][kernel]]
    rows, cols = (
        ((64, 128), (64, 128, 256))
        if kernel == "gemm_few_rows"
        else ((64, 128, 256), (64, 128, 256))
    )
    # 64 elements are the 128 bytes that Hopper's shared memory swizzles.
    for m, n, k, warps, stages, per_sm in product(rows, cols, (64, 128), (4, 8), (3, 4, 5), (1, 2)):
        shared = (m + operands * n) * k * 2 * stages
        accumulators = operands * m * n // (warps * 32)  # registers of a thread
        # 64 more for addresses and operands, and twice as many where an epilogue loads z beside the
        # accumulator.
        registers = min(accumulators + (128 if kernel == "swiglu_backward" else 64), 255)
        fits = shared <= _SHARED_BYTES // per_sm and registers * warps * 32 * per_sm <= _REGISTERS
        # Two programs that fill half a multiprocessor each; a lone one should fill most of it.
        useful = (
            32 <= accumulators <= 128 and m * n >= 64 * 128 and (per_sm == 2 or shared > 96 << 10)
        )
        if fits and useful and (m > 64 or warps == 4):
            found.append(Tile(m, n, k, warps, stages, per_sm))
    return list(dict.fromkeys(found))


def sweep(
    shape: MoEShape,
    budget: Budget,
    timer: Timer,
    dense_flops: float,
    device: str,
    dtype: torch.dtype,
    kernels: Iterable[str] = tuple(USES),
    tokens: Sequence[int] = _TOKENS,
    tried: int | None = None,
    jobs: int | None = None,
) -> list[str]:
    """Lines `"kernel": Tile(...),  # rates`, the best of each kernel as far as the budget reaches.

    `tried` limits the number of candidates; `jobs` processes compile, 0: none does.
    """
    of_kernel = {kernel: candidates(kernel)[:tried] for kernel in kernels}
    bad: set[tuple[str, Tile]] = set()
    jobs = min(os.cpu_count() or 1, 14) if jobs is None else jobs
    if jobs:
        bad = compile_all(
            [(k, tile) for k, tiles in of_kernel.items() for tile in tiles], jobs, budget.left() / 2
        )
    lines = []
    for kernel, tiles in of_kernel.items():
        if not budget.allows(f"sweep of {kernel}"):
            continue
        good = [tile for tile in tiles if (kernel, tile._replace(per_sm=1)) not in bad]
        try:
            line = sweep_kernel(
                kernel, good, shape, budget, timer, dense_flops, device, dtype, tokens
            )
        except DeviceLostError as error:
            budget.skipped.append(f"everything from {kernel} on: {error}")
            break
        say(line)
        lines.append(line)
    return lines


def sweep_kernel(
    kernel: str,
    tiles: list[Tile],
    shape: MoEShape,
    budget: Budget,
    timer: Timer,
    dense_flops: float,
    device: str,
    dtype: torch.dtype,
    tokens: Sequence[int],
) -> str:
    """The best tile: all are timed briefly for the first number of tokens, the best few then for
    all numbers.
    """
    numbers = (min(_FEW_TOKENS, *tokens),) if kernel == "gemm_few_rows" else tuple(tokens)
    own, chosen, flops = TILES["large"][kernel], tiles, []
    times: dict[Tile, list[float]] = {}
    for number in numbers:
        free_memory()
        # Mixed sizes, as a router gives them: tiles at the ends of groups are partly empty.
        inputs = build_inputs(shape, number, 0.3, device, dtype, copies=2)
        flops.append(
            sum(gemm.flops for name, gemm in gemms(inputs).items() if name in USES[kernel])
        )
        if not times:
            brief = {
                tile: time_tile(kernel, inputs, tile, timer, 0.02)
                for tile in tiles
                if tile == own or budget.allows(f"{kernel}: some tiles")
            }
            best = sorted(brief, key=lambda tile: brief[tile])[:5]
            chosen = [tile for tile in best if tile != own] + [own]
        for tile in chosen:
            times.setdefault(tile, []).append(time_tile(kernel, inputs, tile, timer, 0.2))
        del inputs
    complete = {tile: found for tile, found in times.items() if max(found) < inf}
    if not complete:
        return f"# {kernel}: no tile ran"
    least = [min(column) for column in zip(*complete.values(), strict=True)]
    winner = min(
        complete, key=lambda tile: sum(t / b for t, b in zip(complete[tile], least, strict=True))
    )

    def rates(tile: Tile) -> str:
        found = [f / t for f, t in zip(flops, complete[tile], strict=True)]
        return ", ".join(
            f"{r / 1e12:.0f} ({r / dense_flops:.0%}) at {n}"
            for n, r in zip(numbers, found, strict=True)
        )

    was = f"; {tuple(own)} has {rates(own)}" if own in complete and own != winner else ""
    return f'"{kernel}": Tile{tuple(winner)},  # TFLOP/s: {rates(winner)} tokens{was}'


def time_tile(kernel: str, inputs: Inputs, tile: Tile, timer: Timer, seconds: float) -> float:
    """Seconds of all uses of a kernel with this tile; infinite if one fails."""
    of_kernel = gemms(inputs)
    total = 0.0
    for name in USES[kernel]:
        way = of_kernel[name].ways[OURS]
        with trying(kernel, tile):
            sample, problem = attempt(
                lambda way=way: timer.measure(lambda i: way(inputs.copy(i)), seconds)
            )
        if sample is None:
            say(f"{kernel} {tuple(tile)}: {problem}")
            return inf
        total += sample.seconds
    return total


# --- compiling in other processes; this one then finds the kernels in Triton's cache on the disk


def compile_all(work: list[tuple[str, Tile]], jobs: int, seconds: float) -> set[tuple[str, Tile]]:
    """Compile every (kernel, tile) with `jobs` processes, for at most `seconds`; what failed or was
    not done.
    """
    # the grid is not compiled
    work = list({(kernel, tile._replace(per_sm=1)): None for kernel, tile in work})
    say(f"compiling {len(work)} kernels with {jobs} processes, at most {seconds:.0f} s")
    bad, end = set(work), time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:  # leaving it ends the processes
        results = pool.imap_unordered(compile_tile, work)
        with suppress(StopIteration, multiprocessing.TimeoutError):
            while True:
                job, problem = results.next(max(end - time.monotonic(), 0.0))
                if problem is None:
                    bad.discard(job)
                else:
                    say(f"{job[0]} {tuple(job[1])}: {problem}")
    say(f"compiled all but {len(bad)}")
    return bad


def compile_tile(job: tuple[str, Tile]) -> tuple[tuple[str, Tile], str | None]:
    """Run a kernel once on small inputs, which compiles it; (job, what went wrong)."""
    kernel, tile = job
    inputs = _small_inputs()
    of_kernel = gemms(inputs)
    for name in USES[kernel]:
        try:
            with trying(kernel, tile):
                _, problem = attempt(
                    lambda name=name: run_to_the_end(of_kernel[name].ways[OURS], inputs)
                )
        except DeviceLostError as error:  # of this process only
            problem = str(error)
        if problem:
            return job, problem
    return job, None


def run_to_the_end(way: Callable[[Copy], Any], inputs: Inputs) -> None:
    """Run it once; what fails on the device is raised here, not by the next call."""
    way(inputs.copies[0])
    torch.cuda.synchronize()


@cache
def _small_inputs() -> Inputs:
    return build_inputs(_COMPILING_SHAPE, 256, 0.3, "cuda", torch.bfloat16, copies=1)
