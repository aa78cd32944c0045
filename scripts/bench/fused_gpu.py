#!/usr/bin/env python
"""Measure the fused operators on one GPU beside what they are composed of, forward and backward.

    python scripts/bench/fused_gpu.py      # sizes of Qwen3-30B-A3B, 8B and Next, under a minute

Median microseconds of device time at 4,096 and 16,384 tokens in bfloat16, and what the fused ones
reach of the measured bandwidth forward, each tensor read or written once. Exit code 2: there is no
GPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from gpu_common import CudaTimer, Timer, inspect_machine, markdown_table, missing_gpu, say

from titanlite.ops import elementwise, gated_delta
from titanlite.ops.delta_inputs import delta_inputs

Case = tuple[str, Callable[..., Any], list[torch.Tensor]]


def cases(tokens: int, device: str) -> Iterator[Case]:
    """Name, operator and inputs of each case."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=device).bfloat16()

    def weight(width: int) -> torch.Tensor:
        return torch.ones(width, device=device).bfloat16()

    def angles(width: int) -> Any:
        frequencies = elementwise.inverse_frequencies(width, 1e6).to(device)
        positions = torch.arange(tokens, device=device).unsqueeze(0)
        return elementwise.rope_cos_sin(frequencies, positions, torch.bfloat16)

    def norm(x: Any, update: Any, w: Any) -> Any:
        return elementwise.add_rms_norm(x, update, w, 1e-6)

    def rotate(q: Any, k: Any, cos: Any, sin: Any, *weights: Any) -> Any:
        return elementwise.rotate_heads(q, k, (cos, sin), weights or None, 1e-6)

    def gate(x: Any, z: Any, w: Any) -> Any:
        return elementwise.gated_rms_norm(x, z, w, 1e-6)

    def convolve(x: Any, taps: Any) -> Any:
        return delta_inputs(x, taps, documents, 128, 128)

    taps = torch.randn(16, 512, 4, device=device).bfloat16()
    documents = (torch.arange(tokens, device=device) // 1000).unsqueeze(0)
    yield "residual, norm: 2048", norm, [draw(2048), draw(2048), weight(2048)]
    full, part = angles(128), angles(64)
    yield "rotation: 32, 4 x 128", rotate, [draw(32, 128), draw(4, 128), *full]
    norms = [weight(128), weight(128)]
    yield "norm, rotation: 32, 4 x 128", rotate, [draw(32, 128), draw(4, 128), *full, *norms]
    norms = [weight(256), weight(256)]
    yield "norm, 64 rotated: 16, 2 x 256", rotate, [draw(16, 256), draw(2, 256), *part, *norms]
    yield "SwiGLU: 12288", elementwise.swiglu_apart, [draw(12288), draw(12288)]
    heads = [draw(16, 2, 128), draw(16, 2, 128)]
    yield "norm, gate: 32 x 128", gate, [*heads, weight(128)]
    yield "inputs of a delta net: 16 x 512", convolve, [draw(16, 512), taps]


def measure(timer: Timer, case: Case) -> tuple[float, float, int]:
    """Seconds forward and backward, and bytes of inputs and results."""
    _, operator, inputs = case
    leaves = [x.requires_grad_() for x in inputs[:2]] + inputs[2:]
    results = operator(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    douts = [torch.ones_like(x) for x in results]
    with torch.no_grad():
        forward = timer.measure(lambda i: operator(*inputs)).seconds
    again = {"retain_graph": True}
    backward = timer.measure(lambda i: torch.autograd.grad(results, leaves[:2], douts, **again))
    return forward, backward.seconds, sum(x.nbytes for x in (*inputs, *results))


def compare(timer: Timer, tokens: int, device: str, bandwidth: float) -> list[list[str]]:
    """Rows of the table."""
    rows = []
    for case in cases(tokens, device):
        *fused, nbytes = measure(timer, case)
        with (
            patch.object(elementwise, "takes_kernels", lambda *x: False),
            patch.object(gated_delta, "_preferred", "torch"),
        ):
            *composed, _ = measure(timer, case)
        pairs = zip(composed, fused, strict=True)
        times = (f"{seconds * 1e6:.0f}" for pair in pairs for seconds in pair)
        rows.append([f"{tokens} {case[0]}", *times, f"{nbytes / fused[0] / bandwidth:.0%}"])
    return rows


def main() -> int:
    """Print a table for each number of tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if problem := missing_gpu():
        print(f"fused_gpu.py: {problem}", file=sys.stderr)
        return 2
    timer = CudaTimer(0.2)
    machine = inspect_machine(timer)
    say(machine.describe())
    names = ("forward", "fused", "backward", "fused", "of the bandwidth")
    for tokens in (4096, 16384):
        say(markdown_table(("us", *names), compare(timer, tokens, "cuda", machine.bandwidth)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
