#!/usr/bin/env python
"""Validation losses of the small configuration with AdamW's moments in float32, in bfloat16 with
stochastic rounding, and, as a control, in bfloat16 rounded to the nearest.

    python scripts/bench/rounded_adamw.py [--seeds 4] [--steps 150] [overrides]

In one process, without a GPU; beta2 is 0.999, as for pretrained weights: a step changes the second
moment by at most 0.1 %, and bfloat16 has nothing between 1 and 1.008.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import titanlite
from titanlite.features.rounded_adamw import adamw

ROOT = Path(__file__).resolve().parents[2]
_KINDS = ("float32", "bfloat16", "to the nearest")
_SETTINGS = (
    "parallelism.tensor_parallel_degree=1",
    "parallelism.expert_parallel_degree=1",
    "checkpoint.enable=false",
    "metrics.enable_tensorboard=false",
    "training.seq_len=128",
    "optimizer.beta2=0.999",
)


def train(kind: str, seed: int, steps: int, overrides: list[str]) -> list[float]:
    """Return the validation losses of a run, the last one last."""
    dtype = "float32" if kind == "float32" else "bfloat16"
    settings = [f"--{setting}" for setting in _SETTINGS]
    settings += [f"--training.seed={seed}", f"--training.steps={steps}"]
    settings += [f"--optimizer.state_dtype={dtype}", f"--validation.freq={steps // 3}"]
    drawn = adamw.random_bits
    if kind == "to the nearest":
        adamw.random_bits = lambda places, *_: torch.full_like(
            places, -0x7FFF8000, dtype=torch.int32
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings.append(f"--job.dump_folder={folder}")
            titanlite.train(ROOT / "configs/qwen3_moe.toml", [*settings, *overrides])
            lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    finally:
        adamw.random_bits = drawn
    return [
        point["loss/validation"] for point in map(json.loads, lines) if "loss/validation" in point
    ]


def main() -> None:
    """Print a table row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    known, overrides = parser.parse_known_args()
    print(f"| moments | seed | before | after {known.steps // 3} steps | | after {known.steps} |")
    print("|---|---|---|---|---|---|", flush=True)
    last: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for seed in range(known.seeds):
        for kind in _KINDS:
            losses = train(kind, seed, known.steps, overrides)
            last[kind].append(losses[-1])
            cells = " | ".join(f"{loss:.4f}" for loss in losses)
            print(f"| {kind} | {seed} | {cells} |", flush=True)
    for kind, losses in last.items():
        spread = f", +- {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        print(f"{kind}: {statistics.mean(losses):.4f}{spread}")


if __name__ == "__main__":
    sys.exit(main())
