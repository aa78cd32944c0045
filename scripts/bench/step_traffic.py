#!/usr/bin/env python
"""Where the time of a micro-batch goes on GPUs, part by part, without one.

    python scripts/bench/step_traffic.py --config configs/recipes/qwen3_30b_a3b_sft.toml
    --world-size 8 --rates h100 --parallelism.expert_parallel_degree=8
    --training.local_batch_size=1 --activation_checkpoint.mode=full

Traces an optimizer step of one rank on CUDA's branches, on tensors without data, as `python -m
titanlite plan` does, and prints an average micro-batch with its share of the optimizer's step.
Counts are exact; times are estimates from the rates that are printed, not measured. Further
arguments change settings, as in training; nothing is chosen for the GPUs.
"""

import argparse
import sys

from titanlite.base.errors import TitanliteError
from titanlite.features.choice.hardware import (
    COLLECTIVE_S,
    KERNEL_S,
    LAUNCH_S,
    LINKS,
    RATES,
    SYNC_S,
    Hardware,
)
from titanlite.features.estimate.cli import read_request
from titanlite.features.estimate.estimate import merge_stages, plan_stages
from titanlite.features.estimate.render import render_parts


def render_rates(hardware: Hardware) -> str:
    """Return the rates that expected times are computed with."""
    rates = [
        f"{name} {hardware.rate(name) / 1e12:,.3g} "
        f"{'TB' if peak == 'memory_bytes_s' else 'TFLOP'}/s"
        for name, (peak, _) in RATES.items()
    ]
    links = (hardware.intra_node_bytes_s, hardware.inter_node_bytes_s)
    inside, between = (f"{rate * LINKS / 1e9:,.3g} GB/s" for rate in links)
    host = (
        f"{KERNEL_S * 1e6:g} us between kernels, {LAUNCH_S * 1e6:g} us of the host for each, "
        f"{COLLECTIVE_S * 1e6:g} us"
    )
    return (
        f"rates assumed for {hardware.name}: {', '.join(rates)}; links inside nodes {inside}, "
        f"between nodes {between}; {host} for a collective, {SYNC_S * 1e6:g} us for a "
        "synchronization"
    )


def main() -> int:
    """Print the table; 2 after one clear error."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rates", default="h100", help="GPU: h100, h200 or another that `plan --gpu` knows"
    )
    known, rest = parser.parse_known_args()
    try:
        request = read_request([*rest, f"--gpu={known.rates}"])
        hardware = request.hardware
        stages = plan_stages(request.check(), hardware, rank=request.known.rank)
    except TitanliteError as error:
        print(f"step_traffic: error: {error}", file=sys.stderr)
        return 2
    print(render_rates(hardware))
    print(render_parts(merge_stages(stages)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
