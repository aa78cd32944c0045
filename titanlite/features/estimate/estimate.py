"""From traced steps to figures: memory by purpose, whether it fits, and how long a step takes.

No time was measured. At best is a bound: products at the data sheet's peak, links at their rate, all at the same time.
Expected takes the shares of these rates in `hardware.RATES`, which others have published or which are assumed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from titanlite.config import AnyModelConfig, JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.features.estimate.hardware import COLLECTIVE_S, KERNEL_S, LAUNCH_S, LINKS, SYNC_S, Hardware
from titanlite.features.estimate.operators import BESIDE, Work
from titanlite.features.estimate.trace import Moment, StepTrace, layers_of_chunks, trace_step
from titanlite.features.estimate.tracker import CATEGORIES, GRADIENTS, Kind

STAGING_BYTES = 16 << 20  # of checkpoint.reader: at most 16 threads, 1 MiB each on the device, and as much on the host

# Axes whose collectives layers wait for; those of the others run next to other layers.
_WAITED_FOR = ("ep", "tp", "cp")
_SYNCS, _HOST = "host synchronizations", "waiting for launches"


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the fullest moment of a step."""

    weights: int  # held all the time, as the next two; with the padding of uneven shards
    optimizer: int
    buffers: int
    working: dict[str, int]  # the rest by category (`tracker.CATEGORIES`), gradients among them
    on_host: int  # of all these, what training.enable_cpu_offload keeps on the host
    where: str  # the fullest moment, in words

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.optimizer + self.buffers + sum(self.working.values()) - self.on_host


@dataclass(frozen=True)
class Part:
    """A part of an optimizer step."""

    work: Work
    exposed_s: float  # expected seconds in which nothing else runs
    hidden_s: float = 0.0  # those next to other parts

    def __add__(self, other: "Part") -> "Part":
        return Part(self.work + other.work, self.exposed_s + other.exposed_s, self.hidden_s + other.hidden_s)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step."""

    parts: dict[str, Part]  # `tracker.PARTS`, collectives of each axis, and what the host makes the device wait for
    compute_s: float  # FLOPs at the GPU's peak
    intra_node_s: float  # bytes on the links inside nodes, at their rate
    inter_node_s: float
    waiting: float = 0.0  # the share of a step that a pipeline stage waits for others

    @property
    def best_s(self) -> float:
        """The longest of products, links inside nodes and links between them, at their peak rates."""
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
    tokens: int  # of an optimizer step, all ranks

    @property
    def room(self) -> int:
        """Bytes of the GPU that are left; negative if the step does not fit."""
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


def estimate_stages(
    job: JobConfig,
    model_config: AnyModelConfig,
    degrees: Degrees,
    hardware: Hardware,
    *,
    rank: int = 0,
    every_layer: bool = False,
) -> dict[int, Estimate]:
    """Figures of the pipeline stage of `rank`, first, and of one of each kind of the others, by stage."""
    others = [stage * degrees.stage_size for stage in stages_to_trace(model_config, degrees)]
    ranks = [rank, *(other for other in others if degrees.stage_of(other) != degrees.stage_of(rank))]
    found = {}
    for one in ranks:
        trace = trace_step(job, model_config, degrees, rank=one, every_layer=every_layer)
        tokens = trace.micro_batches * job.training.local_batch_size * job.training.seq_len * degrees.dp
        memory = get_memory(trace, offload=job.training.enable_cpu_offload)
        time = step_time(trace, degrees, hardware, one)
        found[degrees.stage_of(one)] = Estimate(degrees, hardware, memory, time, trace, tokens)
    return found


def stages_to_trace(model_config: AnyModelConfig, degrees: Degrees) -> list[int]:
    """Of stages that follow one another with as many layers in each chunk the first, which has most micro-batches open;
    the first and the last of all, which have the embedding and the output head.
    """
    kinds = [layers_of_chunks(model_config, degrees, stage) for stage in range(degrees.pp)]
    first = [0, *(stage for stage in range(1, degrees.pp) if stage == 1 or kinds[stage] != kinds[stage - 1])]
    return sorted({*first, degrees.pp - 1})


def merge_stages(stages: Mapping[int, Estimate]) -> Estimate:
    """Merge stages into a run, which is as full as the fullest and as slow as the slowest."""
    fullest = max(stages.values(), key=lambda found: found.memory.total)
    slowest = max(stages.values(), key=lambda found: (found.time.expected_s, found.time.best_s))
    return replace(slowest, memory=fullest.memory)


def get_memory(trace: StepTrace, *, offload: bool = False) -> Memory:
    """Find the fullest moment of `trace`; with `offload`, weights, gradients and optimizer states are on the host."""

    def on_device(moment: Moment) -> int:
        peak = trace.peaks[moment]
        return sum(peak.values()) - (peak[GRADIENTS] if offload else 0)

    fullest = max(trace.peaks, key=on_device)
    working = {name: trace.peaks[fullest][name] for name in CATEGORIES}
    weights = trace.weights + trace.padding
    on_host = weights + trace.optimizer + working[GRADIENTS] if offload else 0
    return Memory(weights, trace.optimizer, trace.buffers, working, on_host, _describe_moment(fullest, trace))


def _describe_moment(moment: Moment, trace: StepTrace) -> str:
    outside = {
        "forward": "forward before the layers",
        "head": "output head and loss",
        "backward": "backward of the output head",
        "optimizer": "gradient norm and optimizer",
    }
    if moment.kind < 0:
        return outside[moment.phase]
    num = trace.num_layers[moment.kind]
    index = (num - 1 - moment.index if moment.from_end else moment.index) + (trace.num_layers[0] * moment.kind)
    return f"{moment.phase} of layer {[number for part in trace.layers for number in part][index]}"


def axis_ranks(degrees: Degrees, axis: str, rank: int = 0) -> list[int]:
    """Global ranks of the group along `axis` that `rank` is in; the layout of `ParallelDims`."""
    d = degrees
    inner = d.stage_size // d.dp_replicate
    sizes_and_strides = {
        "pp": (d.pp, d.stage_size),
        "stage": (d.stage_size, 1),
        "dp_replicate": (d.dp_replicate, inner),
        d.fsdp_axis: (d.fsdp, d.tp),
        "cp": (d.cp, d.tp),
        "tp": (d.tp, 1),
        "efsdp": (d.efsdp, d.ep),
        "ep": (d.ep, 1),
    }
    if axis not in sizes_and_strides:
        return list(range(d.world_size))
    size, stride = sizes_and_strides[axis]
    first = rank - rank // stride % size * stride
    return [first + i * stride for i in range(size)]


def step_time(trace: StepTrace, degrees: Degrees, hardware: Hardware, rank: int = 0) -> StepTime:
    """Seconds of a step on `hardware`.

    Kernels run one after the other; so do the collectives that layers wait for. The others run next to the kernels of
    the same forward or backward, and are exposed where they take longer. The host launches next to the device.
    """
    parts: dict[str, Part] = {}
    compute = intra = inter = 0.0
    stretches: defaultdict[tuple[int, str], list[tuple[Kind, Work]]] = defaultdict(list)
    for kind, work in trace.step_work():
        stretches[kind[:2]].append((kind, work))

    def add(name: str, part: Part) -> None:
        parts[name] = parts[name] + part if name in parts else part

    for (micro_batch, _), entries in stretches.items():
        busy = launches = beside = 0.0
        others: list[tuple[str, Work, float]] = []
        for kind, work in entries:
            launches += work.launches * LAUNCH_S
            if not kind.group:
                seconds = work.launches * KERNEL_S + kernel_s(kind, work, hardware)
                compute += work.flops / (hardware.float32_flops if kind.call.rate == "float32" else hardware.flops)
                add(kind.part, Part(replace(work, syncs=0), seconds))
                if work.syncs:
                    add(_SYNCS, Part(Work(syncs=work.syncs), work.syncs * SYNC_S))
                busy += seconds + work.syncs * SYNC_S
                continue
            ranks = axis_ranks(degrees, kind.group, rank)
            inside, outside = hardware.collective_s(kind.call.rate, ranks, work.nbytes)
            intra, inter = intra + inside, inter + outside
            seconds = (inside + outside) / LINKS + (work.launches * COLLECTIVE_S if len(ranks) > 1 else 0.0)
            name = f"{kind.call.rate} over {kind.group}"
            waits = kind.group in _WAITED_FOR and not kind.call.rate.startswith(BESIDE)
            if waits or micro_batch < 0:
                add(name, Part(work, seconds))
                busy += seconds
            else:
                others.append((name, work, seconds))
                beside += seconds
        exposed = max(beside - busy, 0.0)
        for name, work, seconds in others:
            shown = exposed * seconds / beside if beside else 0.0
            add(name, Part(work, shown, seconds - shown))
        if launches > busy + exposed:
            add(_HOST, Part(Work(), launches - busy - exposed))
    return StepTime(parts, compute, intra, inter, degrees.waiting(trace.micro_batches))


def kernel_s(kind: Kind, work: Work, hardware: Hardware) -> float:
    """Return the expected seconds of kernels: of a product for its FLOPs or its bytes, whichever take longer."""
    call = kind.call
    if not call.flops:
        return work.nbytes / hardware.rate(call.rate)
    one = max(call.flops / hardware.rate(call.rate), call.nbytes / hardware.rate("memory"))
    return one * work.flops / call.flops
