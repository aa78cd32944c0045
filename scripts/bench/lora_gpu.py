#!/usr/bin/env python
"""Measure LoRA steps of a whole model on one GPU: random weights, packed random documents.

    python scripts/bench/lora_gpu.py                                       # Qwen3-8B
    python scripts/bench/lora_gpu.py --family llama --preset 3.1-8B --checkpointing full

Adapters of rank 16 on all layers that can have some, a frozen base in bfloat16. Exit code 2: there
is no GPU.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist
from gpu_common import CudaTimer, inspect_machine, missing_gpu, say
from train_gpu import BenchTrainer, Variant, make_batches, measure_steps

from titanlite.config.schema import LoRASection
from titanlite.launch.process_group import init_distributed
from titanlite.models.families import families


def main() -> int:
    """Print milliseconds, tokens per second and peak memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="qwen3", help="native family (default %(default)s)")
    parser.add_argument("--preset", default="8B", help="preset of it (default %(default)s)")
    parser.add_argument("--sequences", type=int, default=1, help="of 4096 tokens (default 1)")
    parser.add_argument(
        "--checkpointing", default="none", choices=("none", "selective", "keep_attention", "full")
    )
    arguments = parser.parse_args()
    if problem := missing_gpu():
        print(f"lora_gpu.py: {problem}", file=sys.stderr)
        return 2
    say(inspect_machine(CudaTimer(0.2)).describe())
    config, device = families()[arguments.family].presets[arguments.preset], init_distributed(300)
    sizes = (config, 4096, arguments.sequences, device)
    trainer = BenchTrainer(*sizes, LoRASection(rank=16, alpha=32.0))
    trainer.choose(Variant("triton", arguments.checkpointing, attention="documents, varlen"))
    batches = make_batches(*sizes, documents=True)
    found = measure_steps(lambda i: trainer.run(batches[i % len(batches)]), 8, device)
    rate = 4096 * arguments.sequences / found["step_s"]
    say(f"{arguments}: {found['step_s'] * 1e3:.0f} ms, {rate:,.0f} tokens/s, {found}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
