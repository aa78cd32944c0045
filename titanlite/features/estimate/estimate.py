"""Figures of a plan: memory by purpose, whether it fits, and the time of a step.

Times are not measured. The best time is a bound: matmuls at the data sheet's peak, interconnects at
their rated speed, all at the same time. The expected time uses the fractions of these rates in
`RATES`, which were measured on an H200 or are assumed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from titanlite.config import AnyModelConfig, ModelConfig
from titanlite.config.parallelism import Degrees
from titanlite.features.choice.hardware import (
    COLLECTIVE_S,
    KERNEL_S,
    LAUNCH_S,
    LINKS,
    SYNC_S,
    Hardware,
)
from titanlite.features.estimate.operators import BESIDE, Work
from titanlite.features.estimate.trace import StepTrace, stage_layers, trace_step
from titanlite.features.estimate.tracker import GRADIENTS, STATES, WEIGHTS, Kind, Segment
from titanlite.preflight import Checked

# Axes whose collectives block layers; the collectives of other axes overlap with other layers.
_WAITED_FOR = ("ep", "tp", "cp")
_SYNCS = "host synchronizations"
_HOST = "waiting for launches"


@dataclass(frozen=True)
class Memory:
    """A rank's bytes at the step's peak of memory."""

    by_purpose: dict[str, int]  # as in `StepTrace.peaks`
    on_host: tuple[str, ...]  # purposes whose tensors training.enable_cpu_offload keeps on the host
    where: str  # describes the moment of the peak

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(nbytes for name, nbytes in self.by_purpose.items() if name not in self.on_host)


@dataclass(frozen=True)
class Part:
    """A part of an optimizer step."""

    work: Work
    exposed_s: float  # expected seconds in which nothing else runs
    hidden_s: float = 0.0  # expected seconds that overlap with other parts

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.work + other.work, self.exposed_s + other.exposed_s, self.hidden_s + other.hidden_s
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step."""

    # `tracker.PARTS`, collectives of each axis, and waits of the device for the host
    parts: dict[str, Part]
    compute_s: float  # FLOPs at the GPU's peak
    intra_node_s: float  # bytes over interconnects inside nodes, at their rated speed
    inter_node_s: float
    waiting: float = 0.0  # the bubble: fraction of a step in which a stage waits

    @property
    def best_s(self) -> float:
        """The longest of matmuls, interconnects inside nodes and interconnects between nodes, at
        their peak rates.
        """
        return max(self.compute_s, self.intra_node_s, self.inter_node_s) / (1 - self.waiting)

    @property
    def expected_s(self) -> float:
        """Sum of the exposed times of all parts."""
        return sum(part.exposed_s for part in self.parts.values()) / (1 - self.waiting)


@dataclass(frozen=True)
class Estimate:
    """Figures of one configuration."""

    degrees: Degrees
    hardware: Hardware
    memory: Memory
    time: StepTime
    trace: StepTrace
    tokens: int  # tokens of an optimizer step, on all ranks

    @property
    def room(self) -> int:
        """Free bytes of the GPU; negative if the step does not fit."""
        return self.hardware.usable_bytes - self.memory.total

    @property
    def fits(self) -> bool:
        return self.room >= 0

    @property
    def expected_rate(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.time.expected_s / self.degrees.world_size

    @property
    def best_rate(self) -> float:
        return self.tokens / max(self.time.best_s, 1e-12) / self.degrees.world_size


def plan_step(
    checked: Checked, hardware: Hardware, *, rank: int = 0, every_layer: bool = False
) -> Estimate:
    """Compute the memory and the time of an optimizer step of `rank` on `hardware`."""
    job = checked.job
    degrees = checked.degrees
    trace = trace_step(checked, rank=rank, every_layer=every_layer)
    tokens = trace.micro_batches * job.training.local_batch_size * job.training.seq_len * degrees.dp
    memory = get_memory(trace, offload=job.training.enable_cpu_offload)
    time = step_time(trace, degrees, hardware)
    return Estimate(degrees, hardware, memory, time, trace, tokens)


def plan_stages(
    checked: Checked, hardware: Hardware, *, rank: int = 0, every_layer: bool = False
) -> dict[int, Estimate]:
    """Return the figures of a pipeline stage of each kind, by stage; `rank`'s stage is first."""
    degrees = checked.degrees
    own = degrees.stage_of(rank)
    stages = stages_to_trace(checked.model_config, degrees)
    ranks = {own: rank} | {stage: stage * degrees.stage_size for stage in stages if stage != own}
    return {
        stage: plan_step(checked, hardware, rank=one, every_layer=every_layer)
        for stage, one in ranks.items()
    }


def stages_to_trace(model_config: AnyModelConfig, degrees: Degrees) -> list[int]:
    """Select the stages to trace: the first and the last of all (embedding, output head), and the
    first of consecutive stages with equal layers, which has the most micro-batches in flight.
    """
    if not isinstance(model_config, ModelConfig):
        return [0]
    kinds = [stage_layers(model_config, degrees, stage) for stage in range(degrees.pp)]
    always = {0, 1, degrees.pp - 1}
    return [
        stage for stage in range(degrees.pp) if stage in always or kinds[stage] != kinds[stage - 1]
    ]


def merge_stages(stages: Mapping[int, Estimate]) -> Estimate:
    """Merge stages into a run with the memory of the fullest stage and the time of the slowest."""
    fullest = max(stages.values(), key=lambda found: found.memory.total)
    slowest = max(stages.values(), key=lambda found: (found.time.expected_s, found.time.best_s))
    return replace(slowest, memory=fullest.memory)


def get_memory(trace: StepTrace, *, offload: bool = False) -> Memory:
    """Find the peak of memory in `trace`; with `offload`, weights, gradients and optimizer states
    are on the host.
    """

    on_host = (WEIGHTS, STATES, GRADIENTS) if offload else ()
    moments = (
        Memory(peak, on_host, _describe(segment, trace)) for segment, peak in trace.peaks.items()
    )
    return max(moments, key=lambda memory: memory.total)


def _describe(segment: Segment, trace: StepTrace) -> str:
    outside = {
        "forward": "forward before the layers",
        "head": "output head and loss",
        "backward": "backward of the output head",
        "optimizer": "gradient norm and optimizer",
    }
    if segment.layer is None:
        return outside[segment.phase]
    return f"{segment.phase} of layer {trace.layers[segment.layer]}"


def step_time(trace: StepTrace, degrees: Degrees, hardware: Hardware) -> StepTime:
    """Estimate the seconds of a step on `hardware`.

    Kernels, and the collectives that block layers, run one after another. The other collectives
    overlap with kernels of the same forward or backward, and count only as far as they take longer.
    Host launches overlap with the device.
    """
    parts: defaultdict[str, Part] = defaultdict(lambda: Part(Work(), 0.0))
    compute = intra = inter = 0.0
    stretches: defaultdict[tuple[int, str], list[tuple[Kind, Work]]] = defaultdict(list)
    for kind, work in trace.step_work():
        stretches[kind[:2]].append((kind, work))

    for (micro_batch, _), entries in stretches.items():
        busy = launches = overlapped = 0.0
        others: list[tuple[str, Work, float]] = []
        for kind, work in entries:
            launches += work.launches * LAUNCH_S
            if not kind.group:
                seconds = work.launches * KERNEL_S + kernel_s(kind, work, hardware)
                compute += work.flops / (
                    hardware.float32_flops if kind.call.rate == "float32" else hardware.flops
                )
                parts[kind.part] += Part(work, seconds)
                if work.syncs:
                    parts[_SYNCS] += Part(Work(launches=work.syncs), work.syncs * SYNC_S)
                busy += seconds + work.syncs * SYNC_S
                continue
            ranks = trace.ranks[kind.group]
            inside, outside = hardware.collective_s(kind.call.rate, ranks, work.nbytes)
            intra, inter = intra + inside, inter + outside
            seconds = (inside + outside) / LINKS + (
                work.launches * COLLECTIVE_S if len(ranks) > 1 else 0.0
            )
            name = f"{kind.call.rate} over {kind.group}"
            waits = kind.group in _WAITED_FOR and not kind.call.rate.startswith(BESIDE)
            if waits or micro_batch < 0:
                parts[name] += Part(work, seconds)
                busy += seconds
            else:
                others.append((name, work, seconds))
                overlapped += seconds
        exposed = max(overlapped - busy, 0.0)
        for name, work, seconds in others:
            shown = exposed * seconds / overlapped if overlapped else 0.0
            parts[name] += Part(work, shown, seconds - shown)
        if launches > busy + exposed:
            parts[_HOST] += Part(Work(), launches - busy - exposed)
    return StepTime(parts, compute, intra, inter, degrees.waiting(trace.micro_batches))


def kernel_s(kind: Kind, work: Work, hardware: Hardware) -> float:
    """Return the expected seconds of kernels: of a matmul by its FLOPs or its bytes, whichever take
    longer.
    """
    call = kind.call
    if not call.flops:
        return work.nbytes / hardware.rate(call.rate)
    one = max(call.flops / hardware.rate(call.rate), call.nbytes / hardware.rate("memory"))
    return one * work.flops / call.flops
