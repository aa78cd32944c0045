"""From a traced step to what people ask: memory by purpose, does it fit, and how long a step takes at least."""

from dataclasses import dataclass

from titanlite.config import JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.features.estimate.hardware import Hardware
from titanlite.features.estimate.trace import Moment, StepTrace
from titanlite.features.estimate.tracker import CATEGORIES, GRADIENTS

STAGING_BYTES = 16 << 20  # of checkpoint.reader: at most 16 threads, 1 MiB each on the device, and as much on the host


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the fullest moment of a step.

    Attributes:
        weights, optimizer, buffers: held all the time; weights with the padding of uneven shards.
        working: the rest by category (`tracker.CATEGORIES`), gradients among them.
        gradients_in_all: bytes of all gradients; at the fullest moment some may not be there yet.
        on_host: of the former, bytes that training.enable_cpu_offload keeps on the host.
        where: the fullest moment, in words.
    """

    weights: int
    optimizer: int
    buffers: int
    working: dict[str, int]
    gradients_in_all: int
    on_host: int
    where: str

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.optimizer + self.buffers + sum(self.working.values()) - self.on_host


@dataclass(frozen=True)
class StepTime:
    """Seconds that an optimizer step takes at least.

    Attributes:
        compute_s: FLOPs at the GPU's peak.
        intra_node_s, inter_node_s: bytes on the links inside nodes and between them.
        waiting: the share of a step that a pipeline stage waits for others.
    """

    compute_s: float
    intra_node_s: float
    inter_node_s: float
    waiting: float = 0.0

    @property
    def overlapped_s(self) -> float:
        """If everything runs beside everything else: the longest of the three."""
        return max(self.compute_s, self.intra_node_s, self.inter_node_s) / (1 - self.waiting)

    @property
    def serial_s(self) -> float:
        """If nothing does: their sum."""
        return (self.compute_s + self.intra_node_s + self.inter_node_s) / (1 - self.waiting)


@dataclass(frozen=True)
class Estimate:
    """Of one configuration.

    Attributes:
        tokens: of an optimizer step, all ranks.
    """

    degrees: Degrees
    memory: Memory
    time: StepTime
    trace: StepTrace
    tokens: int

    def fits(self, hardware: Hardware) -> bool:
        """The device's memory is enough."""
        return self.memory.total <= hardware.usable_bytes


def build_estimate(job: JobConfig, degrees: Degrees, trace: StepTrace, hardware: Hardware, rank: int = 0) -> Estimate:
    """What `trace` means on `hardware`."""
    tokens = trace.micro_batches * job.training.local_batch_size * job.training.seq_len * degrees.dp
    memory = get_memory(trace, offload=job.training.enable_cpu_offload)
    return Estimate(degrees, memory, step_time(trace, degrees, hardware, rank), trace, tokens)


def get_memory(trace: StepTrace, *, offload: bool = False) -> Memory:
    """The fullest moment of `trace`; with `offload` weights, gradients and optimizer states are not on the device."""

    def on_device(moment: Moment) -> int:
        peak = trace.peaks[moment]
        return sum(peak.values()) - (peak[GRADIENTS] if offload else 0)

    fullest = max(trace.peaks, key=on_device)
    working = {name: trace.peaks[fullest][name] for name in CATEGORIES}
    weights = trace.weights + trace.padding
    on_host = weights + trace.optimizer + working[GRADIENTS] if offload else 0
    in_all = max(peak[GRADIENTS] for peak in trace.peaks.values())
    where = describe_moment(fullest, trace)
    return Memory(weights, trace.optimizer, trace.buffers, working, in_all, on_host, where)


def describe_moment(moment: Moment, trace: StepTrace) -> str:
    """For example `backward of layer 93`."""
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
    """The floor of a step on `hardware`; kernels at their peak, no latency."""
    intra = inter = 0.0
    for traffic, nbytes in trace.nbytes.items():
        inside, outside = hardware.collective_s(traffic.kind, axis_ranks(degrees, traffic.axis, rank), nbytes)
        intra, inter = intra + inside, inter + outside
    low = trace.flops.low - trace.flops.skipped
    compute = low / hardware.flops + trace.flops.high / hardware.float32_flops
    return StepTime(compute, intra, inter, degrees.waiting(trace.micro_batches))
