#!/usr/bin/env python
"""Measure the MoE kernels on one GPU: TFLOP/s against torch's grouped_mm and a loop of cuBLAS.

    python scripts/bench/moe_gpu.py                # all rows, under 8 minutes on an H200
    python scripts/bench/moe_gpu.py --quick        # Qwen3-30B-A3B at 4k and 16k tokens, about 2 minutes
    python scripts/bench/moe_gpu.py --sweep        # instead: the best tiles, as lines to paste into TILES

Rows: every grouped matmul of the experts alone, ours also with what is fused into it, then all
experts of a layer, forward as in training and forward + backward. Models of which one GPU cannot
hold a whole layer with its gradients are measured as one of 8 expert-parallel ranks holds them.

TFLOP/s    matmul FLOPs over the median device time; in parentheses, the share of the dense matmul's rate that was
           measured in the same run (cuBLAS bfloat16 8192^3)
floor      least time of the layer: each kernel takes the longer of its FLOPs and its bytes at the measured rates
kept       MB that stay allocated from forward to backward, without the output (1e6 bytes)
peak       MB above inputs and weights during forward + backward, gradients of the weights included
balanced   all experts get the same number of rows; zipf: the e-th gets a share of about e^-0.8
Inputs are random, and several sets of them take turns, so that none is in the L2 cache when its
turn comes. `pytest -m gpu` shows that they are right. Exit code 1: nothing could be measured. 2:
there is no GPU.
"""  # noqa: E501

import argparse
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from gpu_common import (
    Budget,
    CudaTimer,
    DeviceLostError,
    Machine,
    Timer,
    attempt,
    free_memory,
    inspect_machine,
    machine_data,
    markdown_table,
    measure_flops,
    measure_memory,
    missing_gpu,
    num_copies,
    say,
    write_report,
)
from moe_gpu_cases import (
    LOOP,
    OURS,
    SHAPES,
    SKEWS,
    TOKENS,
    TORCH,
    Inputs,
    MoEShape,
    build_inputs,
    copy_bytes,
    differentiate,
    experts_flops,
    fitting,
    floor_s,
    gemms,
    layers,
)
from moe_gpu_sweep import sweep

_Row = dict[str, Any]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="Qwen3-30B-A3B at 4096 and 16384 tokens only"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="look for the best tiles instead of measuring all rows"
    )
    parser.add_argument(
        "--budget-s", type=float, default=450, help="seconds; the rest is skipped (default 450)"
    )
    parser.add_argument("--shapes", default="", help="only models whose name contains this")
    parser.add_argument("--tokens", help=f"comma-separated (default {','.join(map(str, TOKENS))})")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/bench"), help="folder of the report (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    default = TOKENS[:2] if arguments.quick else TOKENS
    try:
        arguments.tokens = (
            [int(t) for t in arguments.tokens.split(",")] if arguments.tokens else list(default)
        )
    except ValueError:
        parser.error(f"--tokens: '{arguments.tokens}' is no comma-separated list of whole numbers")
    arguments.shapes = [
        s for s in SHAPES[: 1 if arguments.quick else None] if arguments.shapes in s.name
    ]
    if not arguments.shapes or min(arguments.tokens) < 16:
        parser.error(
            f"--shapes: there are {', '.join(s.name for s in SHAPES)}; --tokens: 16 or more each"
        )
    return arguments


def main() -> int:
    """Run what the command line asks for."""
    arguments = parse_arguments()
    if problem := missing_gpu():
        print(f"moe_gpu.py: {problem}", file=sys.stderr)
        return 2
    budget, timer = Budget(arguments.budget_s), CudaTimer(0.1 if arguments.quick else 0.2)
    machine = inspect_machine(timer)
    say(machine.describe())
    if arguments.sweep:
        lines = sweep(SHAPES[0], budget, timer, machine.flops, "cuda", torch.bfloat16)
        text = "\n".join(
            [
                "# Tiles",
                "",
                machine.describe(),
                "",
                "```python",
                *lines,
                "```",
                *skipped_lines(budget),
            ]
        )
        data = {"machine": machine_data(machine), "lines": lines, "skipped": budget.skipped}
        report = write_report(arguments.out, "moe_gpu_sweep", text, data)
        say("\n".join([*lines, f"wrote {report[0]} and {report[1]}"]))
        return 0

    rows: list[_Row] = []
    end_flops = None
    try:
        for shape in arguments.shapes:
            for tokens in arguments.tokens:
                for skew in SKEWS:
                    rows.extend(
                        measure_case(
                            shape, tokens, skew, machine, budget, timer, "cuda", torch.bfloat16
                        )
                    )
                    save(arguments.out, machine, rows, budget, None)
        end_flops = measure_flops(timer)
    except DeviceLostError as error:
        budget.skipped.append(f"everything after this: {error}")
    paths, text = save(arguments.out, machine, rows, budget, end_flops)
    say(f"\n{text}\nwrote {paths[0]} and {paths[1]}")
    measured = any(row["ms"] is not None for row in rows)
    return 0 if measured else 1


def measure_case(
    shape: MoEShape,
    tokens: int,
    skew: str,
    machine: Machine,
    budget: Budget,
    timer: Timer,
    device: str,
    dtype: torch.dtype,
) -> Iterator[_Row]:
    """All rows of one model, number of tokens and skew, each as soon as it is measured."""
    name = f"{shape.name}, {tokens} tokens, {skew}"
    if not budget.allows(name):
        return
    held, held_tokens = fitting(shape, tokens, machine.memory_bytes)
    free = machine.memory_bytes - held.needed_bytes(held_tokens)
    copies = num_copies(copy_bytes(held, held_tokens), machine.l2_bytes, free)
    inputs, problem = attempt(
        lambda: build_inputs(held, held_tokens, SKEWS[skew], device, dtype, copies)
    )
    case = {"shape": held.name, "tokens": tokens, "skew": skew}
    if inputs is None:
        yield {**case, "kind": "inputs", "way": OURS, "ms": None, "problem": problem}
        return
    case |= {"rows": inputs.num_rows, "most_rows": max(inputs.sizes), "copies": copies}
    matmuls = measure_gemms(inputs, name, budget, timer)
    for row in chain(matmuls, measure_layers(inputs, name, machine, budget, timer)):
        if row["ms"] is not None:
            row["tflops"] = row["flops"] / row["ms"] / 1e9
            row["of_dense"] = row["tflops"] * 1e12 / machine.flops
        result = (
            row["problem"]
            or f"{row['ms']:.3f} ms, {row['tflops']:.0f} TFLOP/s ({row['of_dense']:.0%})"
        )
        say(f"{name}: {row['kind']}, {row['way']}: {result}")
        yield case | row
    del inputs
    free_memory()


def timed(call: Any, timer: Timer) -> _Row:
    """The measured part of a row."""
    sample, problem = attempt(lambda: timer.measure(call))
    if sample is None:
        return {"ms": None, "problem": problem}
    milliseconds = {"ms": sample.seconds, "lowest_ms": sample.lowest, "highest_ms": sample.highest}
    return {key: value * 1e3 for key, value in milliseconds.items()} | {
        "runs": sample.runs,
        "problem": None,
    }


def measure_gemms(inputs: Inputs, name: str, budget: Budget, timer: Timer) -> Iterator[_Row]:
    """Each matmul in each way."""
    for kind, gemm in gemms(inputs).items():
        if budget.allows(f"{name}: {kind}"):
            for way, call in gemm.ways.items():
                row = timed(lambda i, call=call: call(inputs.copy(i)), timer)
                yield {"kind": kind, "way": way, "flops": gemm.flops, **row}
    inputs.drop_rows()


def measure_layers(
    inputs: Inputs, name: str, machine: Machine, budget: Budget, timer: Timer
) -> Iterator[_Row]:
    """Forward, and forward + backward with its memory, in each way."""
    shape, tokens = inputs.shape, inputs.tokens
    for c in inputs.copies:
        for tensor in (c.x, c.gate_up, c.down, c.row_weight):
            tensor.requires_grad_()
    floors = {
        f"floor_{'fused' if fused else 'unfused'}_ms": [
            1e3
            * floor_s(
                shape, tokens, machine.flops, machine.bandwidth, fused=fused, backward=backward
            )
            for backward in (False, True)
        ]
        for fused in (True, False)
    }
    for way, experts in layers(inputs).items():
        if not budget.allows(f"{name}: layer, {way}"):
            continue

        def forward(i: int, experts: Any = experts) -> torch.Tensor:
            return experts(inputs.copy(i))

        def both(i: int, experts: Any = experts) -> tuple[torch.Tensor, ...]:
            c = inputs.copy(i)
            return differentiate(experts(c), c)

        for kind, call, backward in (
            ("layer forward", forward, False),
            ("layer forward + backward", both, True),
        ):
            row = {
                "kind": kind,
                "way": way,
                "flops": experts_flops(shape, tokens, backward),
                **timed(call, timer),
            }
            row |= {key: values[backward] for key, values in floors.items()}
            if backward and row["ms"] is not None:
                c = inputs.copy(0)
                memory, _ = attempt(
                    lambda experts=experts, c=c: measure_memory(
                        lambda: experts(c), lambda out: differentiate(out, c)
                    )
                )
                row |= (
                    {}
                    if memory is None
                    else {"kept_mb": memory.kept / 1e6, "peak_mb": memory.peak / 1e6}
                )
            yield row


def save(
    folder: Path, machine: Machine, rows: list[_Row], budget: Budget, end_flops: float | None
) -> tuple[list[Path], str]:
    """Write the report as far as it goes; (paths, Markdown)."""
    text = report(machine, rows, budget, end_flops)
    data = {
        "machine": machine_data(machine),
        "end_flops": end_flops,
        "rows": rows,
        "skipped": budget.skipped,
    }
    return write_report(folder, "moe_gpu", text, data), text


def report(machine: Machine, rows: list[_Row], budget: Budget, end_flops: float | None) -> str:
    """The Markdown report."""
    lines = ["# MoE kernels", "", machine.describe()]
    if end_flops is not None:
        lines.append(f"The dense matmul at the end of the run: {end_flops / 1e12:.0f} TFLOP/s.")
    lines.append("Units and columns are explained at the top of scripts/bench/moe_gpu.py.")
    cases: dict[str, list[_Row]] = {}
    for row in rows:
        title = f"{row['shape']}, {row['tokens']} tokens, {row['skew']}"
        if "rows" in row:
            title += f" ({row['rows']} rows, the most loaded expert has {row['most_rows']})"
        cases.setdefault(title, []).append(row)
    for title, found in cases.items():
        lines += ["", f"## {title}", "", matmul_table(found), "", layer_table(found)]
    return "\n".join([*lines, *skipped_lines(budget)])


def matmul_table(rows: list[_Row]) -> str:
    """TFLOP/s of the single matmuls, a column for each way."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if not row["kind"].startswith("layer"):
            cells.setdefault(row["kind"], {})[row["way"]] = rate(row)
    ways = (OURS, TORCH, LOOP)
    return markdown_table(
        ["TFLOP/s", *ways], [[kind, *(of.get(w, "") for w in ways)] for kind, of in cells.items()]
    )


def layer_table(rows: list[_Row]) -> str:
    """Time, TFLOP/s and memory of the layers."""
    table = []
    for row in rows:
        if row["kind"].startswith("layer"):
            time = "" if row["ms"] is None else f"{row['ms']:.3f}"
            memory = [f"{row[key]:.0f}" if key in row else "" for key in ("kept_mb", "peak_mb")]
            floor = row["floor_fused_ms" if row["way"] == "titanlite fused" else "floor_unfused_ms"]
            table.append(
                [
                    f"{row['kind'].removeprefix('layer ')}: {row['way']}",
                    time,
                    f"{floor:.3f}",
                    rate(row),
                    *memory,
                ]
            )
    return markdown_table(["all experts", "ms", "floor ms", "TFLOP/s", "kept MB", "peak MB"], table)


def rate(row: _Row) -> str:
    """A cell with TFLOP/s, or what went wrong."""
    return row["problem"] or f"{row['tflops']:.0f} ({row['of_dense']:.0%})"


def skipped_lines(budget: Budget) -> list[str]:
    """What the budget did not allow."""
    return (
        ["", "Skipped, no time left:", *(f"- {what}" for what in budget.skipped)]
        if budget.skipped
        else []
    )


if __name__ == "__main__":
    sys.exit(main())
