#!/usr/bin/env python
"""Compare the CPU time of an MoE layer and of a whole training step with transformers and torch FSDP2, in float32.

    python scripts/bench/moe_cpu.py --rounds 3

Part `layer`: forward and backward of titanlite's `MoE` and of transformers' `Qwen3MoeSparseMoeBlock`, its experts as
"grouped_mm" and "eager", on one thread, with the same weights and inputs. Outputs and gradients are compared first.

Part `step`: a Qwen3-MoE on gloo ranks, from one Hugging Face checkpoint made on the spot, in freshly forked processes:

titanlite              the trainer's step with the experts split over the ranks (EP), the rest by FSDP2, gathered once
titanlite_fsdp         the same with all parameters sharded by FSDP2, as in the ways below
titanlite_fsdp_packed  the same with document ids, as titanlite's own data has them, and so with an attention mask
fsdp2                  transformers' model, `fully_shard` on each layer and the root, `clip_grad_norm_`, fused AdamW
fsdp2_keep             the same with the C library told to keep freed memory, as titanlite does on CPU ranks
transformers_sharded   as fsdp2, but sharded by transformers itself: `DistributedConfig(fsdp_size=...)`

All but the packed one have a document per row and causal attention. Same batches, constant learning rate, no router
loss, no activation checkpointing, weight decay on matrices only. Every step's loss has to agree with `fsdp2` in every
round. The clock runs from the forward to the end of `zero_grad`; of the loss's all-reduce, which every way needs to
report it, only titanlite's is inside.

CPU s      user and system time of all threads of all ranks, per step: median over steps and rounds but each first step.
           It grew by half while other processes competed for the cores; compare ways of one run, on a quiet machine
tok/CPU s  tokens of all ranks per CPU s
speed-up   tokens per CPU s of titanlite over this way's
wall s     the slowest rank's time for a step, median
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
from collections.abc import Mapping, Sequence
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
    build_layers,
    make_checkpoint,
    make_tokens,
    run_ranks,
)
from torch import nn

_LAYER_REPEATS = 5  # runs per way and round
_LAYER_TOLERANCE = 1e-5  # of the largest element: float32 sums in another order; seen: 1e-6
_LOSS_TOLERANCE = 1e-4  # relative; seen: 2e-7 after 6 steps
_TOUCH_BYTES = 2_000_000_000
_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.distributed",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "titanlite.trainer",
)


@dataclass
class Steps:
    """What one rank measured, by step.

    Attributes:
        loss: mean over the tokens of all ranks.
        user_s, system_s: CPU time of all threads of this rank.
        wall_s: seconds.
    """

    loss: list[float]
    user_s: list[float]
    system_s: list[float]
    wall_s: list[float]


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
            facts["layer"] = run_ranks(1, partial(measure_layer, arguments.rounds))[0]
            tables.append(layer_table(facts["layer"]))
        if arguments.part in ("step", "all"):
            facts["step"] = {}
            for sequences in arguments.sequences:
                measured = run_steps(arguments, sequences)
                facts["step"][sequences] = {
                    name: [[asdict(rank) for rank in run] for run in runs] for name, runs in measured.items()
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
    parser.add_argument("--rounds", type=int, default=3, help="runs of every way (default 3)")
    parser.add_argument("--steps", type=int, default=6, help="steps per run, the first to warm up (default 6)")
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


def run_steps(arguments: argparse.Namespace, sequences: int) -> dict[str, list[list[Steps]]]:
    """Every way once per round, in rotating order: by way and round, what each rank measured.

    Raises:
        Mismatch: losses differ, or do not fall.
    """
    results: dict[str, list[list[Steps]]] = {name: [] for name in arguments.ways}
    names = list(results)
    with tempfile.TemporaryDirectory(prefix="titanlite-bench-") as folder:
        run_ranks(1, partial(make_checkpoint, Path(folder)))
        for number in range(arguments.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                touch_memory(_TOUCH_BYTES)
                measure = partial(measure_steps, name, Path(folder), arguments.steps, sequences)
                results[name].append(run_ranks(arguments.ranks, measure))
                seconds = statistics.median(cpu_seconds(results[name][-1]))
                say(f"{sequences} x {SEQ_LEN} tokens per rank, round {number + 1}: {name} {seconds:.2f} CPU s per step")
    compare_losses(results)
    return results


def measure_steps(way: str, folder: Path, num_steps: int, sequences: int) -> Steps:
    """Train `num_steps` steps on this rank and measure each. Collective: every rank must call."""
    step = STEP_WAYS[way](folder)
    result = Steps([], [], [], [])
    for number in range(num_steps):
        tokens = make_tokens(number, sequences)
        dist.barrier()
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        loss = step(tokens)
        result.wall_s.append(time.monotonic() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        result.user_s.append(after.ru_utime - before.ru_utime)
        result.system_s.append(after.ru_stime - before.ru_stime)
        loss = loss.detach().double()
        dist.all_reduce(loss)
        result.loss.append(loss.item() / dist.get_world_size())
    return result


def compare_losses(results: Mapping[str, Sequence[Sequence[Steps]]]) -> None:
    """Every run's losses must be those of the first run of `fsdp2` (without it, of the first way), and fall.

    Raises:
        Mismatch: they are not, or they do not.
    """
    reference = "fsdp2" if "fsdp2" in results else next(iter(results))
    expected = results[reference][0][0].loss
    if not expected[-1] < expected[0] * (1 - 10 * _LOSS_TOLERANCE):
        raise Mismatch(f"step: the loss of {reference} does not fall: {expected}. Agreement would show nothing.")
    for name, runs in results.items():
        for number, run in enumerate(runs):
            for step, (got, want) in enumerate(zip(run[0].loss, expected, strict=True)):
                if not abs(got - want) <= _LOSS_TOLERANCE * want:
                    raise Mismatch(
                        f"step: loss {got:.6f} of {name} in round {number + 1}, step {step + 1}, is not the "
                        f"{want:.6f} of {reference}; allowed is {_LOSS_TOLERANCE:.0e}, relative."
                    )


def cpu_seconds(run: Sequence[Steps]) -> list[float]:
    """CPU seconds of all ranks, by step, without the first."""
    by_rank = [[user + system for user, system in zip(r.user_s, r.system_s, strict=True)] for r in run]
    return [sum(ranks) for ranks in zip(*by_rank, strict=True)][1:]


def layer_table(seconds: Mapping[str, Sequence[float]]) -> str:
    """Medians of part `layer`."""
    rows = [["layer", "CPU ms", "min - max of runs", "speed-up"]]
    for name, runs in seconds.items():
        median = statistics.median(runs)
        spread = f"{min(runs) * 1e3:.1f} - {max(runs) * 1e3:.1f}"
        rows.append([name, f"{median * 1e3:.1f}", spread, f"{median / statistics.median(seconds['titanlite']):.2f}"])
    return markdown(rows)


def loss_table(results: Mapping[str, Sequence[Sequence[Steps]]], title: str) -> str:
    """Losses of the first round by step; the other rounds were compared too."""
    names = list(results)
    losses = [results[name][0][0].loss for name in names]
    numbered = enumerate(zip(*losses, strict=True), 1)
    rows = [[str(i), *(f"{loss:.6f}" for loss in row)] for i, row in numbered]
    return f"{title}\n\n{markdown([['loss of step', *names], *rows])}"


def step_table(results: Mapping[str, Sequence[Sequence[Steps]]], title: str, sequences: int) -> str:
    """Medians of part `step` over rounds and steps."""
    rows = [["step", "CPU s", "min - max of steps", "of it system", "tok/CPU s", "speed-up", "wall s"]]
    cpu = {name: statistics.median(s for run in runs for s in cpu_seconds(run)) for name, runs in results.items()}
    for name, runs in results.items():
        steps = [seconds for run in runs for seconds in cpu_seconds(run)]
        tokens = len(runs[0]) * sequences * SEQ_LEN
        system = statistics.median(
            sum(values) for run in runs for values in list(zip(*(rank.system_s for rank in run), strict=True))[1:]
        )
        wall = statistics.median(
            max(values) for run in runs for values in list(zip(*(rank.wall_s for rank in run), strict=True))[1:]
        )
        ratio = f"{cpu[name] / cpu['titanlite']:.2f}" if "titanlite" in cpu else ""
        spread = f"{min(steps):.2f} - {max(steps):.2f}"
        rows.append([name, f"{cpu[name]:.2f}", spread, f"{system:.2f}", f"{tokens / cpu[name]:.0f}", ratio])
        rows[-1].append(f"{wall:.2f}")
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
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}; python {platform.python_version()}, "
        f"{', '.join(versions)}; layer: {LAYER_TOKENS} tokens; {arguments.rounds} rounds, "
        f"{arguments.steps} steps"
    )


def say(text: str) -> None:
    """A progress line, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
