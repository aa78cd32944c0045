"""A run with pipeline stages is as full as its fullest stage and as slow as its slowest: which of them are traced."""

from collections.abc import Mapping
from dataclasses import replace

from titanlite.config import AnyModelConfig, JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.features.estimate.estimate import Estimate, build_estimate
from titanlite.features.estimate.hardware import Hardware
from titanlite.features.estimate.trace import StepTrace, layers_of_chunks, trace_step


def stages_to_trace(model_config: AnyModelConfig, degrees: Degrees) -> list[int]:
    """Of stages that follow one another with as many layers in each chunk the first, which has most micro-batches open;
    the first and the last of all, which have the embedding and the output head.
    """
    kinds = [layers_of_chunks(model_config, degrees, stage) for stage in range(degrees.pp)]
    first = [0, *(stage for stage in range(1, degrees.pp) if stage == 1 or kinds[stage] != kinds[stage - 1])]
    return sorted({*first, degrees.pp - 1})


def trace_stages(
    job: JobConfig, model_config: AnyModelConfig, degrees: Degrees, *, rank: int = 0, every_layer: bool = False
) -> dict[int, StepTrace]:
    """Traces by rank: of `rank`, and of the first rank of each such stage that it is not in."""
    others = [stage * degrees.stage_size for stage in stages_to_trace(model_config, degrees)]
    ranks = [rank, *(other for other in others if degrees.stage_of(other) != degrees.stage_of(rank))]
    return {one: trace_step(job, model_config, degrees, rank=one, every_layer=every_layer) for one in ranks}


def estimate_stages(
    job: JobConfig, degrees: Degrees, traces: Mapping[int, StepTrace], hardware: Hardware
) -> dict[int, Estimate]:
    """What the traces mean, by stage."""
    return {
        degrees.stage_of(rank): build_estimate(job, degrees, trace, hardware, rank) for rank, trace in traces.items()
    }


def merge_stages(stages: Mapping[int, Estimate]) -> Estimate:
    """Of the run: the memory of its fullest stage, and all else of the slowest."""
    fullest = max(stages.values(), key=lambda found: found.memory.total)
    slowest = max(stages.values(), key=lambda found: (found.time.overlapped_s, found.time.serial_s))
    return replace(slowest, memory=fullest.memory)
