#!/usr/bin/env python
"""Measure a training step on one GPU operator by operator, beside what `plan` expects of it.

    python scripts/bench/step_gpu.py               # Qwen3-30B-A3B and Qwen3-8B, cut to few layers, about a minute

Each operator of a step is timed between two events, behind a sleep in which the host gets ahead:
the device's time alone. The first table has the parts of the step, the second the rates of
`features.choice.hardware.RATES`: what the calls of each reached, as a share of the data sheet's
peak. Full width, one document per row, attention by `varlen`, titanlite's kernels. An operator with
several products has one time, which is shared out as expected. The third table has the operators
that take longest, with the bytes that they read and write, counted once, over their time.

whole      the median step without the timing, with gaps between kernels
launches   kernels of the step
host us    of a kernel: a step of a model so small that the host is the slower, over its kernels; compiled: the same
           step with `compile.enable`, over the same number
Exit code 2: there is no GPU.
"""  # noqa: E501

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from gpu_common import (
    CudaTimer,
    free_memory,
    inspect_machine,
    machine_data,
    markdown_table,
    missing_gpu,
    say,
    write_report,
)
from train_gpu import BenchTrainer, Variant, make_batches, measure_steps, plan_job

from titanlite.config import ModelConfig
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import Batch
from titanlite.features.choice.hardware import RATES, Hardware, get_hardware
from titanlite.features.estimate.estimate import kernel_s, step_time
from titanlite.features.estimate.operators import Work, cuda_workspace
from titanlite.features.estimate.stand_in import observed
from titanlite.features.estimate.trace import trace_step
from titanlite.features.estimate.tracker import PARTS, Kind, StepRecorder
from titanlite.launch.process_group import init_distributed
from titanlite.models.families import families
from titanlite.preflight import Checked

VARIANT = Variant("triton", attention="documents, varlen")
_MOST_OPERATORS = 14
_SLEEP_CYCLES = 1_000_000  # half a millisecond: longer than the host takes for an operator


@dataclass(frozen=True)
class Case:
    """A model cut to so many layers, with rows of `seq_len` tokens."""

    name: str
    config: ModelConfig
    seq_len: int = 4096
    sequences: int = 4


def cases() -> list[Case]:
    """What is measured: experts of 768, and a dense model."""
    return [
        Case(
            "Qwen3-30B-A3B, 4 layers",
            replace(families()["qwen3_moe"].presets["30B-A3B"], num_layers=4),
        ),
        Case("Qwen3-8B, 4 layers", replace(families()["qwen3"].presets["8B"], num_layers=4)),
    ]


class TimedRecorder(StepRecorder):
    """Also times the device's work of each operator.

    Attributes:
        timed: of each operator its name, its begin and end, and what it does.
    """

    def __init__(self, persistent: Sequence[torch.Tensor]) -> None:
        super().__init__(persistent, cuda_workspace)
        self.timed: list[tuple[str, list[Any], list[tuple[Kind, Work]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator between two events; on a CPU, between two readings of the clock."""
        done: list[tuple[Kind, Work]] = []
        if not torch.cuda.is_available():
            times = [time.perf_counter(), 0.0]
            self.timed.append((func.name(), times, done))
            out = super().__torch_dispatch__(func, types, args, kwargs)
            times[1] = time.perf_counter()
            return out
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.timed.append((func.name(), [begin, end], done))
        torch.cuda._sleep(_SLEEP_CYCLES)
        begin.record()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        end.record()
        return out

    def add(self, kind: Kind, work: Work) -> None:
        """Note what the latest operator does beside its time."""
        super().add(kind, work)
        self.timed[-1][2].append((kind, work))

    def seconds(self, hardware: Hardware) -> list[tuple[str, Kind, Work, float]]:
        """Operators and what they did, with the seconds it took. Synchronizes."""
        if cuda := torch.cuda.is_available():
            torch.cuda.synchronize()
        found = []
        for name, (begin, end), done in self.timed:
            seconds = begin.elapsed_time(end) / 1e3 if cuda else end - begin
            shares = [kernel_s(kind, work, hardware) if kind.part else 0.0 for kind, work in done]
            whole = sum(shares)
            found += [
                (name, kind, work, seconds * (share / whole if whole else 1 / len(done)))
                for (kind, work), share in zip(done, shares, strict=True)
            ]
        return found


def make_rows(case: Case, device: torch.device) -> list[Batch]:
    """Micro-batches of random tokens, each row one document, as a plan takes them."""
    batches = make_batches(case.config, case.seq_len, case.sequences, device, documents=True)
    for batch in batches:
        assert batch.document_ids is not None and batch.positions is not None
        batch.document_ids.zero_()
        batch.positions.copy_(torch.arange(case.seq_len, device=device).expand_as(batch.positions))
    return batches


def expect(case: Case, hardware: Hardware) -> dict[str, float]:
    """Expected milliseconds of each part, by a trace without data; there must be no process
    group.
    """
    job = plan_job(VARIANT, case.seq_len, case.sequences)
    trace = trace_step(Checked(job, case.config, Degrees()), every_layer=True)
    parts = step_time(trace, Degrees(), hardware).parts
    return {name: part.exposed_s * 1e3 for name, part in parts.items()}


def measure(
    case: Case, steps: int, hardware: Hardware, device: torch.device, variant: Variant = VARIANT
) -> dict[str, Any]:
    """Time whole steps, then one by its operators."""
    trainer = BenchTrainer(case.config, case.seq_len, case.sequences, device)
    batches = make_rows(case, device)
    trainer.choose(variant)
    whole = measure_steps(lambda i: trainer.run(batches[i % len(batches)]), steps, device)
    states = [
        v
        for state in trainer.optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor)
    ]
    recorder = TimedRecorder([*trainer.model.parameters(), *states])
    with observed(trainer, recorder):
        trainer.run(batches[0])
    parts: defaultdict[str, float] = defaultdict(float)
    rates: defaultdict[str, Work] = defaultdict(Work)
    times: defaultdict[str, float] = defaultdict(float)
    operators: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    launches = 0
    for name, kind, work, seconds in recorder.seconds(hardware):
        if kind.part:  # one rank exchanges nothing
            of = operators[kind.part, name]
            operators[kind.part, name] = [
                of[0] + 1,
                of[1] + seconds * 1e3,
                of[2] + work.nbytes / 1e9,
            ]
            parts[kind.part] += seconds * 1e3
            rates[kind.call.rate] += work
            times[kind.call.rate] += seconds
            launches += work.launches
    shares = {}
    for rate, work in rates.items():
        peak, _ = RATES[rate]
        amount = work.flops if peak != "memory_bytes_s" else work.nbytes
        shares[rate] = amount / times[rate] / getattr(hardware, peak) if times[rate] else None
    return {
        "case": case.name,
        "whole_ms": whole["step_s"] * 1e3,
        "parts_ms": dict(parts),
        "shares": shares,
        "rates_ms": {rate: seconds * 1e3 for rate, seconds in times.items()},
        "operators": [
            (*key, *of) for key, of in sorted(operators.items(), key=lambda item: -item[1][1])
        ],
        "launches": launches,
    }


def render(found: dict[str, Any], expected: dict[str, float]) -> str:
    """Three tables in Markdown."""
    names = [*(part for part in PARTS if part in found["parts_ms"] or part in expected)]
    parts = [
        [name, f"{expected.get(name, 0):.2f}", f"{found['parts_ms'].get(name, 0):.2f}"]
        for name in names
    ]
    sums = sum(expected.get(name, 0) for name in names), sum(found["parts_ms"].values())
    others = sum(expected.values()) - sums[0]
    parts.append(["all of these", *(f"{value:.2f}" for value in sums)])
    parts.append(["whole", f"{sums[0] + others:.2f}", f"{found['whole_ms']:.2f}"])
    rates = [
        [
            rate,
            f"{RATES[rate][1]:.1%}",
            "" if share is None else f"{share:.1%}",
            f"{found['rates_ms'][rate]:.2f}",
        ]
        for rate, share in found["shares"].items()
    ]
    head = f"## {found['case']}: {found['launches']} launches"
    tables = (
        markdown_table(["ms", "expected", "measured"], parts),
        markdown_table(["of the peak", "assumed", "measured", "ms"], rates),
        markdown_table(
            ["operator", "part", "calls", "ms", "GB/s"],
            [
                [name, part, str(calls), f"{ms:.2f}", f"{nbytes / ms * 1e3:,.0f}" if ms else ""]
                for part, name, calls, ms, nbytes in found["operators"][:_MOST_OPERATORS]
            ],
        ),
    )
    return "\n\n".join([head, *tables])


def main() -> int:
    """Expect, measure, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", default="h200", help="GPU that is expected, as `plan --gpu` takes it"
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="timed steps, after 3 more (default 8)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/bench"), help="folder of the report (%(default)s)"
    )
    arguments = parser.parse_args()
    if problem := missing_gpu():
        print(f"step_gpu.py: {problem}", file=sys.stderr)
        return 2
    hardware = get_hardware(arguments.rates)
    small = Case("host", replace(families()["qwen3_moe"].presets["debug"], num_layers=8), 128, 1)
    expected = [expect(case, hardware) for case in cases()]
    machine = inspect_machine(CudaTimer(0.2))
    say(machine.describe())
    device = init_distributed(300)
    found, texts = [], ["# Steps by operators", machine.describe()]
    for case, wanted in zip(cases(), expected, strict=True):
        found.append(measure(case, arguments.steps, hardware, device) | {"expected_ms": wanted})
        texts.append(render(found[-1], wanted))
        say(texts[-1])
        free_memory()
    host = measure(small, 20, hardware, device)
    host["compiled_ms"] = measure(small, 20, hardware, device, replace(VARIANT, compiled=True))[
        "whole_ms"
    ]
    eager, compiled = (
        f"{host[name] * 1e3 / host['launches']:.1f}" for name in ("whole_ms", "compiled_ms")
    )
    texts.append(f"host us: {eager} per kernel of {host['launches']}; compiled: {compiled}")
    data = {"machine": machine_data(machine), "cases": found, "host": host}
    paths = write_report(arguments.out, "step_gpu", "\n\n".join(texts), data)
    say(f"{texts[-1]}\nwrote {paths[0]} and {paths[1]}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
