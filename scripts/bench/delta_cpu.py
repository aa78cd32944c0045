#!/usr/bin/env python
"""Compare the CPU seconds of the gated delta rule with transformers' chunked one, in float32.

    python scripts/bench/delta_cpu.py --tokens 2048

One layer of 8 key heads and 16 value heads, 128 wide, one row, one document, one thread. The ways
take turns in one process. Results and gradients are compared.

forward, backward   CPU milliseconds: median
ratio               transformers' forward and backward over titanlite's in the same turn: median
"""

import argparse
import os
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from titanlite.ops.gated_delta import gated_delta_rule, l2_norm

HEADS, VALUE_HEADS, WIDTH = 8, 16, 128


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute the outputs by titanlite's operator."""
    return gated_delta_rule(q * WIDTH**-0.5, k, v, g, beta)[0]


def theirs(*inputs: Tensor) -> Tensor:
    """Compute the outputs by transformers' function, which scales the queries itself."""
    return torch_chunk_gated_delta_rule(*inputs)[0]


def main() -> int:
    """Measure both ways in turns; 1 if their results differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=5)
    known = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k = (l2_norm(torch.randn(1, known.tokens, HEADS, WIDTH)) for _ in range(2))
    v, dout = (torch.randn(1, known.tokens, VALUE_HEADS, WIDTH) for _ in range(2))
    g, beta = -0.05 * torch.rand(v.shape[:3]), torch.rand(v.shape[:3])
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    times: dict[str, list[tuple[float, float]]] = {"titanlite": [], "transformers": []}
    results: list[list[Tensor]] = []
    for turn in range(known.turns + 1):
        results.clear()
        for name, function in (("titanlite", ours), ("transformers", theirs)):
            start = time.process_time()
            out = function(*inputs)
            middle = time.process_time()
            results.append([out, *torch.autograd.grad(out, inputs, dout)])
            if turn:  # the first one warms up
                times[name].append((middle - start, time.process_time() - middle))
    print(f"torch {torch.__version__}, transformers {metadata.version('transformers')}")
    for name, pairs in times.items():
        forward, backward = (1e3 * statistics.median(part) for part in zip(*pairs, strict=True))
        print(f"{name:13s} forward {forward:8.1f} ms  backward {backward:8.1f} ms")
    turns = zip(times["transformers"], times["titanlite"], strict=True)
    print(f"ratio {statistics.median(sum(slow) / sum(fast) for slow, fast in turns):.2f}")
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True)]
    print(f"largest difference {max(errors):.1e} of the norm")
    return int(max(errors) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
