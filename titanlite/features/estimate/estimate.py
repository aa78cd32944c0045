"""From traced steps to figures: memory by purpose, whether it fits, and how long a step takes.

No time was measured. At best is a bound: products at the data sheet's peak, links at their rate, all at the same time.
Expected takes the shares of these rates in `EFFICIENCY`, which others have published or which are assumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from titanlite.config import AnyModelConfig, JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.features.estimate.hardware import Hardware
from titanlite.features.estimate.trace import Moment, StepTrace, layers_of_chunks, trace_step
from titanlite.features.estimate.tracker import CATEGORIES, GRADIENTS

STAGING_BYTES = 16 << 20  # of checkpoint.reader: at most 16 threads, 1 MiB each on the device, and as much on the host

# Shares of the peak rates. docs/plan.md says which are published and which are assumed.
EFFICIENCY = {
    "dense": 0.65,  # cuBLAS in bfloat16 on H100 at the sizes of layers
    "experts": 0.40,  # grouped GEMMs: 400 of 989 TFLOP/s with small experts and their weight gradients
    "flash": 0.35,  # FlashAttention-2 forward and backward, causal
    "masked": 0.14,  # the memory-efficient kernel, which takes a mask and computes what is masked
    "wide": 0.80,  # float32 without tensor cores
    "memory": 0.80,  # elementwise kernels, norms, permutations, optimizer
    "links": 0.65,  # NCCL
}
_LAUNCH_S = 15e-6  # of the host, per kernel, with autograd and FSDP2: 2 ms per layer and micro-batch of 130 kernels
_COLLECTIVE_S = 20e-6  # latency
# Axes whose collectives layers wait for; those of the others run next to other layers.
_WAITED_FOR = ("ep", "tp", "cp")


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the fullest moment of a step.

    Attributes:
        weights, optimizer, buffers: held all the time; weights with the padding of uneven shards.
        working: the rest by category (`tracker.CATEGORIES`), gradients among them.
        on_host: of the former, bytes that training.enable_cpu_offload keeps on the host.
        where: the fullest moment, in words.
    """

    weights: int
    optimizer: int
    buffers: int
    working: dict[str, int]
    on_host: int
    where: str

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.optimizer + self.buffers + sum(self.working.values()) - self.on_host


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step.

    Attributes:
        compute_s: FLOPs at the GPU's peak.
        intra_node_s, inter_node_s: bytes on the links inside nodes and between them, at their rate.
        products_s, memory_s: expected for matrix products, and for reading and writing the GPU's memory.
        waited_s, hidden_s: expected for collectives that layers wait for, and for those that run next to layers.
        launches_s: expected for the host to launch all kernels, next to the GPU.
        waiting: the share of a step that a pipeline stage waits for others.
    """

    compute_s: float
    intra_node_s: float
    inter_node_s: float
    products_s: float
    memory_s: float
    waited_s: float
    hidden_s: float
    launches_s: float
    waiting: float = 0.0

    @property
    def best_s(self) -> float:
        """The longest of products, links inside nodes and links between them, at their peak rates."""
        return max(self.compute_s, self.intra_node_s, self.inter_node_s) / (1 - self.waiting)

    @property
    def expected_s(self) -> float:
        """Kernels one after the other and the collectives that they wait for; or the host, or hidden collectives, if
        these take longer.
        """
        device = max(self.products_s + self.memory_s, self.hidden_s) + self.waited_s
        return max(device, self.launches_s) / (1 - self.waiting)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds for which each part is busy, next to one another or not; the first is what bounds the step."""
        network = "network" if self.inter_node_s > self.intra_node_s else "links inside nodes"
        parts = {"compute": self.products_s, "GPU memory": self.memory_s, network: self.waited_s + self.hidden_s}
        device = max(self.products_s + self.memory_s, self.hidden_s) + self.waited_s
        bounding = dict(parts)
        if self.hidden_s < self.products_s + self.memory_s:
            bounding[network] = self.waited_s
        first = "kernel launches" if self.launches_s > device else max(bounding, key=bounding.__getitem__)
        parts["kernel launches"] = self.launches_s
        return {first: parts.pop(first)} | dict(sorted(parts.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Estimate:
    """Figures of one configuration.

    Attributes:
        tokens: of an optimizer step, all ranks.
    """

    degrees: Degrees
    memory: Memory
    time: StepTime
    trace: StepTrace
    tokens: int

    def fits(self, hardware: Hardware) -> bool:
        """Return True if the device's memory is enough."""
        return self.memory.total <= hardware.usable_bytes

    @property
    def expected_rate(self) -> float:
        """Tokens per second and GPU, as expected."""
        return self.tokens / self.time.expected_s / self.degrees.world_size

    @property
    def best_rate(self) -> float:
        """Tokens per second and GPU at best."""
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
        found[degrees.stage_of(one)] = build_estimate(job, degrees, trace, hardware, one)
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


def build_estimate(job: JobConfig, degrees: Degrees, trace: StepTrace, hardware: Hardware, rank: int = 0) -> Estimate:
    """Build the estimate that `trace` gives on `hardware`."""
    tokens = trace.micro_batches * job.training.local_batch_size * job.training.seq_len * degrees.dp
    memory = get_memory(trace, offload=job.training.enable_cpu_offload)
    return Estimate(degrees, memory, step_time(trace, degrees, hardware, rank), trace, tokens)


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
    """Seconds of a step on `hardware`."""
    intra = inter = waited = hidden = 0.0
    for traffic, nbytes in trace.nbytes.items():
        ranks = axis_ranks(degrees, traffic.axis, rank)
        inside, outside = hardware.collective_s(traffic.kind, ranks, nbytes)
        intra, inter = intra + inside, inter + outside
        expected = (inside + outside) / EFFICIENCY["links"]
        if len(ranks) > 1:
            expected += trace.counts[traffic] * _COLLECTIVE_S
        if traffic.axis in _WAITED_FOR or traffic.per_step:
            waited += expected
        else:
            hidden += expected
    work = trace.work
    flash = max(work.flash - work.skipped, 0)  # in wider floats no attention is done in two-byte ones
    low = {"dense": work.dense, "experts": work.experts, "flash": flash, "masked": work.masked}
    wide_s = work.wide / hardware.float32_flops
    compute = sum(low.values()) / hardware.flops + wide_s
    products = sum(flops / hardware.flops / EFFICIENCY[name] for name, flops in low.items())
    products += wide_s / EFFICIENCY["wide"]
    memory = work.nbytes / hardware.memory_bytes_s / EFFICIENCY["memory"]
    launches = work.launches * _LAUNCH_S
    waiting = degrees.waiting(trace.micro_batches)
    return StepTime(compute, intra, inter, products, memory, waited, hidden, launches, waiting)
