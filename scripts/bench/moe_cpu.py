#!/usr/bin/env python
"""Compare the CPU time of an MoE layer and of a whole training step with transformers and torch FSDP2, in float32.

    python scripts/bench/moe_cpu.py

Part `layer`: forward and backward of titanlite's `MoE` and of transformers' `Qwen3MoeSparseMoeBlock`, its experts as
"grouped_mm" and "eager", on one thread, with the same weights and inputs. Outputs and gradients are compared first.

Part `step`: a Qwen3-MoE on gloo ranks, from one Hugging Face checkpoint made on the spot, each way in processes of its
own, which are all there from the beginning and take turns, step by step: a machine that changes its speed for minutes,
as a rented one does, changes it for all ways alike.

titanlite              the trainer's step with the experts split over the ranks (EP), the rest by FSDP2, gathered once
titanlite_mkl          the same without oneDNN: what machines do whose products MKL makes (`features/cpu/experts.py`)
titanlite_fsdp         as titanlite, but all parameters sharded by FSDP2, as in the ways below
titanlite_fsdp_packed  the same with document ids, as titanlite's own data has them, and so with an attention mask
fsdp2                  transformers' model, `fully_shard` on each layer and the root, `clip_grad_norm_`, fused AdamW
fsdp2_keep             the same with the C library told to keep freed memory, as titanlite does on CPU ranks
transformers_sharded   as fsdp2, but sharded by transformers itself: `DistributedConfig(fsdp_size=...)`

All but the packed one have a document per row and causal attention. Same batches, constant learning rate, no router
loss, no activation checkpointing, weight decay on matrices only. Every step's loss has to agree with `fsdp2`. The clock
runs from the forward to the end of `zero_grad`; of the loss's all-reduce, which every way needs to report it, only
titanlite's is inside.

CPU s        user and system time of all threads of all ranks, per step: median over the steps but the first two
tok/CPU s    tokens of all ranks per CPU s
speed-up     this way's CPU s over titanlite's in the same turn: median
middle half  of these ratios
wall s       the slowest rank's time for a step, median
"""

import argparse
import importlib
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

# Before torch is imported: one thread per rank, as run_train.sh sets it, and no network, no progress bars.
os.environ.update(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1"
)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from load_ranks import touch_memory
from moe_cpu_ways import (
    LAYER_TOKENS,
    SEQ_LEN,
    STEP_WAYS,
    Mismatch,
    Team,
    build_layers,
    make_checkpoint,
    make_tokens,
    run_alone,
)
from torch import nn

from titanlite.features.cpu.experts import prefers_onednn

_LAYER_REPEATS = 5  # runs per way and round
_LAYER_TOLERANCE = 1e-5  # of the largest element: float32 sums in another order; seen: 1e-6
_LOSS_TOLERANCE = 1e-4  # relative; seen: 2e-7 after 6 steps
_TOUCH_BYTES = 10_000_000_000
_WARM_UP = 2  # steps
_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.distributed",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "titanlite.assemble",
)


@dataclass
class Step:
    """What one rank measured in one step.

    Attributes:
        loss: mean over the tokens of all ranks.
        user_s, system_s: CPU time of all threads of this rank.
        wall_s: seconds.
    """

    loss: float
    user_s: float
    system_s: float
    wall_s: float


# By step, what each rank measured.
Steps = list[list[Step]]


def main() -> int:
    """Run what the command line asks for; 1 if the ways do not agree."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # before any parallel region: forked processes must not inherit a pool without its threads
    for name in _MODULES:
        importlib.import_module(name)
    importlib.import_module("transformers").utils.logging.disable_progress_bar()
    facts: dict[str, Any] = {"machine": describe(arguments)}
    tables = []
    try:
        if arguments.part in ("layer", "all"):
            facts["layer"] = run_alone(partial(measure_layer, arguments.rounds))
            tables.append(layer_table(facts["layer"]))
        if arguments.part in ("step", "all"):
            facts["step"] = {}
            for sequences in arguments.sequences:
                measured = run_steps(arguments, sequences)
                facts["step"][sequences] = {
                    name: [[asdict(rank) for rank in step] for step in steps] for name, steps in measured.items()
                }
                title = f"{sequences} x {SEQ_LEN} tokens on each of {arguments.ranks} ranks"
                tables += [loss_table(measured, title), step_table(measured, title, sequences)]
    except Mismatch as error:
        say(f"error: {error}")
        return 1
    for text in tables:
        print("\n" + text)
    print("\n" + facts["machine"])
    if arguments.json:
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("layer", "step", "all"), default="all", help="what to measure (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="of part layer, 5 runs of every way each (default 3)")
    parser.add_argument("--steps", type=int, default=16, help="of every way, the first two to warm up (default 16)")
    parser.add_argument("--ranks", type=int, default=4, help="processes of part step (default 4)")
    parser.add_argument("--sequences", default="1,2", help="per rank and step; comma-separated (default 1,2)")
    parser.add_argument("--ways", help=f"comma-separated, of part step (default all: {','.join(STEP_WAYS)})")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    arguments = parser.parse_args()
    arguments.ways = arguments.ways.split(",") if arguments.ways else list(STEP_WAYS)
    if unknown := set(arguments.ways) - set(STEP_WAYS):
        parser.error(f"--ways: there is no {', '.join(sorted(unknown))}; there are {', '.join(STEP_WAYS)}")
    arguments.sequences = [int(text) if text.isdecimal() else 0 for text in arguments.sequences.split(",")]
    if min(arguments.sequences) < 1:
        parser.error("--sequences must be positive numbers")
    if arguments.rounds < 1 or arguments.steps < 5 or arguments.ranks < 2:
        parser.error("--rounds must be at least 1, --steps at least 5, --ranks at least 2")
    return arguments


def measure_layer(rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each forward and backward by way, after all ways were compared with "eager".

    Raises:
        Mismatch: an output or a gradient differs.
    """
    ways, x, dout = build_layers()
    expected = run_layer(ways["eager"], x, dout)
    for name, layer in ways.items():
        for (what, want), got in zip(expected.items(), run_layer(layer, x, dout).values(), strict=True):
            off = ((got - want).abs().max() / want.abs().max()).item()
            if not off <= _LAYER_TOLERANCE:
                raise Mismatch(f"layer: {what} of {name} is {off:.1e} off, allowed is {_LAYER_TOLERANCE:.0e}.")
    names, seconds = list(ways), {name: [] for name in ways}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            for _ in range(_LAYER_REPEATS):
                start = time.process_time()
                run_layer(ways[name], x, dout)
                seconds[name].append(time.process_time() - start)
    return seconds


def run_layer(layer: nn.Module, x: torch.Tensor, dout: torch.Tensor) -> dict[str, torch.Tensor]:
    """One forward and backward; returns the output and all gradients by name."""
    x.grad = None
    layer.zero_grad()
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(dout)
    grads = sorted((f"gradient of {name}", param.grad) for name, param in layer.named_parameters())
    return {"output": out.detach(), "gradient of the input": x.grad, **dict(grads)}


def run_steps(arguments: argparse.Namespace, sequences: int) -> dict[str, Steps]:
    """Step after step, every way in rotating order: by way and step, what each rank measured.

    Raises:
        Mismatch: losses differ, or do not fall.
    """
    names: list[str] = arguments.ways
    results: dict[str, Steps] = {name: [] for name in names}
    touch_memory(_TOUCH_BYTES)
    with tempfile.TemporaryDirectory(prefix="titanlite-bench-") as folder, ExitStack() as stack:
        run_alone(partial(make_checkpoint, Path(folder)))
        teams = {}
        for name in names:
            teams[name] = stack.enter_context(Team(arguments.ranks, partial(build_way, name, Path(folder), sequences)))
            say(f"{sequences} x {SEQ_LEN} tokens per rank: {name} is built")
        for number in range(arguments.steps):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                results[name].append(teams[name].do(number))
            seconds = "  ".join(f"{name} {cpu_seconds(steps[-1]):.2f}" for name, steps in results.items())
            say(f"{sequences} x {SEQ_LEN} tokens per rank, step {number + 1}, CPU s: {seconds}")
    compare_losses(results)
    return results


def build_way(way: str, folder: Path, sequences: int) -> Callable[[int], Step]:
    """What trains a step on this rank and measures it. Collective, and so is what it returns."""
    train = STEP_WAYS[way](folder)

    def step(number: int) -> Step:
        tokens = make_tokens(number, sequences)
        dist.barrier()
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        loss = train(tokens)
        wall_s = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        loss = loss.detach().double()
        dist.all_reduce(loss)
        return Step(
            loss.item() / dist.get_world_size(),
            after.ru_utime - before.ru_utime,
            after.ru_stime - before.ru_stime,
            wall_s,
        )

    return step


def compare_losses(results: Mapping[str, Steps]) -> None:
    """Every way's losses must be those of `fsdp2` (without it, of the first way), and fall.

    Raises:
        Mismatch: they are not, or they do not.
    """
    reference = "fsdp2" if "fsdp2" in results else next(iter(results))
    expected = [ranks[0].loss for ranks in results[reference]]
    if not expected[-1] < expected[0] * (1 - 10 * _LOSS_TOLERANCE):
        raise Mismatch(f"step: the loss of {reference} does not fall: {expected}. Agreement would show nothing.")
    for name, steps in results.items():
        for number, (ranks, want) in enumerate(zip(steps, expected, strict=True), 1):
            got = ranks[0].loss
            if not abs(got - want) <= _LOSS_TOLERANCE * want:
                raise Mismatch(
                    f"step: loss {got:.6f} of {name} in step {number} is not the {want:.6f} of {reference}; allowed is "
                    f"{_LOSS_TOLERANCE:.0e}, relative."
                )


def cpu_seconds(ranks: Sequence[Step]) -> float:
    """CPU seconds of all ranks in one step."""
    return sum(rank.user_s + rank.system_s for rank in ranks)


def layer_table(seconds: Mapping[str, Sequence[float]]) -> str:
    """Medians of part `layer`."""
    rows = [["layer", "CPU ms", "min - max of runs", "speed-up"]]
    for name, runs in seconds.items():
        median = statistics.median(runs)
        spread = f"{min(runs) * 1e3:.1f} - {max(runs) * 1e3:.1f}"
        rows.append([name, f"{median * 1e3:.1f}", spread, f"{median / statistics.median(seconds['titanlite']):.2f}"])
    return markdown(rows)


def loss_table(results: Mapping[str, Steps], title: str) -> str:
    """Losses of some steps; all were compared."""
    names, num_steps = list(results), len(next(iter(results.values())))
    shown = sorted({0, 1, 2, num_steps // 2, num_steps - 1})
    rows = [[str(step + 1), *(f"{results[name][step][0].loss:.6f}" for name in names)] for step in shown]
    return f"{title}\n\n{markdown([['loss of step', *names], *rows])}"


def step_table(results: Mapping[str, Steps], title: str, sequences: int) -> str:
    """Medians of part `step` over the steps but those to warm up."""
    rows = [["step", "CPU s", "of it system", "tok/CPU s", "speed-up", "middle half", "wall s"]]
    measured = {name: steps[_WARM_UP:] for name, steps in results.items()}
    for name, steps in measured.items():
        seconds = statistics.median(map(cpu_seconds, steps))
        system = statistics.median(sum(rank.system_s for rank in ranks) for ranks in steps)
        wall = statistics.median(max(rank.wall_s for rank in ranks) for ranks in steps)
        speed = f"{len(steps[0]) * sequences * SEQ_LEN / seconds:.0f}"
        ratio = ["", ""]
        if "titanlite" in measured:
            pairs = zip(steps, measured["titanlite"], strict=True)
            low, median, high = statistics.quantiles([cpu_seconds(a) / cpu_seconds(b) for a, b in pairs], n=4)
            ratio = [f"{median:.2f}", f"{low:.2f} - {high:.2f}"]
        rows.append([name, f"{seconds:.2f}", f"{system:.2f}", speed, *ratio, f"{wall:.2f}"])
    return f"{title}\n\n{markdown(rows)}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(line, widths, strict=True))} |" for line in lines
    )


def describe(arguments: argparse.Namespace) -> str:
    """Machine, versions, and what was run, in one line."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]
    library = "oneDNN" if prefers_onednn() else "torch's BLAS"
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}, float32 products of "
        f"titanlite by {library}, Linux {platform.release()}; python {platform.python_version()}, "
        f"{', '.join(versions)}; layer: {LAYER_TOKENS} tokens, {arguments.rounds} rounds; "
        f"{arguments.steps} steps"
    )


def say(text: str) -> None:
    """A progress line, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
