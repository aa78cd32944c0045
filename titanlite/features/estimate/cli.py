"""`python -m titanlite plan`: whether a run fits, how fast it is and what to change, without a GPU
or weights.
"""

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from titanlite.assemble import build_unsharded
from titanlite.base.errors import ConfigError
from titanlite.base.log import logger
from titanlite.base.text import Parser, command
from titanlite.config import JobConfig, ModelConfig, load_config
from titanlite.config.load import CODE, Reader
from titanlite.config.parallelism import CHOSEN, set_values
from titanlite.features.choice.at_start import describe_model
from titanlite.features.choice.choose import Choice, choose, take
from titanlite.features.choice.hardware import DEFAULT_GPU, GPUS, Hardware, get_hardware
from titanlite.features.estimate import render
from titanlite.features.estimate.estimate import merge_stages, plan_stages
from titanlite.features.estimate.proposals import Plan, Planned, propose, sweep
from titanlite.optim.expert_bias import complete_balancing
from titanlite.preflight import Checked, check

# Option -> (field of Hardware, unit, help).
_FIGURES = {
    "flops": ("flops", 1e12, "TFLOP/s of the GPU in bfloat16"),
    "memory-gbps": ("memory_bytes_s", 1e9, "Gbyte/s of the GPU's memory"),
    "intra-node-gbps": (
        "intra_node_bytes_s",
        1e9 / 8,
        "Gbit/s from a GPU to others in its node, one direction",
    ),
    "inter-node-gbps": (
        "inter_node_bytes_s",
        1e9 / 8,
        "Gbit/s from a GPU to other nodes, one direction",
    ),
    "gpus-per-node": ("gpus_per_node", 1, "ranks on one node (default: 8)"),
    "memory-gib": ("memory_bytes", 2**30, "memory of the GPU"),
    "reserved-gib": ("reserved_bytes", 2**30, "part of it that training cannot use (default: 3)"),
}
# Settings of a run without a file, and of `--objective` in any run.
_OBJECTIVES = {
    "sft": ("--data.dataset=examples",),
    "pretrain": ("--data.dataset=text", "--training.objective=next_token"),
    "dpo": ("--data.dataset=examples", "--training.objective=dpo"),
}
_MANY_LAYERS = 24
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Request:
    """The parsed arguments."""

    known: argparse.Namespace
    hardware: Hardware
    job: JobConfig
    weights: str  # name of the model that training begins with; "" for random weights

    def check(self) -> Checked:
        """Check the configuration. Raises ConfigError: it is wrong."""
        checked = check(self.job, self.known.world_size, weights=False)
        if self.weights:
            return checked
        moe = complete_balancing(checked.job.moe, checked.model_config, has_weights=False)
        return replace(checked, job=replace(checked.job, moe=moe))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; exit code 0, 1 if the run does not fit the GPU, or 2 after one clear
    error.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    level = logger.level
    logger.setLevel(logging.ERROR)  # hides the log lines of a run
    plan = partial(plan_run, given)
    try:
        request = read_request(given)
        return _sweep(request, plan) if request.known.sweep else _plan(request, plan)
    finally:
        logger.setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "plan",
        "Report before a run is started whether it fits the GPUs, how fast it is, and what to "
        "change; then memory by purpose and where the time goes. Takes --config FILE and "
        "overrides as training does, or --model without a file. Nothing is downloaded except the "
        "config.json of a model of the hub.",
    )
    add = parser.add_argument
    add("--model", metavar="PATH", help="hub id, folder or config.json; the same as --model.path")
    add("--gpus", metavar="NxGPU", help="8xh100, or RTX 4090: --world-size and --gpu")
    text = "what is trained (without a file: sft)"
    add("--objective", choices=_OBJECTIVES, help=text)
    add("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    add("--gpu", default=DEFAULT_GPU, help=f"{', '.join(GPUS)} (default: %(default)s)")
    text = "tokens to train on, such as 2e9 or 2B (default: those of the run)"
    add("--tokens", type=read_count, help=text)
    add("--sweep", action="store_true", help="try all degrees instead")
    add(
        "--proposals",
        action=argparse.BooleanOptionalAction,
        help="list what to change (default: if that is quick)",
    )
    add("--rank", type=int, default=0, help="rank to look at (default: 0)")
    add("--every-layer", action="store_true", help="trace all layers, not a few per kind; slower")
    for option, (_, _, text) in _FIGURES.items():
        add(f"--{option}", type=float, help=text)
    return parser


def read_count(text: str) -> float:
    """Parse a number of tokens: 2e9, 2B, 500 M. Raises ConfigError: the text is not a number."""
    number = r"(\d[\d,_]*(?:\.\d+)?(?:e\+?\d+)?)"
    match = re.fullmatch(number + r"\s*([kmbt]?)(?:\s*tokens)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"--tokens={text}: not a number. Write --tokens=2e9, or --tokens=2B.")
    return float(re.sub("[,_]", "", match[1])) * _SCALES[match[2]]


def _read_gpus(text: str) -> tuple[int, str]:
    """Parse 8xh100, 8 H100, or RTX 4090."""
    match = re.fullmatch(r"(\d+)(?:\s*x\s*|\s+)(.+)", text.lower())
    return (int(match[1]), match[2]) if match else (1, text)


def read_request(argv: Sequence[str]) -> Request:
    """Parse the arguments, without checking them against each other.

    Raises:
        ConfigError: an argument is wrong.
    """
    known, rest = _parser().parse_known_args(argv)
    if known.gpus is not None:
        known.world_size, known.gpu = _read_gpus(known.gpus)
    hardware = _hardware(known)
    if known.world_size < 1:
        raise ConfigError(
            f"--world-size={known.world_size}: a run has at least 1 rank. Write --gpus=8xh100."
        )
    if not 0 <= known.rank < known.world_size:
        last = known.world_size - 1
        raise ConfigError(
            f"--rank={known.rank}: with --world-size={known.world_size} there are ranks 0 to "
            f"{last}."
        )
    has_file = any(argument.split("=")[0] in ("--config", "--job.config_file") for argument in rest)
    has_flavor = any(word.startswith("--model.flavor") for word in rest)
    if not (has_file or known.model or has_flavor):
        raise ConfigError(
            "plan: nothing to plan. Write --model=Qwen/Qwen3-8B --gpus=8xh100, or --config FILE."
        )
    model = [f"--model.path={known.model}"] if known.model else []
    objective = list(_OBJECTIVES.get(known.objective or ("" if has_file else "sft"), ()))
    if has_file:
        job = load_config([*model, *objective, *rest])
    else:
        objective.append("--data.path=data")  # need not exist
        if not any(word.startswith("--training.epochs") for word in rest):
            objective.append("--training.steps=1000")
        reader = Reader()
        reader.read_arguments(["--config", CODE, *model, *objective, *rest])
        job = reader.finish(None)
    return Request(known, hardware, *_localize(job))


def _localize(job: JobConfig) -> tuple[JobConfig, str]:
    """Return `job` for a machine without the weights, and the name of the weights."""
    weights = job.checkpoint.initial_load_path
    if not weights or any(Path(weights).expanduser().glob("*.safetensors")):
        return job, weights
    values = {"checkpoint.initial_load_path": ""}
    if not (job.model.flavor or job.model.hf_assets_path):
        values["model.hf_assets_path"] = weights
    return set_values(job, values), weights


def _hardware(known: argparse.Namespace) -> Hardware:
    hardware = get_hardware(known.gpu)
    for option, (name, unit, _) in _FIGURES.items():
        value = getattr(known, option.replace("-", "_"))
        if value is None:
            continue
        if not (0 < value < float("inf") or (option == "reserved-gib" and value == 0)):
            raise ConfigError(f"--{option}={value:g}: this must be more than 0. Correct it.")
        changed: Any = {name: type(getattr(hardware, name))(value * unit)}
        hardware = replace(hardware, **changed)
    return hardware


def plan_run(argv: Sequence[str], more: Sequence[str] = ()) -> Planned:
    """Plan the command line `argv` with the arguments `more`. Settings that they leave open are
    chosen as in a run.
    """
    request = read_request([*argv, *more])
    checked = request.check()
    known = request.known
    hardware = request.hardware
    choice, best = choose_all(checked, hardware)
    checked = take(checked, choice)
    stages = plan_stages(checked, hardware, rank=known.rank, every_layer=known.every_layer)
    return Planned(tuple(more), checked, merge_stages(stages), stages, choice, best)


def choose_all(checked: Checked, hardware: Hardware) -> tuple[Choice, Choice]:
    """Choose the settings that `checked` leaves open, and the settings as if it left all of them
    open.
    """
    if not isinstance(checked.model_config, ModelConfig):
        return Choice({}), Choice({})
    sizes = describe_model(checked, build_unsharded)
    choice = choose(checked, sizes, hardware)
    everything = tuple(CHOSEN)
    if checked.unwritten == everything:
        return choice, choice
    return choice, choose(replace(checked, unwritten=everything), sizes, hardware)


def _plan(request: Request, plan: Plan) -> int:
    known = request.known
    base = plan(())
    checked, stages, wanted = base.checked, base.stages, known.proposals
    if wanted is None:  # for other models, one plan takes as long as all proposals for these
        is_native = isinstance(checked.model_config, ModelConfig)
        wanted = is_native and base.estimate.trace.traced_layers < _MANY_LAYERS
    print(render.render_verdict(base, request.weights, known.tokens), flush=True)
    for line in render.render_proposals(base, propose(base, plan) if wanted else None):
        print(line, flush=True)
    print()
    estimate = stages[checked.degrees.stage_of(known.rank)]
    parts = [render.render_memory(estimate, known.rank)]
    if checked.degrees.pp > 1:
        parts.append(render.render_stages(stages))
    parts.append(render.render_parts(base.estimate))
    print("\n\n".join([*parts, "\n".join(["assumed:", *_assumptions(checked)])]))
    return 0 if base.fits else 1


def _sweep(request: Request, plan: Plan) -> int:
    known = request.known
    found, refused = sweep(request.job, request.hardware, known.world_size, plan)
    print(render.render_sweep(found))
    if refused:
        print(f"  not legal for this model and batch: {refused} more; plan one of them to see why")
    return 0 if found[0].fits else 1


def _assumptions(checked: Checked) -> Iterator[str]:
    """Yield the assumptions behind the figures."""
    job = checked.job
    if checked.model_config.num_experts:
        yield (
            "  routing is balanced: each expert gets equally many tokens, each rank sends equally "
            "many rows"
        )
    if job.compile.enable:
        yield "  compile.enable: traced uncompiled, which keeps as much or more, and is slower"
    if job.training.enable_cpu_offload:
        yield (
            "  training.enable_cpu_offload: weights, gradients and states taken off; no time to "
            "copy them added"
        )
    if job.data.dataset == "images":
        yield (
            "  images are not traced: add the vision tower's activations, which depend on their "
            "sizes"
        )
    if job.training.global_batch_size is None:
        yield (
            "  training.global_batch_size is not set: one example in a sequence; packed, a step "
            "has fewer"
        )
    yield (
        "  expected: published and assumed efficiencies, not measured here (docs/plan.md); no "
        "validation, no saving"
    )
