"""Every legal combination of degrees and checkpointing modes for a number of ranks, ranked by the floor of a step.

Traced once for each (cp, tp, ep, mode), on the mesh with as few replicas as go: what a layer computes, gathers and
exchanges depends on those only. For other numbers of replicas follow from it: the bytes of states and gradients, from
the sizes of the shards; the all-reduce between replicas, of what a reduce-scatter leaves; and the time on the links,
from the ranks of each group. `tests/unit/features/estimate/test_trace.py` compares such figures with traced ones.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from titanlite.base.errors import ConfigError, TitanliteError
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.config.parallelism import Degrees, check_parallelism, resolve_degrees
from titanlite.features.estimate.estimate import Estimate
from titanlite.features.estimate.hardware import Hardware
from titanlite.features.estimate.stages import estimate_stages, merge_stages, trace_stages
from titanlite.features.estimate.trace import StepTrace, Traffic
from titanlite.features.estimate.tracker import GRADIENTS

MODES = ("none", "selective", "full")
_SHORTEST_PIECE = 4096
"""Tokens of a sequence that a rank keeps at least in combinations with cp: it is for sequences that are long."""


@dataclass(frozen=True)
class Tried:
    """One combination that is legal, and what it takes."""

    degrees: Degrees
    mode: str
    estimate: Estimate

    @property
    def seconds_per_token(self) -> tuple[float, float]:
        """The floors with full overlap and with none. Steps may have different numbers of tokens."""
        time, tokens = self.estimate.time, self.estimate.tokens
        return time.overlapped_s / tokens, time.serial_s / tokens


@dataclass(frozen=True)
class Sweep:
    """The outcome.

    Attributes:
        fitting: that fit, the shortest floor per token with full overlap first, then the one without overlap.
        too_large: that do not, the smallest first.
        refused: reason -> how many combinations it forbids.
        traced: how many were traced; the others are derived.
    """

    fitting: list[Tried]
    too_large: list[Tried]
    refused: dict[str, int]
    traced: int


def _with_values(job: JobConfig, values: dict[str, Any]) -> JobConfig:
    """A copy of `job` with other values at dotted keys."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        job = replace(job, **{section: replace(getattr(job, section), **{name: value})})
    return job


def derive(trace: StepTrace, traced: Degrees, degrees: Degrees, *, once_per_step: bool = False) -> StepTrace:
    """`trace`, of a step on `traced`, as it would be on `degrees`, with as many ranks and the same cp, tp and ep.

    `once_per_step` is `parallelism.fsdp_once_per_step`.
    """
    if traced == degrees:
        return trace
    larger = traced.fsdp / degrees.fsdp  # a rank's shards, dense and expert ones alike
    counts = {traffic: count for traffic, count in trace.counts.items() if traffic.axis != "dp_replicate"}
    nbytes = {traffic: trace.nbytes[traffic] for traffic in counts}
    for traffic in [t for t in counts if t.kind == "reduce_scatter" and t.axis in (degrees.fsdp_axis, "efsdp")]:
        if degrees.dp_replicate > 1:
            reduced = Traffic("all_reduce", "dp_replicate", traffic.per_step)
            often = 1 if once_per_step else trace.micro_batches
            parts = often * (degrees.efsdp if traffic.axis == "efsdp" else degrees.fsdp)
            counts[reduced] = counts.get(reduced, 0) + counts[traffic] // often  # of the last micro-batch alone
            nbytes[reduced] = nbytes.get(reduced, 0) + nbytes[traffic] // parts
    for traffic in [t for t in counts if t.per_step and t.axis == "tp"]:  # gradients of replicated parameters, sharded
        nbytes[traffic] = round(nbytes[traffic] * larger)
    return replace(
        trace,
        peaks={
            moment: {name: round(value * (larger if name == GRADIENTS else 1)) for name, value in peak.items()}
            for moment, peak in trace.peaks.items()
        },
        counts=counts,
        nbytes=nbytes,
        weights=round(trace.weights * larger),
        optimizer=round(trace.optimizer * larger),
        padding=round(trace.padding * larger),
    )


def _combinations(job: JobConfig, model_config: AnyModelConfig, world_size: int) -> Iterator[dict[str, int]]:
    """Degrees whose product is `world_size`, few replicas first, and all ep that divide what they fold over."""
    world_size //= job.parallelism.pipeline_parallel_degree  # as it is
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    can_split, has_experts = isinstance(model_config, ModelConfig), model_config.num_experts > 0

    def is_tried(cp: int, tp: int) -> bool:
        long = can_split and job.training.seq_len // (cp * tp) >= _SHORTEST_PIECE
        return cp == 1 or cp == job.parallelism.context_parallel_degree or long

    for replicate, cp in product(divisors, divisors):
        folded = world_size // replicate
        for tp in (n for n in divisors if folded % (n * cp) == 0 and is_tried(cp, n)):
            for ep in (n for n in divisors if folded % n == 0 and (has_experts or n == 1)):
                yield {
                    "parallelism.data_parallel_replicate_degree": replicate,
                    "parallelism.data_parallel_shard_degree": folded // (cp * tp),
                    "parallelism.context_parallel_degree": cp,
                    "parallelism.tensor_parallel_degree": tp,
                    "parallelism.expert_parallel_degree": ep,
                }


def _reason(problem: str) -> str:
    """What a message says, without its numbers."""
    sentence = re.split(r"(?<=[^\d])\. |[:;] ", problem.removeprefix("parallelism: "))[0]
    return re.sub(r" \((\d+)\)| \d+(?= ranks)", "", sentence).rstrip(".")


def sweep(
    job: JobConfig,
    model_config: AnyModelConfig,
    world_size: int,
    hardware: Hardware,
    progress: Callable[[int], None] = lambda traced: None,
) -> Sweep:
    """Try all degrees that divide `world_size`, with each mode of activation checkpointing.

    Of context parallelism those alone that leave a rank 4096 tokens of a sequence or more, and what `job` has. The
    pipeline stages are those of `job`; memory is that of the fullest, time that of the slowest.
    The tokens of a step stay those of `job` where its global batch size is set; else every data-parallel rank has
    `local_batch_size` sequences.

    Raises:
        ConfigError: the ranks cannot be split into the stages.
    """
    refused: Counter[str] = Counter()
    tried: list[Tried] = []
    pp = job.parallelism.pipeline_parallel_degree
    if world_size % pp:
        raise ConfigError(
            f"parallelism: pipeline_parallel_degree ({pp}) does not divide the world size ({world_size}), and a sweep "
            "leaves the stages as they are. Change one of the two."
        )
    bases: dict[tuple[int, int, int, str], tuple[Degrees, dict[int, StepTrace]]] = {}
    for values in _combinations(job, model_config, world_size):
        changed = _with_values(job, values)
        try:
            degrees = resolve_degrees(changed.parallelism, world_size)
        except TitanliteError as error:
            refused[_reason(str(error))] += len(MODES)
            continue
        problems = check_parallelism(changed, model_config, degrees)
        if problems:
            refused[_reason(problems[0])] += len(MODES)
            continue
        for mode in MODES:
            with_mode = _with_values(changed, {"activation_checkpoint.mode": mode})
            problems = check_parallelism(with_mode, model_config, degrees)
            if problems:
                refused[_reason(problems[0])] += 1
                continue
            key = (degrees.cp, degrees.tp, degrees.ep, mode)
            if key not in bases:
                bases[key] = degrees, trace_stages(with_mode, model_config, degrees)
                progress(len(bases))
            traced, traces = bases[key]
            once = job.parallelism.fsdp_once_per_step
            derived = {i: derive(trace, traced, degrees, once_per_step=once) for i, trace in traces.items()}
            estimate = merge_stages(estimate_stages(with_mode, degrees, derived, hardware))
            tried.append(Tried(degrees, mode, estimate))
    fitting = [one for one in tried if one.estimate.fits(hardware)]
    too_large = [one for one in tried if not one.estimate.fits(hardware)]
    fitting.sort(key=lambda one: one.seconds_per_token)
    too_large.sort(key=lambda one: one.estimate.memory.total)
    return Sweep(fitting, too_large, dict(refused), len(bases))
