#!/usr/bin/env python
"""The settings that are chosen by default, against the best that a sweep finds: the table of
docs/plan.md.

    python scripts/bench/choices.py [--keep FOLDER] [MODEL/RANKS ...]

Each row is one model on 1, 8 or 64 GPUs, with the batch that fine-tuning has by default. Its choice
is traced, as `plan` does, and so is every other combination of degrees, sequences per micro-batch
and recomputation that the closed form expects to be at least 0.8 times as fast, and to fit or
nearly so. With --keep, traces are kept in a folder, so that a run that is cut off goes on.
"""

import argparse
import pickle
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from titanlite.assemble import build_unsharded
from titanlite.config.parallelism import BATCHES, CHOSEN
from titanlite.features.choice.at_start import describe_model
from titanlite.features.choice.choose import Choice, choose, find_all, take
from titanlite.features.choice.hardware import GPUS, Hardware
from titanlite.features.estimate.cli import read_request
from titanlite.features.estimate.estimate import Estimate, get_memory, plan_step, step_time
from titanlite.preflight import Checked

_MODELS = {
    "Qwen3-0.6B": ("qwen3", "0.6B"),
    "Qwen3-8B": ("qwen3", "8B"),
    "Qwen3-30B-A3B": ("qwen3_moe", "30B-A3B"),
    "GLM-4.5-Air": ("glm4_moe", "4.5-Air-106B-A12B"),
    "Qwen3-235B-A22B": ("qwen3_moe", "235B-A22B"),
}
_ROWS = [f"{model}/{ranks}" for model in _MODELS for ranks in (1, 8, 64)]
_CARDS = ("h100-80gb", "h200-141gb")
_NEAR = 0.8  # times the closed form's best: slower ones are not traced
_ROOM = 1.03  # times the memory: fuller ones are not traced


def trace(checked: Checked, choice: Choice, hardware: Hardware, keep: Path | None) -> Estimate:
    """Return the plan of `choice`. A trace does not depend on the GPU."""
    taken = take(checked, choice)
    key = sha256(repr((taken.model_config, taken.degrees, choice.values, choice.batch)).encode())
    path = keep and keep / f"{key.hexdigest()[:20]}.pickle"
    if path and path.exists():
        found = pickle.loads(path.read_bytes())
        return replace(
            found,
            hardware=hardware,
            time=step_time(found.trace, taken.degrees, hardware),
            memory=get_memory(found.trace),
        )
    found = plan_step(taken, hardware)
    if path:
        path.write_bytes(pickle.dumps(found))
    return found


def sweep(row: str, keep: Path | None) -> None:
    """Print the table's rows of one model and number of ranks."""
    model, ranks = row.split("/")
    name, flavor = _MODELS[model]
    batch = max(BATCHES[False][0], int(ranks))
    arguments = (
        f"--model.name={name}",
        f"--model.flavor={flavor}",
        f"--world-size={ranks}",
        f"--training.global_batch_size={batch}",
    )
    checked = read_request(arguments).check()
    sizes = describe_model(checked, build_unsharded)
    for card in _CARDS:
        hardware = GPUS[card]
        chosen = choose(checked, sizes, hardware, batch)
        if not chosen.fits:
            continue
        own = trace(checked, chosen, hardware, keep)
        best, count = own, 1
        for other in find_all(checked, sizes, hardware, batch):
            is_near = other.rate >= _NEAR * chosen.rate
            if other != chosen and is_near and other.nbytes <= _ROOM * hardware.usable_bytes:
                found = trace(checked, other, hardware, keep)
                count += 1
                if found.fits and found.expected_rate > best.expected_rate:
                    best = found
        values = [str(chosen.values[key]) for key in CHOSEN]
        share = own.expected_rate / best.expected_rate
        fits = "" if own.fits else " DOES NOT FIT"
        cells = (
            f"{model}, {ranks} x {card[:4].upper()}",
            *values[2:],
            f"{own.memory.total / 2**30:.1f} GiB{fits}",
            f"{own.expected_rate:,.0f}",
            f"{share:.0%} of {count}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("rows", nargs="*", default=_ROWS)
    known = parser.parse_args()
    if known.keep:
        known.keep.mkdir(parents=True, exist_ok=True)
    print("| model | ep | sequences | recomputation | memory | tokens/s per GPU | of the best |")
    print("|---|---|---|---|---|---|---|")
    for row in known.rows:
        sweep(row, known.keep)


if __name__ == "__main__":
    sys.exit(main())
