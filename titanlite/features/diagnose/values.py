"""Faults that show in values: NaN or infinity, replicas that differ, loss spikes."""

import itertools
import math
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.base.agree import gather_objects, list_ranks
from titanlite.base.errors import DivergenceError, raise_problems
from titanlite.base.log import logger
from titanlite.checkpoint import find_complete_before
from titanlite.config import JobConfig
from titanlite.config.schema import SpikeSection
from titanlite.data.dataset import Batch
from titanlite.distributed import ParallelDims
from titanlite.materialize import Plan
from titanlite.materialize.execute import bit_digest
from titanlite.materialize.layout import encoding_of, local_of, num_replicas
from titanlite.metrics import record_event
from titanlite.optim.optimizer import Diagnosis, NonFiniteSteps

_SHOWN = 3


@dataclass
class _Found:
    """Findings of one rank."""

    stage: int  # of the pipeline
    losses: tuple[int, ...]  # micro-batches whose loss was not finite when the step was trained on
    weights: list[str]  # that hold values that are not finite
    # Micro-batch, chunk of the stage, place in the order of the forward, and module of the first output that is not
    # finite, per micro-batch that has one.
    outputs: list[tuple[int, int, int, str]] = field(default_factory=list)
    # The first micro-batch that has such gradients, and their parameters, each with its place in the model.
    grads: tuple[int, list[tuple[int, str]]] | None = None


def diagnose(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    scaled_loss: Callable[[Batch], torch.Tensor],
    found: NonFiniteSteps,
    *,
    whole_layers: bool,
    stage: int = 0,
) -> Diagnosis:
    """Compute a step again on the current weights; report the tensors that are not finite, with their ranks.

    Nothing is applied: gradients are dropped, and random generators are restored.

    Args:
        model: with its weights before that step.
        micro_batches: of this rank in that step, on the device.
        scaled_loss: what backward is called on, for one micro-batch.
        found: with the micro-batches that were not finite the first time.
        whole_layers: look at whole modules below the root only, because the insides are compiled.
        stage: this rank's pipeline stage; its forward begins where that of the one before ends.

    Collectives: those of forward and backward, and one all-gather of small objects; every rank must call.
    """
    params = list(model.named_parameters())
    mine = _Found(stage, found.micro_batches, [name for name, param in params if not _has_finite_values(param)])
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):  # dropout draws the same numbers after this as without it
        for number, batch in enumerate(micro_batches):
            with _watched(model, whole_layers) as first:
                loss = scaled_loss(batch)
            if first or not math.isfinite(loss.item()):
                chunk, place, name = first[0] if first else (sys.maxsize, sys.maxsize, "the loss")
                mine.outputs.append((number, chunk, place, name))
            loss.backward()
            if mine.grads is None:
                bad = [
                    (place, name)
                    for place, (name, param) in enumerate(params)
                    if param.grad is not None and not _is_finite(param.grad)
                ]
                mine.grads = (number, bad) if bad else None
            model.zero_grad()
    return _describe(gather_objects(mine))


def _describe(gathered: Sequence[_Found]) -> Diagnosis:
    sentences: list[str] = []
    losses = [(rank, f.losses) for rank, f in enumerate(gathered) if f.losses]
    if losses:
        places = ", ".join(f"micro-batch {' and '.join(map(str, m))} on rank {rank}" for rank, m in losses[:_SHOWN])
        sentences.append(f"The loss was not finite in {places}{_more(len(losses))}.")
    weights = sorted({name for f in gathered for name in f.weights})
    if weights:
        ranks = [rank for rank, f in enumerate(gathered) if f.weights]
        sentences.append(f"Weights are not finite: {_names(weights)}, on ranks {list_ranks(ranks)}.")
    # Attention spreads non-finite values to other ranks: the origin is the first place on any of them.
    outputs = sorted(
        (number, (chunk, f.stage), place, rank, name)
        for rank, f in enumerate(gathered)
        for number, chunk, place, name in f.outputs
    )
    # Likewise, later stages and chunks got them from the earliest one.
    lowest = {number: part for number, part, *_ in reversed(outputs)}
    outputs = [found for found in outputs if found[1] == lowest[found[0]]]
    if outputs:
        places = [f"{name} (micro-batch {number}, rank {rank})" for number, _, _, rank, name in outputs[:_SHOWN]]
        sentences.append(f"Computed again, the first output that is not finite is {', '.join(places)}.")
    grads = [f.grads for f in gathered if f.grads is not None]
    if grads:
        number = min(number for number, _ in grads)
        closest_to_loss = sorted({param for at, found in grads if at == number for param in found}, reverse=True)
        again = "Computed again, g" if not outputs else "G"
        names = _names([name for _, name in closest_to_loss])
        sentences.append(f"{again}radients that are not finite, from micro-batch {number} on: {names}.")
    repeats = bool(weights or outputs or grads)
    if not repeats:
        sentences.append("Computed again, the step is finite on all ranks.")
    return Diagnosis(" ".join(sentences), repeats)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + _more(len(names))


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""


def _has_finite_values(param: torch.Tensor) -> bool:
    encoding = encoding_of(param)
    return _is_finite(param) if encoding is None else not encoding.count_not_finite(local_of(param))


def _floating(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        yield output
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    for part in parts:
        yield from _floating(part)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(local_of(tensor).isfinite().all())


@contextmanager
def _watched(model: nn.Module, whole_layers: bool) -> Iterator[list[tuple[int, int, str]]]:
    """Collect modules with non-finite outputs, in order: chunk, number of modules that ended before, and name."""
    names: list[tuple[int, int, str]] = []
    ended, chunk = itertools.count(), 0

    def look_at(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            nonlocal chunk
            chunk += getattr(module, "between_chunks", False)  # of a pipeline
            place = next(ended)
            if not all(_is_finite(tensor) for tensor in _floating(output)):
                names.append((chunk, place, f"that of {name}" if name else "that of the model"))

        return hook

    layers = {id(child) for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    handles = [
        module.register_forward_hook(look_at(name))
        for name, module in model.named_modules()
        if not whole_layers or id(module) in layers
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


# Which shard of which layout: the ranks with the same one hold the same bits.
_Place = tuple[tuple[str, int], ...]


class DivergenceCheck:
    """Comparison of the tensors that ranks must hold alike, every `training.divergence_check_freq` steps.

    A flipped bit of one replica is in no reduced gradient and long in no loss, while the replicas train different
    models. Each rank hashes the bits of tensors that others hold too (`bit_digest`), and the ranks compare a few
    numbers; only if those differ, they exchange the digests of single tensors. Ranks with the same `dims.dp_rank` must
    read the same batches, and ranks of a stage may hold the same tensors. The first comparison covers the time since
    `step`. Equal configurations are checked at the start.
    """

    def __init__(
        self, job: JobConfig, plan: Plan, optimizer: torch.optim.Optimizer, dims: ParallelDims, step: int
    ) -> None:
        self._freq = job.training.divergence_check_freq
        self._plan, self._optimizer, self._dims = plan, optimizer, dims
        self._agreed_step = step

    def is_due(self, step: int) -> bool:
        return self._freq > 0 and step % self._freq == 0

    @torch.no_grad()
    def check(self, step: int, data: str, samples: int, batches: Sequence[Batch]) -> None:
        """Compare all ranks after `step`: their tensors, the order of the data, and the `samples` read of it.

        Synchronizes.

        Raises:
            DivergenceError: on all ranks; names the tensors, and which ranks differ, and since when.

        Collectives: one all-gather of small objects over the default process group, a second one where ranks differ;
        every rank must call.
        """
        held = list(self._held())
        # Some states are on the CPU where others are not: `step` of AdamW unless it is fused, and what is offloaded.
        device = batches[0].tokens.device
        sums = [bit_digest(local_of(tensor)).to(device, non_blocking=True) for _, _, tensor in held]
        digests = [tuple(found) for found in torch.stack(sums).tolist()] if sums else []
        by_place: defaultdict[_Place, list[tuple[int, ...]]] = defaultdict(list)
        for (_, place, _), digest in zip(held, digests, strict=True):
            by_place[place].append(digest)
        facts = {
            "step": step,
            "samples of the data order": samples,
            "data order": data,
            f"batch of data-parallel rank {self._dims.dp_rank}": [bit_digest(b.tokens).tolist() for b in batches],
        }
        gathered = gather_objects((facts, {place: hash(tuple(found)) for place, found in by_place.items()}))
        differing = _differing([found for found, _ in gathered])
        problems = [f"the {name} is not the same on {ranks}." for name, ranks in differing.items()]
        if _differing([found for _, found in gathered]):
            by_name = {(name, place): digest for (name, place, _), digest in zip(held, digests, strict=True)}
            named = _differing(gather_objects(by_name))
            problems += [f"{name}: replicas differ between {ranks}." for (name, _), ranks in named.items()]
        if problems:
            since = f"between step {self._agreed_step} and step {step}"
            problems[-1] += (
                f" It happened {since}; a faulty machine is the usual cause, then a change of the code that not all "
                "ranks have. Start again from a checkpoint of before, without that machine."
            )
        raise_problems(DivergenceError, f"ranks differ after step {step}", problems)
        self._agreed_step = step

    def _held(self) -> Iterator[tuple[str, _Place, torch.Tensor]]:
        """Yield the name, place and tensor of everything that another rank must hold, too."""
        sharing, stage = self._dims.degrees.stage_size, (("pp", self._dims.stage),)
        for entry in self._plan.entries:
            if entry.is_elsewhere:
                continue
            # Non-persistent buffers may be this rank's own, such as the token counts of its experts.
            found = [(entry.fqn, entry.tensor)] if entry.info.persistent else []
            states = sorted(self._optimizer.state.get(entry.tensor, {}).items())
            found += [(f"{name} of {entry.fqn}", state) for name, state in states if isinstance(state, torch.Tensor)]
            for name, tensor in found:
                if num_replicas(tensor, sharing) > 1:
                    yield name, stage + _place(tensor), tensor


def _place(tensor: torch.Tensor) -> _Place:
    if not isinstance(tensor, DTensor):
        return ()
    coordinate, names = tensor.device_mesh.get_coordinate(), tensor.device_mesh.mesh_dim_names
    assert coordinate is not None and names is not None
    axes = zip(names, coordinate, tensor.placements, strict=True)
    return tuple((name, at) for name, at, placement in axes if hasattr(placement, "dim"))


def _differing(gathered: Sequence[dict[Any, Any]]) -> dict[Any, str]:
    """Return the keys whose values differ between ranks, with the ranks of each value, the largest group first."""
    ranks_of: defaultdict[Any, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in enumerate(gathered):
        for key, value in found.items():
            ranks_of[key][repr(value)].append(rank)
    differing = {}
    for key, by_value in ranks_of.items():
        if len(by_value) > 1:
            groups = sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks))
            differing[key] = " and ".join(f"ranks {list_ranks(ranks)}" for ranks in groups)
    return differing


_MIN_HISTORY = 8
# Of a normal distribution, the standard deviation over the median absolute deviation.
_MAD_TO_STD = 1.4826
# A loss that hardly moves has a deviation near 0; changes below this share of it are no spikes.
_SMALLEST_SHARE = 1e-3


class Spike(NamedTuple):
    """A loss that stands out; `score` is its deviation from the median over the robust standard deviation."""

    step: int
    loss: float
    median: float
    score: float


class SpikeDetector:
    """Comparison of losses to the median of the last `spike.window` ones, in units of their median absolute deviation.

    A warning has the remedy of PaLM's authors (arXiv:2204.02311, section 5.1): restart before the spike and skip its
    data. Single large losses move neither median nor deviation, as they would a mean. Nothing is a spike before half a
    window (at least 8 losses) is known; a resumed run fills its window again. `folder` has the run's checkpoints.
    """

    def __init__(self, section: SpikeSection, folder: Path) -> None:
        self._folder = folder
        self._enabled, self._threshold = section.enable, section.threshold
        self._losses: deque[float] = deque(maxlen=section.window)
        self._needed = max(_MIN_HISTORY, section.window // 2)

    def watch(self, last_step: int, losses: Sequence[float], samples: int) -> None:
        """Take the losses of the steps up to `last_step`; warn on rank 0 of a spike, and say how to go back before it.

        `samples` of the data order lie before the next step: a restart skips those.
        """
        spike = self.add(last_step, losses)
        if spike is None or dist.get_rank() != 0:
            return
        text = (
            f"the loss of step {spike.step} is {spike.loss:.4f}, {spike.score:.1f} robust standard deviations above "
            f"the median of {spike.median:.4f}; training goes on."
        )
        target = find_complete_before(self._folder, spike.step)
        if target is None:
            text += " There is no checkpoint of before to go back to."
        else:
            text += (
                f" To leave out the data of steps {target + 1} to {last_step}: stop this run, move the checkpoints "
                f"after step-{target} out of {self._folder}, and start the same command with "
                f"--data.skip_to_sample={samples}"
            )
        logger.warning("spike: %s", text)
        record_event("spike", text, last_step)

    def add(self, last_step: int, losses: Sequence[float]) -> Spike | None:
        """Take the losses of the steps up to `last_step`; return the first spike among them, or None.

        Losses that are not finite are passed over: those steps were not applied.
        """
        if not self._enabled:
            return None
        for step, loss in enumerate(losses, last_step - len(losses) + 1):
            if not math.isfinite(loss):
                continue
            if len(self._losses) >= self._needed:
                median = statistics.median(self._losses)
                deviation = statistics.median(abs(known - median) for known in self._losses)
                score = (loss - median) / max(_MAD_TO_STD * deviation, _SMALLEST_SHARE * abs(median), 1e-12)
                if score > self._threshold:
                    return Spike(step, loss, median, score)
            self._losses.append(loss)
        return None
