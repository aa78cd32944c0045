"""`python -m titanlite plan --config FILE --world-size N`: what a run will take, without a GPU and without weights."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titanlite.assemble import build_model, build_on_meta
from titanlite.base.errors import ConfigError, TitanliteError
from titanlite.base.log import logger
from titanlite.checkpoint.pretrained import weights_of
from titanlite.config import JobConfig, load_config
from titanlite.config.assets import resolve_assets
from titanlite.distributed import ParallelDims
from titanlite.distributed.process_group import fake_ranks
from titanlite.features.estimate.assumed import AssumedCheckpoint
from titanlite.features.estimate.estimate import Estimate
from titanlite.features.estimate.hardware import DEFAULT_GPU, GPUS, Hardware, get_hardware
from titanlite.features.estimate.render import (
    render_collectives,
    render_memory,
    render_reads,
    render_stages,
    render_sweep,
    render_tensors,
    render_time,
    sweep_to_json,
    to_json,
)
from titanlite.features.estimate.stages import estimate_stages, merge_stages, trace_stages
from titanlite.features.estimate.sweep import sweep
from titanlite.features.muon.muon import muon_matrices
from titanlite.features.record.plan_file import RunPlan, build_run_plan
from titanlite.materialize import SourceProvider, build_plan
from titanlite.metrics.out_of_memory import describe_remedies
from titanlite.models.families import resolve_model_config
from titanlite.preflight import Checked, check

_GIBI = 2**30
_CUDA = torch.device("cuda")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; exit code 0, 1 if the run does not fit the GPU, or 2 after one clear error."""
    known, rest = _parser().parse_known_args(argv)
    level = logger.level
    logger.setLevel(logging.ERROR)  # what a run would log is not what is asked
    try:
        hardware = _hardware(known)
        if not 0 <= known.rank < max(known.world_size, 1):
            raise ConfigError(f"--rank={known.rank}: with --world-size={known.world_size} there are ranks 0 to "
                              f"{known.world_size - 1}.")  # fmt: skip
        job, source = _localize(load_config(rest))
        if known.sweep:
            return _sweep(job, known, hardware)
        checked = check(job, known.world_size)
        return _plan(checked, known, hardware, source)
    except TitanliteError as error:
        print(f"titanlite: error: {error}", file=sys.stderr)
        return 2
    finally:
        logger.setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m titanlite plan",
        description="Show what a run will take, before it is started: every tensor of a rank with placement, source "
        "and bytes, memory at the fullest moment of a step, bytes read, collectives, FLOPs, and the floor of a step's "
        "time. Needs --config, and takes overrides as training does. Nothing is downloaded but the model's sizes.",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    parser.add_argument("--rank", type=int, default=0, help="rank to look at (default: 0)")
    parser.add_argument("--gpu", default=DEFAULT_GPU, help=f"{', '.join(GPUS)} (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="one line per tensor, layers not folded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there, too")
    parser.add_argument("--sweep", action="store_true", help="try all degrees and checkpointing modes instead")
    parser.add_argument("--every-layer", action="store_true", help="trace all layers, not few of each kind; slower")
    parser.add_argument("--flops", type=float, help="TFLOP/s of the GPU in bfloat16")
    parser.add_argument("--intra-node-gbps", type=float, help="Gbit/s of a GPU to others of its node, one direction")
    parser.add_argument("--inter-node-gbps", type=float, help="Gbit/s of a GPU to other nodes, one direction")
    parser.add_argument("--gpus-per-node", type=int, help="ranks on one node (default: 8)")
    parser.add_argument("--memory-gib", type=float, help="memory of the GPU")
    parser.add_argument("--reserved-gib", type=float, help="of it, what is not for training (default: 3)")
    return parser


class _Clocks:
    """Time since this was made. That of the processor is the same on a busy machine, but for caches."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def describe(self) -> str:
        """`4.1 s, 3.9 s of processor time`."""
        wall, processor = time.perf_counter() - self._wall, time.process_time() - self._processor
        return f"{wall:.1f} s, {processor:.1f} s of processor time"


def _hardware(known: argparse.Namespace) -> Hardware:
    hardware = get_hardware(known.gpu)
    given = {
        "flops": ("flops", 1e12),
        "intra_node_bytes_s": ("intra_node_gbps", 1e9 / 8),
        "inter_node_bytes_s": ("inter_node_gbps", 1e9 / 8),
        "gpus_per_node": ("gpus_per_node", 1),
        "memory_bytes": ("memory_gib", _GIBI),
        "reserved_bytes": ("reserved_gib", _GIBI),
    }
    for name, (option, scale) in given.items():
        value = getattr(known, option)
        if value is None:
            continue
        if not (0 < value < float("inf") or (name == "reserved_bytes" and value == 0)):
            shown = f"--{option.replace('_', '-')}={value}"
            raise ConfigError(f"{shown}: a rate, size or number is more than 0. Correct it.")
        changed: Any = {name: int(value * scale) if name.endswith(("bytes", "node")) else value * scale}
        hardware = replace(hardware, **changed)
    return hardware


def _localize(job: JobConfig) -> tuple[JobConfig, str]:
    """`job` for a machine without the weights, and what its weights come from. Only sizes are fetched from the hub."""
    source = job.checkpoint.initial_load_path
    if not source or Path(source).expanduser().exists():
        return job, source
    job = replace(job, checkpoint=replace(job.checkpoint, initial_load_path=""))
    if not job.model.flavor and not job.model.hf_assets_path:
        job = replace(job, model=replace(job.model, hf_assets_path=source))
    return job, source


def planned_sources(checked: Checked, source: str) -> list[SourceProvider]:
    """What weights are read from: the folder if it is there, or what it is assumed to hold."""
    folder = checked.job.checkpoint.initial_load_path
    if not source:
        return []
    if not folder:
        return [AssumedCheckpoint(source)]
    with fake_ranks(checked.degrees.world_size):  # as rank 0, the one that reads headers
        return [weights_of(Path(folder), build_model(checked.model_config))]


def exact_plan(
    checked: Checked, sources: list[SourceProvider], rank: int, *, fold: bool, device: torch.device = _CUDA
) -> RunPlan:
    """Every tensor of `rank`; the model is described and sharded as in a run on devices like `device`."""
    with fake_ranks(checked.degrees.world_size, rank):
        dims = ParallelDims.build(checked.degrees, "cpu")
        model = build_on_meta(checked.job, checked.model_config, dims, device)
        return build_run_plan(build_plan(model, sources), muon_matrices(model, checked.job.optimizer), fold=fold)


def _plan(checked: Checked, known: argparse.Namespace, hardware: Hardware, source: str) -> int:
    job, model_config, degrees = checked.job, checked.model_config, checked.degrees
    started = _Clocks()
    run_plan = exact_plan(checked, planned_sources(checked, source), known.rank, fold=not known.all)
    print(f"{model_config.family}, {degrees}, {hardware.name}\n")
    print(render_tensors(run_plan) + "\n", flush=True)
    # Which rank owns which matrix does not repeat from layer to layer.
    every_layer = known.every_layer or job.optimizer.name == "Muon"

    traces = trace_stages(job, model_config, degrees, rank=known.rank, every_layer=every_layer)
    stages = estimate_stages(job, degrees, traces, hardware)
    estimate, whole = stages[degrees.stage_of(known.rank)], merge_stages(stages)
    print(render_memory(run_plan, estimate, hardware) + "\n")
    if degrees.pp > 1:
        print(render_stages(stages, hardware) + "\n")
    print(render_reads(run_plan, source and _name_of(checked, source)) + "\n")
    print(render_collectives(estimate, hardware, known.rank) + "\n")
    print(render_time(whole, hardware) + "\n")
    if not whole.fits(hardware):
        print(f"to fit: {describe_remedies(job)} --sweep tries all degrees and checkpointing modes.\n")
    print("\n".join(_assumptions(checked, estimate)))
    print(f"planned in {started.describe()}, {estimate.trace.traced_layers} layers traced")
    if known.json is not None:
        _write(known.json, to_json(run_plan, estimate, hardware, stages))
    return 0 if whole.fits(hardware) else 1


def _sweep(job: JobConfig, known: argparse.Namespace, hardware: Hardware) -> int:
    job = resolve_assets(job)
    model_config = resolve_model_config(job.model)  # degrees of the file need not be legal here
    started = _Clocks()

    def progress(traced: int) -> None:
        print(f"\r{traced} combinations traced", end="", file=sys.stderr, flush=True)

    show = progress if sys.stderr.isatty() else lambda traced: None
    found = sweep(job, model_config, known.world_size, hardware, show)
    if sys.stderr.isatty():
        print(f"\r{' ' * 40}\r", end="", file=sys.stderr, flush=True)
    print(render_sweep(found, hardware))
    print(f"{found.traced} combinations traced, the others derived, in {started.describe()}")
    if job.optimizer.name == "Muon":
        print("Muon: its exchange is taken from few layers, and from the traced number of replicas. Plan one of them.")
    if known.json is not None:
        _write(known.json, {"world_size": known.world_size, "hardware": vars(hardware), **sweep_to_json(found)})
    return 0 if found.fitting else 1


def _name_of(checked: Checked, source: str) -> str:
    if checked.job.checkpoint.initial_load_path:
        return source
    return f"{source}, which is not here: as if every tensor were stored in bfloat16"


def _assumptions(checked: Checked, estimate: Estimate) -> list[str]:
    """What the figures take for granted."""
    job, notes = checked.job, []
    if checked.model_config.num_experts:
        notes.append("routing is balanced: each expert gets equally many tokens, each rank sends equally many rows")
    if job.optimizer.name == "Muon":
        notes.append("Muon: FLOPs and exchange are this rank's; another may own a few matrices more")
    if job.compile.enable:
        notes.append("compile.enable: traced uncompiled, which keeps as much or more")
    if job.training.enable_cpu_offload:
        notes.append("training.enable_cpu_offload: traced without it, then weights, gradients and states taken off")
    if job.data.dataset == "images":
        notes.append("images are not traced: add the vision tower's activations, which depend on their sizes")
    if job.training.objective == "dpo":
        notes.append("one pair per row; cached log-probabilities are there already")
    trace = estimate.trace
    if trace.micro_batches > trace.traced_micro_batches:
        some = "two are traced, the others are like the second"
        if trace.traced_micro_batches > 2:
            some = f"{trace.traced_micro_batches} are traced, the others are like the last but one of these"
        notes.append(f"{trace.micro_batches} micro-batches: {some}")
    notes.append("time: matrix products at the GPU's peak and links at their rate; no latency, no memory traffic")
    return ["assumed:", *(f"  {note}" for note in notes)]


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json={path}: cannot be written: {error.strerror}. Choose another file.") from None
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
