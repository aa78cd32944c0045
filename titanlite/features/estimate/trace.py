"""One training step, traced on a fake rank: live bytes of each segment, collectives, FLOPs.

Layers repeat: after some first layers come periods of p layers of the same kinds; in most models p
= 1. So few layers are traced, and the rest is extrapolated: between a trace of n layers and one of
n + p, every quantity differs by the amount of one period. This holds for each moment, counted from
the first or the last layer; between those, memory is linear, so its peak is at an end.
`trace_step(..., every_layer=True)` traces all layers; the results are equal.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanlite.assemble import build_unsharded
from titanlite.config import JobConfig, ModelConfig
from titanlite.config.parallelism import Degrees, resolve_global_batch_size, set_values
from titanlite.distributed import ParallelDims
from titanlite.features.estimate.operators import Work, cuda_workspace
from titanlite.features.estimate.stand_in import DeviceType, StandInTrainer, observed, without_data
from titanlite.features.estimate.tracker import (
    BUFFERS,
    STATES,
    UNITS,
    WEIGHTS,
    Kind,
    Segment,
    StepRecorder,
)
from titanlite.features.transformers.model import TransformersModel
from titanlite.launch.process_group import fake_ranks
from titanlite.materialize.layout import is_remote, local_of
from titanlite.metrics.flops import train_flops_per_token
from titanlite.models.families import layers_of
from titanlite.models.families.config_json import cut_layers
from titanlite.models.families.parts import Layer
from titanlite.models.interface import Model
from titanlite.preflight import Checked

_FEWEST = 3  # layers that repeat: the first and the last two
# if gradients are summed over micro-batches outside of FSDP, the peak is at the last layer but one
_FEWEST_WITH_SUMS = 4


def count_micro_batches(job: JobConfig, dp_degree: int) -> int:
    """Return the micro-batches of a data-parallel rank in an optimizer step; the most, if it
    depends on the data.
    """
    sequences = job.training.local_batch_size or 1
    return resolve_global_batch_size(job, dp_degree) // (sequences * dp_degree)


@dataclass(frozen=True)
class StepTrace:
    """The cost of one optimizer step on this rank."""

    # bytes at each segment's peak: weights (with their padding), optimizer states and buffers,
    # which are held all the time, and live bytes by category (`tracker.CATEGORIES`)
    peaks: dict[Segment, dict[str, int]]
    # Work of each traced micro-batch, and of the once-per-step part, including recomputation. The
    # group of a collective is its mesh axis, or "stage" (all ranks of a pipeline stage), or
    # "world".
    work: dict[Kind, Work]
    ranks: dict[str, list[int]]  # global ranks of these groups
    repeats: tuple[int, ...]  # how often the step does the work of each traced micro-batch
    model_flops_per_token: int  # as in MFU: causal attention, no recomputation
    padding: int  # bytes of the weights that FSDP2 adds to shards of uneven size
    traced_layers: int  # number of layers that were really traced
    layers: range  # numbers of this rank's layers

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return sum(self.repeats)

    def step_work(self) -> Iterator[tuple[Kind, Work]]:
        for kind, work in self.work.items():
            yield kind, work * (self.repeats[kind.micro_batch] if kind.micro_batch >= 0 else 1)

    @property
    def total(self) -> Work:
        """Work of the kernels in the whole step."""
        return sum((work for kind, work in self.step_work() if not kind.group), Work())


def add_periods(base: StepTrace, times: int, more: StepTrace) -> StepTrace:
    """Add `times` the difference between `more`, which has one more period of layers, and
    `base`.
    """

    def grow(first: Any, second: Any) -> Any:
        return first + (second + first * -1) * times

    none = Work()
    # with one more layer, a call on all layers' tensors at once has a different size
    work = {
        kind: grow(base.work.get(kind, none), more.work.get(kind, none))
        for kind in {**base.work, **more.work}
    }
    peaks = {
        moment: {name: grow(nbytes, more.peaks[moment][name]) for name, nbytes in peak.items()}
        for moment, peak in base.peaks.items()
        # A moment in only one of the traces lies between moments that are in both.
        if moment in more.peaks
    }
    return replace(
        base,
        work={kind: found for kind, found in work.items() if found != none},
        peaks=peaks,
        model_flops_per_token=grow(base.model_flops_per_token, more.model_flops_per_token),
        padding=grow(base.padding, more.padding),
        traced_layers=base.traced_layers + more.traced_layers,
    )


def trace_step(
    checked: Checked,
    *,
    rank: int = 0,
    device_type: DeviceType = "cuda",
    every_layer: bool = False,
) -> StepTrace:
    """Trace one optimizer step of rank `rank`, with few layers of each kind unless `every_layer`.

    Rows are packed with several documents, as in training, which needs a mask. Creates and destroys
    a process group of fake ranks; none may exist. Nothing is read, sent or computed.

    Raises:
        ConfigError: a pattern names nothing, or transformers cannot build the model.
    """
    stage = checked.degrees.stage_of(rank)
    repetition = None if every_layer else find_repetition(checked, stage)
    if repetition is None:
        return _trace(checked, None, rank, device_type)
    period = repetition.period
    base, more = (
        _trace(_with_layers(checked, stage, count), repetition.split, rank, device_type)
        for count in (repetition.fewest, repetition.fewest + period)
    )
    layers = checked.degrees.stage_layers(checked.model_config.num_layers, stage)
    found = add_periods(base, (len(layers) - repetition.fewest) // period, more)
    return replace(found, layers=layers)


class Repetition(NamedTuple):
    """How the layers of a pipeline stage repeat."""

    fewest: int  # number of layers to trace; the last of them are like the model's last layers
    period: int
    split: int  # layers up to this number are counted from the first one


def find_repetition(checked: Checked, stage: int) -> Repetition | None:
    """Find how few layers represent all layers of a pipeline stage; None: trace all."""
    job = checked.job
    degrees = checked.degrees
    named = (job.optimizer.freeze, job.optimizer.lr_multipliers, job.lora.targets)
    # The owners of Muon's matrices do not repeat from layer to layer.
    if job.optimizer.name == "Muon" or any(re.search(r"\.[\d\[]", names) for names in named):
        return None
    kinds = _list_kinds(checked, stage)
    many = count_micro_batches(job, degrees.dp) > 1
    sums = degrees.dp_replicate > 1 or (degrees.experts_on_own_mesh and degrees.efsdp == 1)
    least = _FEWEST_WITH_SUMS if many and sums else _FEWEST
    found: list[Repetition] = []
    for period in range(1, len(kinds) // 2):
        pairs = enumerate(zip(kinds, kinds[period:], strict=False), start=1)
        first = max((number for number, (kind, later) in pairs if kind != later), default=0)
        fewest = first + max(least, period)
        fewest += (len(kinds) - fewest) % period
        if 2 * fewest + period < len(kinds):
            found.append(Repetition(fewest, period, first + min(2, (fewest - first) // 2)))
    best = min(found, default=None)
    if best is None or isinstance(checked.model_config, ModelConfig):
        return best
    for count in (best.fewest, best.fewest + best.period):
        # The class may count its layers from the last one.
        if _list_kinds(_with_layers(checked, stage, count), stage) != kinds[:count]:
            return None
    return best


def _list_kinds(checked: Checked, stage: int) -> list[Any]:
    """Return a value for each layer of a pipeline stage, the same for equal layers."""
    job = checked.job
    model_config = checked.model_config
    section = job.activation_checkpoint
    turns = 1
    if section.mode == "selective" and section.selective_ac_option != "op":
        turns = int(section.selective_ac_option)
    if isinstance(model_config, ModelConfig):
        kinds = [*stage_layers(model_config, checked.degrees, stage)]
    else:
        model: Any = build_unsharded(job, model_config, "cuda")
        layers = model.decoder_layers()
        config = model.transformers_model.config.get_text_config()
        if len(layers) != model_config.num_layers:  # includes a vision tower's layers
            return [*range(len(layers))]
        types = getattr(config, "layer_types", None) or [""] * len(layers)
        kinds = [*zip(map(_describe_layer, layers), types, strict=True)]
    return [(kind, number % turns) for number, kind in enumerate(kinds)]


def _describe_layer(layer: nn.Module) -> list[Any]:
    """Return everything in which layers of a transformers model may differ, except the number."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        options = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | float | str)
            or (isinstance(value, int) and not key.startswith("layer_"))
        }
        held = [(key, p.shape, p.requires_grad) for key, p in module.named_parameters("", False)]
        found.append((name, type(module), options, held))
    return found


def stage_layers(model_config: ModelConfig, degrees: Degrees, stage: int) -> tuple[Layer, ...]:
    """Return the composition of each layer in a pipeline stage of the native decoder."""
    numbers = degrees.stage_layers(model_config.num_layers, stage)
    return layers_of(model_config)[numbers.start : numbers.stop]


def _with_layers(checked: Checked, stage: int, count: int) -> Checked:
    """Return `checked` with only the first `count` layers of one pipeline stage; other stages are
    unchanged.
    """
    model_config = checked.model_config
    degrees = checked.degrees
    if not isinstance(model_config, ModelConfig):
        return replace(checked, model_config=cut_layers(model_config, count))
    sizes = degrees.stage_sizes(model_config.num_layers)
    removed = degrees.stage_layers(model_config.num_layers, stage)[count:]
    sizes[stage] = count
    dense = model_config.num_dense_layers
    changed = replace(
        model_config,
        num_layers=model_config.num_layers - len(removed),
        num_dense_layers=dense - sum(number < dense for number in removed),
    )
    degrees = replace(degrees, layers=tuple(sizes))
    return replace(checked, model_config=changed, degrees=degrees)


def _trace(checked: Checked, split: int | None, rank: int, device_type: DeviceType) -> StepTrace:
    """Trace a step with every layer of the model. Segments count layers up to `split` from the
    first one, later layers from the last one.
    """
    # traced uncompiled; compiled code stores no more
    uncompiled = {"compile.enable": False, "training.enable_cpu_offload": False}
    job = set_values(checked.job, uncompiled)
    degrees = checked.degrees
    repeats = _repeats(count_micro_batches(job, degrees.dp), job, degrees)
    with fake_ranks(degrees.world_size, rank):
        trainer = StandInTrainer(replace(checked, job=job), device_type)
        with without_data(trainer, device_type):
            batches = trainer.make_batches(len(repeats))
            if isinstance(trainer.model, TransformersModel):
                trainer.model.find_facts(trainer.device)
            workspace = cuda_workspace if device_type == "cuda" else lambda *_: 0
            given = [
                value
                for batch in batches
                for value in vars(batch).values()
                if isinstance(value, torch.Tensor)
            ]
            recorder = StepRecorder([*trainer.persistent(), *given], workspace)
            recorder.mark(_weight_copies(trainer.model), UNITS)
            with observed(trainer, recorder):
                trainer.train_step(batches)
            return _summarize(recorder, trainer, split, repeats)


def _weight_copies(model: Model) -> Iterator[torch.Tensor]:
    """Create the copies of the weights (`WeightCopies`), mark them as stale, so that the step
    refreshes them, and yield them.
    """
    for param in model.parameters():
        copies = getattr(param, "copies", None)
        if copies is not None:
            copies.read(param)
            copy, _ = copies.by_param[param]
            copies.by_param[param] = copy, (-1, -1)
            yield copy


def _repeats(micro_batches: int, job: JobConfig, degrees: Degrees) -> tuple[int, ...]:
    """Return how often a step does the work of each traced micro-batch.

    The traced ones are the first micro-batch, one of the following, and the last if it reduces
    gradients that others do not (`prepare_backward`). A pipeline stage accumulates the activations
    of one micro-batch per stage.
    """
    last_differs = degrees.dp_replicate > 1 or job.parallelism.fsdp_once_per_step
    traced = min(micro_batches, degrees.pp + 1 + last_differs)
    repeated = traced - 1 - last_differs
    return tuple(1 + (micro_batches - traced) * (number == repeated) for number in range(traced))


def _summarize(
    recorder: StepRecorder,
    trainer: StandInTrainer,
    split: int | None,
    repeats: tuple[int, ...],
) -> StepTrace:
    """Return the figures of a recorded step, in which each micro-batch occurs `repeats` times."""
    groups = list(list_groups(trainer.dims))
    world = groups[0][1].group_name
    axes = {group.group_name: axis for axis, group in groups} | {"": ""}
    work: defaultdict[Kind, Work] = defaultdict(Work)
    for kind, found in recorder.work.items():
        is_global = kind.micro_batch < 0 and kind.group == world
        kind = kind._replace(group="world" if is_global else axes[kind.group])
        work[kind] += found
    model = trainer.model
    params = [local_of(param) for param in model.parameters() if not is_remote(param)]
    recorder.leave_out(params)
    held = {
        WEIGHTS: sum(param.untyped_storage().nbytes() for param in params),
        STATES: sum(local_of(state).nbytes for state in trainer.optimizer_states()),
        BUFFERS: sum(buffer.nbytes for buffer in model.buffers() if not is_remote(buffer)),
    }
    num_layers = len(model.decoder_layers())
    split = num_layers // 2 if split is None else split
    return StepTrace(
        peaks={
            _count_from_end(segment, split, num_layers): held | peak
            for segment, peak in recorder.peaks.items()
        },
        work=work,
        ranks={axis: dist.get_process_group_ranks(group) for axis, group in groups},
        repeats=repeats,
        model_flops_per_token=train_flops_per_token(model, trainer.job.training.seq_len),
        padding=held[WEIGHTS] - sum(param.nbytes for param in params),
        traced_layers=num_layers,
        layers=trainer.dims.degrees.stage_layers(len(model.all_layers()), trainer.dims.stage),
    )


def _count_from_end(segment: Segment, split: int, num_layers: int) -> Segment:
    if segment.layer is None or segment.layer < split:
        return segment
    return segment._replace(layer=segment.layer - num_layers)


def list_groups(dims: ParallelDims) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield each process group with its name: a mesh axis, "world", "cp", "pp" or "stage". A group
    may occur several times; the last name counts.
    """
    assert dist.group.WORLD is not None
    yield "world", dist.group.WORLD
    for mesh in [dims.dense] if dims.sparse is None else [dims.sparse, dims.dense]:
        for axis in mesh.mesh_dim_names or ():
            yield axis, mesh.get_group(axis)
    if dims.cp_group is not None:
        yield "cp", dims.cp_group
    if dims.pp_backward_group is not None and dims.stage_group is not None:
        yield "pp", dims.pp_backward_group
        yield "stage", dims.stage_group
