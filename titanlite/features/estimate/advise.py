"""What to change so that a run fits: each candidate is traced like the run itself, none is guessed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from titanlite.base.errors import TitanliteError
from titanlite.config import AnyModelConfig, JobConfig
from titanlite.config.parallelism import Degrees, check_parallelism, resolve_degrees
from titanlite.config.schema import BLOCK_SIZES
from titanlite.config.settings import get_value
from titanlite.features.estimate.estimate import Estimate
from titanlite.features.estimate.hardware import Hardware
from titanlite.features.estimate.stages import estimate_stages, merge_stages, trace_stages


@dataclass(frozen=True)
class Advice:
    """One change, or several, with the memory that a rank then needs.

    Attributes:
        change: keys with old and new value.
        estimate: of the changed run.
    """

    change: str
    estimate: Estimate


def with_values(job: JobConfig, values: dict[str, Any]) -> JobConfig:
    """A copy of `job` with other values at dotted keys."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        job = replace(job, **{section: replace(getattr(job, section), **{name: value})})
    return job


def candidates(job: JobConfig, model_config: AnyModelConfig, degrees: Degrees) -> Iterator[dict[str, Any]]:
    """Changes that can save memory, the cheapest for speed first; some may not be legal for the model."""
    training, parallelism = job.training, job.parallelism
    local = training.local_batch_size
    # The global batch stays, so that the step is the same one.
    batch = {"training.global_batch_size": local * degrees.dp} if training.global_batch_size == -1 else {}
    if job.activation_checkpoint.mode == "none":
        yield {"activation_checkpoint.mode": "selective"}
    if job.activation_checkpoint.mode != "full":
        yield {"activation_checkpoint.mode": "full"}
    while local > 1:
        local //= 2
        yield {"training.local_batch_size": local, **batch}
    if parallelism.fsdp_once_per_step:
        yield {"parallelism.fsdp_once_per_step": False}
    elif parallelism.fsdp_reshard_after_forward != "always":
        yield {"parallelism.fsdp_reshard_after_forward": "always"}
    if training.loss_chunk_tokens > 256:
        yield {"training.loss_chunk_tokens": 256}
    if degrees.dp_replicate > 1:
        yield {
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": -1,
        }
    sharded = {"parallelism.data_parallel_shard_degree": -1}
    yield {"parallelism.expert_parallel_degree": 2 * degrees.ep, **sharded}
    yield {"parallelism.tensor_parallel_degree": 2 * degrees.tp, **sharded, **batch}
    yield {"parallelism.context_parallel_degree": 2 * degrees.cp, **sharded, **batch}
    if degrees.chunks > 1:
        yield {"parallelism.pipeline_parallel_layers": "", "parallelism.pipeline_parallel_chunks": 1}
    yield {
        "parallelism.pipeline_parallel_degree": 2 * degrees.pp,
        "parallelism.pipeline_parallel_layers": "",
        "parallelism.pipeline_parallel_chunks": 1,
        **sharded,
        **batch,
    }
    formats = list(BLOCK_SIZES)  # the larger first
    if job.lora.rank:
        now = job.lora.base_dtype
        yield from ({"lora.base_dtype": form} for form in formats[formats.index(now) + 1 if now in formats else 0 :])
    if training.dtype == "float32":
        yield {"training.dtype": "bfloat16"}
    if not training.enable_cpu_offload:
        yield {"training.enable_cpu_offload": True}


def advise(
    job: JobConfig, model_config: AnyModelConfig, degrees: Degrees, now: Estimate, hardware: Hardware, rank: int = 0
) -> tuple[list[Advice], Advice | None, int | None]:
    """For a run that does not fit: what each single change would need, all that help one after the other until it fits,
    and the smallest number of ranks, a power of two times today's, with which it fits as it is; None: none does.
    """
    single: list[Advice] = []
    helpful: list[dict[str, Any]] = []
    for values in candidates(job, model_config, degrees):
        found = _estimate(job, model_config, degrees.world_size, values, hardware, rank)
        if found is not None and found.memory.total < now.memory.total:
            single.append(Advice(_describe(job, values), found))
            helpful.append(values)
    together: Advice | None = None
    merged: dict[str, Any] = {}
    if not any(advice.estimate.fits(hardware) for advice in single):
        for values in helpful:
            tried = _estimate(job, model_config, degrees.world_size, {**merged, **values}, hardware, rank)
            if tried is None or (together is not None and tried.memory.total >= together.estimate.memory.total):
                continue
            merged |= values
            together = Advice(_describe(job, merged), tried)
            if tried.fits(hardware):
                break
    ranks = degrees.world_size
    for _ in range(6):
        ranks *= 2
        # Chunks want several micro-batches: as many as now.
        size = job.training.global_batch_size * ranks // degrees.world_size if degrees.chunks > 1 else -1
        values = {"parallelism.data_parallel_shard_degree": -1, "training.global_batch_size": size}
        more = _estimate(job, model_config, ranks, values, hardware, rank)
        if more is not None and more.fits(hardware):
            return single, together, ranks
    return single, together, None


def _estimate(
    job: JobConfig, model_config: AnyModelConfig, world_size: int, values: dict[str, Any], hardware: Hardware, rank: int
) -> Estimate | None:
    """Of the changed run; None if it is not legal."""
    changed = with_values(job, values)
    try:
        degrees = resolve_degrees(changed.parallelism, world_size)
        if check_parallelism(changed, model_config, degrees):
            return None
        traces = trace_stages(changed, model_config, degrees, rank=rank)
    except TitanliteError:
        return None  # such as patterns that name nothing: not a change to propose
    return merge_stages(estimate_stages(changed, degrees, traces, hardware))


def _describe(job: JobConfig, values: dict[str, Any]) -> str:
    changed = [(key, get_value(job, key), value) for key, value in values.items()]
    return ", ".join(f"{key} {old} -> {new}" for key, old, new in changed if old != new)
