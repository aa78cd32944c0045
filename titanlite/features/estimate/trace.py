"""One training step, traced on a fake rank: live bytes of each segment, collectives, FLOPs.

Layers of one kind are alike, so few of each are traced and the rest is extrapolated: with n and
with n + 1 of them (or n + p, if they repeat with period p), every quantity differs by the share of
one more layer. This holds for each moment, counted from the first or the last layer of its kind;
between those, memory is linear, so its peak is at an end. `trace_step(..., every_layer=True)`
traces all of them; the results are equal.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.config.parallelism import Degrees, resolve_global_batch_size
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import ExpertCopies
from titanlite.features.estimate.operators import Work, cuda_workspace
from titanlite.features.estimate.stand_in import DeviceType, StandInTrainer, observed, without_data
from titanlite.features.estimate.tracker import UNITS, Kind, Segment, StepRecorder
from titanlite.features.transformers.model import TransformersModel
from titanlite.launch.process_group import fake_ranks
from titanlite.materialize.layout import is_elsewhere, local_of
from titanlite.metrics.flops import train_flops_per_token
from titanlite.models.interface import Model
from titanlite.models.moe import Experts

_FEWEST = 3  # layers of a kind: the first and the last two
# where gradients add up over micro-batches outside of FSDP, the last but one is the fullest
_FEWEST_WITH_SUMS = 4


def count_micro_batches(job: JobConfig, dp_degree: int) -> int:
    """Micro-batches of a data-parallel rank in an optimizer step; at most so many where that
    depends on the data.
    """
    return resolve_global_batch_size(job, dp_degree) // (job.training.local_batch_size * dp_degree)


class Moment(NamedTuple):
    """A stretch of a step (`Segment`), its layer counted from an end of the layers of its kind."""

    micro_batch: int
    phase: str
    # 0: leading dense layers of an MoE model or all layers of others; 1: the rest; -1: no layer
    kind: int
    from_end: bool  # `index` counts from the last layer of the kind
    index: int
    turn: int


@dataclass(frozen=True)
class StepTrace:
    """Cost of one optimizer step on this rank."""

    # live bytes by category (`tracker.CATEGORIES`) when each stretch is fullest
    peaks: dict[Moment, dict[str, int]]
    # Work of one of each traced micro-batch, and of the once-per-step part, recomputation included;
    # the group of a collective is its axis of the mesh, or "stage" (all ranks of a pipeline stage),
    # or "world".
    work: dict[Kind, Work]
    repeats: tuple[int, ...]  # how often the step does the work of each traced micro-batch
    model_flops_per_token: int  # as MFU counts them: causal attention, no recomputation
    weights: int  # bytes that are there all the time, as the next three
    optimizer: int
    buffers: int
    padding: int  # that FSDP2 adds to shards of uneven size
    micro_batches: int  # per step
    # that the figures are of, by kind; with pipeline stages those of this rank's
    num_layers: tuple[int, ...]
    traced_layers: int  # that were really traced
    layers: range  # numbers of this rank's

    def step_work(self) -> Iterator[tuple[Kind, Work]]:
        for kind, work in self.work.items():
            yield kind, work * (self.repeats[kind.micro_batch] if kind.micro_batch >= 0 else 1)

    @property
    def total(self) -> Work:
        """Of kernels, in the whole step."""
        return sum((work for kind, work in self.step_work() if not kind.group), Work())

    def plus(self, times: int, larger: "StepTrace", smaller: "StepTrace") -> "StepTrace":
        """Return this trace with `times` the difference of two others added: as many layers
        more.
        """

        def grown(name: str) -> Any:
            here, more, less = (getattr(trace, name) for trace in (self, larger, smaller))
            if isinstance(here, dict):
                none = Work()
                # of one layer more, a call on all layers' tensors at once has another size
                keys = {**here, **more}
                found = {
                    k: here.get(k, none) + (more.get(k, none) + less.get(k, none) * -1) * times
                    for k in keys
                }
                return {key: work for key, work in found.items() if work != none}
            return here + (more + less * -1) * times

        peaks = {
            moment: {
                name: value + times * (larger.peaks[moment][name] - smaller.peaks[moment][name])
                for name, value in peak.items()
            }
            for moment, peak in self.peaks.items()
            # A moment that only some of the traces have lies between moments that all have.
            if moment in larger.peaks and moment in smaller.peaks
        }
        sizes = ("model_flops_per_token", "weights", "optimizer", "buffers", "padding")
        return replace(self, peaks=peaks, **{name: grown(name) for name in ("work", *sizes)})


def trace_step(
    job: JobConfig,
    model_config: AnyModelConfig,
    degrees: Degrees,
    *,
    rank: int = 0,
    device_type: DeviceType = "cuda",
    every_layer: bool = False,
    documents: bool = True,
) -> StepTrace:
    """Trace one optimizer step of rank `rank`, with few layers of each kind unless `every_layer`.

    Rows are packed with several documents as the trainer's data is, which takes a mask, unless
    `documents` is False. Makes and destroys a process group of fake ranks; there must be none.
    Nothing is read, sent or computed.

    Raises:
        ConfigError: patterns that name nothing, or transformers cannot build the model.
    """
    stage = degrees.stage_of(rank)

    def trace(by_kind: tuple[int, ...] | None = None) -> StepTrace:
        """With so many layers of each kind in this rank's stage; None: with all."""
        if by_kind is None or not isinstance(model_config, ModelConfig):
            return _trace(job, model_config, degrees, rank, device_type, documents)
        few_layers = _with_layers(model_config, degrees, stage, by_kind)
        return _trace(job, *few_layers, rank, device_type, documents)

    selected = layers_to_trace(job, model_config, degrees, stage)
    if every_layer or selected is None:
        return trace()
    wanted, few, period = selected
    more_layers = sum(
        sum(few) + period for num, num_few in zip(wanted, few, strict=True) if num > num_few
    )
    if sum(few) + more_layers >= sum(wanted):
        return trace()
    found = base = trace(few)
    traced = sum(few)
    for kind, (num, num_few) in enumerate(zip(wanted, few, strict=True)):
        if num > num_few:
            more = tuple(n + period * (k == kind) for k, n in enumerate(few))
            found = found.plus((num - num_few) // period, trace(more), base)
            traced += sum(more)
    layers = degrees.stage_layers(model_config.num_layers, stage)
    return replace(found, num_layers=wanted, layers=layers, traced_layers=traced)


def layers_to_trace(
    job: JobConfig, model_config: AnyModelConfig, degrees: Degrees, stage: int
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Return (layers by kind, how many of them are traced, period of their repetition); None: they
    are not alike.
    """
    named = (job.optimizer.freeze, job.optimizer.lr_multipliers, job.lora.targets)
    if not isinstance(model_config, ModelConfig) or any(
        re.search(r"\.[\d\[]", patterns) for patterns in named
    ):
        return None
    wanted = layers_by_kind(model_config, degrees, stage)
    section, period = job.activation_checkpoint, 1
    if section.mode == "selective" and section.selective_ac_option != "op":
        period = int(section.selective_ac_option)
    many = count_micro_batches(job, degrees.dp) > 1
    sums = degrees.dp_replicate > 1 or (degrees.experts_on_own_mesh and degrees.efsdp == 1)
    fewest = _FEWEST_WITH_SUMS if many and sums else _FEWEST
    few = []
    for num in wanted:
        least = fewest * period + (num - fewest * period) % period
        few.append(num if num <= least + period else least)
    return wanted, tuple(few), period


def layers_by_kind(model_config: AnyModelConfig, degrees: Degrees, stage: int) -> tuple[int, int]:
    """Count leading dense layers of an MoE model, or all of others, and the rest: of one pipeline
    stage.
    """
    if not isinstance(model_config, ModelConfig):
        return model_config.num_layers, 0
    num_dense = (
        model_config.num_dense_layers if model_config.num_experts else model_config.num_layers
    )
    layers = degrees.stage_layers(model_config.num_layers, stage)
    dense = sum(layer < num_dense for layer in layers)
    return dense, len(layers) - dense


def _with_layers(
    model_config: ModelConfig, degrees: Degrees, stage: int, by_kind: tuple[int, ...]
) -> tuple[ModelConfig, Degrees]:
    """Return model and degrees with so many layers in one pipeline stage, the others as they
    are.
    """
    sizes = degrees.stage_sizes(model_config.num_layers)
    removed = sizes[stage] - sum(by_kind)
    sizes[stage] = sum(by_kind)
    dense = model_config.num_dense_layers
    if model_config.num_experts:
        dense -= layers_by_kind(model_config, degrees, stage)[0] - by_kind[0]
    changed = replace(
        model_config, num_layers=model_config.num_layers - removed, num_dense_layers=dense
    )
    return changed, replace(degrees, layers=tuple(sizes))


def _trace(
    job: JobConfig,
    model_config: AnyModelConfig,
    degrees: Degrees,
    rank: int,
    device_type: DeviceType,
    documents: bool,
) -> StepTrace:
    """Trace a step with every layer of `model_config`."""
    # traced uncompiled; compiled code keeps no more
    job = replace(job, compile=replace(job.compile, enable=False))
    job = replace(job, training=replace(job.training, enable_cpu_offload=False))
    repeats = _repeats(count_micro_batches(job, degrees.dp), job, degrees)
    with fake_ranks(degrees.world_size, rank):
        trainer = StandInTrainer(job, model_config, degrees, device_type)
        with without_data(trainer, device_type):
            batches = trainer.make_batches(len(repeats), documents=documents)
            if isinstance(trainer.model, TransformersModel):
                trainer.train_step(batches)  # its first forward looks at how the model works
            workspace = cuda_workspace if device_type == "cuda" else lambda *_: 0
            given = [
                value
                for batch in batches
                for value in vars(batch).values()
                if isinstance(value, torch.Tensor)
            ]
            recorder = StepRecorder([*trainer.persistent(), *given], workspace)
            with observed(trainer, recorder):
                trainer.train_step(batches)
            recorder.leave_out(trainer.persistent())
            recorder.mark(_expert_copies(trainer.model), UNITS)
            num_layers = layers_by_kind(model_config, degrees, degrees.stage_of(rank))
            if not isinstance(model_config, ModelConfig):
                num_layers = (len(trainer.model.decoder_layers()), 0)
            return _summarize(recorder, trainer, num_layers, repeats)


def _expert_copies(model: Model) -> list[torch.Tensor]:
    """Return what stands in for gathered experts where FSDP has none to gather."""
    readers = [module.read for module in model.modules() if isinstance(module, Experts)]
    return [
        copy
        for read in readers
        if isinstance(read, ExpertCopies)
        for copy, _ in read.by_param.values()
    ]


def _repeats(micro_batches: int, job: JobConfig, degrees: Degrees) -> tuple[int, ...]:
    """Return how often a step does the work of each micro-batch that is traced.

    Traced are the first micro-batch, one of the following, and the last if it reduces gradients
    that others do not (`prepare_backward`). A pipeline stage accumulates activations of as many
    micro-batches as there are stages.
    """
    last_differs = degrees.dp_replicate > 1 or job.parallelism.fsdp_once_per_step
    traced = min(micro_batches, degrees.pp + 1 + last_differs)
    repeated = traced - 1 - last_differs
    return tuple(1 + (micro_batches - traced) * (number == repeated) for number in range(traced))


def _summarize(
    recorder: StepRecorder,
    trainer: StandInTrainer,
    num_layers: tuple[int, ...],
    repeats: tuple[int, ...],
) -> StepTrace:
    """Return the figures of a recorded step; each of its micro-batches stands for `repeats`
    many.
    """
    assert dist.group.WORLD is not None
    world = dist.group.WORLD.group_name
    axes = axis_names(trainer.dims) | {"": ""}
    work: dict[Kind, Work] = {}
    for kind, found in recorder.work.items():
        is_global = kind.micro_batch < 0 and kind.group == world
        kind = kind._replace(group="world" if is_global else axes[kind.group])
        work[kind] = work.get(kind, Work()) + found
    model = trainer.model
    params = [local_of(param) for param in model.parameters() if not is_elsewhere(param)]
    weights = sum(param.nbytes for param in params)
    return StepTrace(
        peaks={_moment(segment, num_layers): peak for segment, peak in recorder.peaks().items()},
        work=work,
        repeats=repeats,
        model_flops_per_token=train_flops_per_token(model, trainer.job.training.seq_len),
        weights=weights,
        optimizer=sum(local_of(state).nbytes for state in trainer.optimizer_states()),
        buffers=sum(buffer.nbytes for buffer in model.buffers() if not is_elsewhere(buffer)),
        padding=sum(param.untyped_storage().nbytes() for param in params) - weights,
        micro_batches=sum(repeats),
        num_layers=num_layers,
        traced_layers=sum(num_layers),
        layers=trainer.dims.degrees.stage_layers(len(model.all_layers()), trainer.dims.stage),
    )


def _moment(segment: Segment, num_layers: tuple[int, ...]) -> Moment:
    kind, index = (-1, 0) if segment.layer < 0 else (0, segment.layer)
    if kind == 0 and index >= num_layers[0]:
        kind, index = 1, index - num_layers[0]
    from_end = kind >= 0 and index >= num_layers[kind] // 2
    if from_end:
        index = num_layers[kind] - 1 - index
    return Moment(segment.micro_batch, segment.phase, kind, from_end, index, segment.turn)


def axis_names(dims: ParallelDims) -> dict[str, str]:
    """Name of the process group -> mesh axis, "cp" or "stage"; an axis with all ranks may have the
    group of them.
    """
    assert dist.group.WORLD is not None
    names: dict[str, str] = {dist.group.WORLD.group_name: "world"}
    for mesh in [dims.dense] if dims.sparse is None else [dims.sparse, dims.dense]:
        for axis in mesh.mesh_dim_names or ():
            names[mesh.get_group(axis).group_name] = axis
    if dims.cp_group is not None:
        names[dims.cp_group.group_name] = "cp"
    if dims.pp_backward_group is not None and dims.stage_group is not None:
        names[dims.pp_backward_group.group_name] = "pp"
        names[dims.stage_group.group_name] = "stage"
    return names
