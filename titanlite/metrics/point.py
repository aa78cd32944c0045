"""Data of one log step, and the metrics computed from it over all ranks; results of validations and
evaluations.
"""

import math
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from titanlite.base.agree import gather_objects
from titanlite.base.log import logger
from titanlite.base.timers import StepTimer
from titanlite.config import JobConfig
from titanlite.config.schema import ValidationSection

# Always written, so that plots have no gaps.
_PHASES = ("data", "forward", "backward", "optimizer", "other")


@dataclass
class StepResult:
    """Results of one optimizer step of the global batch, on the device; reading them
    synchronizes.
    """

    loss: torch.Tensor  # mean over units (tokens with a label, or pairs), float32
    # mean balance loss per token without padding, float32; 0 if there are no balance losses
    aux_loss: torch.Tensor
    grad_norm: torch.Tensor  # before clipping, float32
    group_norms: torch.Tensor  # the same per group of parameters, float32 (groups,)
    tokens: int  # includes padding
    unpadded_tokens: torch.Tensor  # int64
    # (layers, E) int64; None if there are no experts, or they are not counted
    tokens_per_expert: torch.Tensor | None
    metrics: torch.Tensor  # means of the objective's metrics, float32 (len(metric_names),)
    # None unless they are measured: units of each micro-batch on all ranks together, int64
    # (micro-batches,), and the squared 2-norm of the gradients that are summed up after its
    # backward, float64 (micro-batches,)
    units: torch.Tensor | None = None
    squares: torch.Tensor | None = None


@dataclass
class Window:
    """The steps since the last log line; `start` is the time in seconds at which that line was
    written.
    """

    start: float = field(default_factory=time.perf_counter)
    results: list[StepResult] = field(default_factory=list)

    def read(self, name: str) -> list[float]:
        """Return the value `name` of each step. Synchronizes."""
        return torch.stack([getattr(result, name) for result in self.results]).tolist()


class Largest(NamedTuple):
    """The largest value of some steps, and its step."""

    value: float
    step: int


def find_largest(values: Sequence[float], last_step: int) -> Largest:
    """Return the largest of the `values` of the steps up to `last_step`, or the first value that is
    not finite.

    Raises ValueError: there are no values.
    """
    largest = max(
        range(len(values)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf
    )
    return Largest(values[largest], last_step - len(values) + 1 + largest)


@dataclass(frozen=True)
class MoEState:
    """State of the MoE layers in the latest step, over all ranks."""

    tokens_per_expert: Tensor  # rows of valid tokens per expert, (layers, E), on any device
    # smallest and largest `expert_bias` of each layer, (2, layers); None if there is no bias
    bias_range: Tensor | None
    tokens_since: Tensor | None = None  # the same over all steps since the last point
    top_k: int = 0  # experts per token; 0: unknown

    @property
    def most_load(self) -> float:
        """The largest possible ratio of load to mean load, reached if all tokens choose the same
        experts; 0: unknown.
        """
        return self.tokens_per_expert.shape[1] / self.top_k if self.top_k else 0.0


def describe_moe(state: MoEState) -> dict[str, list[float]]:
    """Return values per layer by metric name. Synchronizes. The load of a layer without tokens is
    NaN.
    """
    counts = state.tokens_per_expert.detach().to("cpu", torch.float64)
    share = counts / counts.sum(dim=1, keepdim=True)
    # Entropy relative to an even load: 1 is balanced, 0 is one expert that gets all tokens.
    entropy = torch.special.entr(share).sum(dim=1) / math.log(max(counts.shape[1], 2))
    values = {
        "moe/load_max_over_mean": counts.amax(dim=1) / counts.mean(dim=1),
        "moe/load_entropy": entropy,
        "moe/idle_experts": (counts == 0).to(torch.float64).mean(dim=1),
    }
    if state.bias_range is not None:
        low, high = state.bias_range.detach().to("cpu", torch.float64)
        values |= {"moe/expert_bias_min": low, "moe/expert_bias_max": high}
    return {name: value.tolist() for name, value in values.items()}


class Backward(NamedTuple):
    """The gradients after one backward of a step, over all ranks and before clipping.

    They are sums over the units so far, divided by the units of the whole step.
    """

    units: int  # tokens with a label (or pairs) up to this backward
    square: float  # square of the 2-norm


@dataclass(frozen=True)
class StepPoint:
    """One point of training: the values of a log step. "Since" in a comment means since the
    previous point.
    """

    step: int  # optimizer steps completed
    loss: float  # mean per token, over all ranks and the steps since
    grad_norm: float  # total 2-norm of this step's gradients, before clipping
    lr: float
    tokens: int  # tokens computed since, on all ranks together, including padding
    seconds: float  # wall time since, without validations and saves
    num_padding: int = 0  # of `tokens`
    # time of the longest step since, on this rank; None: not measured
    slowest_s: float | None = None
    # largest value of single steps since, by metric name
    largest: Mapping[str, Largest] = field(default_factory=dict)
    # parts of `seconds` on this rank: see `timers.StepTimer`
    phases: Mapping[str, float] = field(default_factory=dict)
    # result of `gather_ranks`; empty: nothing is known
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    # 2-norm of the gradients per group of parameters
    group_norms: Mapping[str, float] = field(default_factory=dict)
    moe: MoEState | None = None  # None for dense models
    # the backwards of this step, for a `metrics.function` that takes them
    backwards: Sequence[Backward] = ()
    # more values, by their names in TensorBoard
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def unpadded_tokens(self) -> int:
        """Number of `tokens` that are not padding."""
        return self.tokens - self.num_padding

    def values(self, steps: int, flops_per_token: int, num_ranks: int) -> dict[str, float]:
        """Return the values that depend on this rank alone, by metric name; the point covers
        `steps` optimizer steps.
        """
        seconds = max(self.seconds, 1e-9)
        flops_per_gpu = self.tokens * flops_per_token / seconds / num_ranks
        values = {
            "loss/train": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "throughput/tokens_per_s": self.unpadded_tokens / seconds,
            "throughput/tflops_per_gpu": flops_per_gpu / 1e12,
            "data/padding": self.num_padding / max(self.tokens, 1),
            "time/step_s": seconds / steps,
        }
        values.update({name: largest.value for name, largest in self.largest.items()})
        if self.slowest_s is not None:
            values["time/step_max_s"] = self.slowest_s
        for phase in _PHASES:
            values[f"time/{phase}_s"] = self.phases.get(phase, 0.0) / steps
        values.update({f"grad_norm/{group}": norm for group, norm in self.group_norms.items()})
        return values | dict(self.extra)


_GIB = 2**30
_MOST_LISTED = 128


def gather_ranks(phases: Mapping[str, float], device: torch.device) -> dict[str, list[float]]:
    """Return each rank's time spent on data and its memory, by name, as lists in the order of
    ranks.

    Collectives: as `gather_objects`; every rank must call.
    """
    values = {"data_s": phases.get("data", 0.0)} | get_memory(device)
    gathered = gather_objects(values)
    return {name: [found[name] for found in gathered] for name in values}


def get_memory(device: torch.device) -> dict[str, float]:
    """Return this rank's memory in GiB: peaks of the device's allocator since the start, and the
    host's resident memory.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    now = psutil.Process().memory_info().rss
    found = {
        "memory/host_rss_gib": now / _GIB,
        # The kernel adds up the counts of all CPUs for the present size but not for the peak, so
        # the peak may be too low.
        "memory/host_peak_rss_gib": max(peak, now) / _GIB,
    }
    if device.type == "cuda":
        found["memory/max_allocated_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
        found["memory/max_reserved_gib"] = torch.cuda.max_memory_reserved(device) / _GIB
    return found


def describe_ranks(
    ranks: Mapping[str, Sequence[float]], steps: int
) -> tuple[dict[str, float], dict[str, object]]:
    """Return metrics over all ranks, and lists per rank for `metrics.jsonl`, of an interval of
    `steps` steps.

    `ranks` is the result of `gather_ranks`: `data_s` of the whole interval, and amounts of memory.
    """
    values = {name: max(column) for name, column in ranks.items() if name.startswith("memory/")}
    if not 1 < len(ranks["data_s"]) <= _MOST_LISTED:  # keeps the lines of large runs readable
        return values, {}
    memory = (
        "memory/max_reserved_gib"
        if "memory/max_reserved_gib" in ranks
        else "memory/host_peak_rss_gib"
    )
    return values, {
        "ranks/data_s": [round(value / steps, 6) for value in ranks["data_s"]],
        "ranks/memory_gib": [round(value, 4) for value in ranks[memory]],
    }


def build_point(
    job: JobConfig,
    window: Window,
    timer: StepTimer,
    step: int,
    *,
    lr: float,
    device: torch.device,
    groups: Sequence[str],
    metric_names: Sequence[str],
    bias_range: Tensor | None,
    top_k: int,
    nonfinite_steps: int,
) -> StepPoint:
    """Build the point of the log step `step`, from all ranks' measurements since the previous
    point.

    Args:
        lr: learning rate of this step.
        groups: names of the groups of parameters in `StepResult.group_norms`.
        metric_names: names of the values in `StepResult.metrics`.
        bias_range: see `MoEState`.
        top_k: experts per token.
        nonfinite_steps: number of steps with a non-finite loss or gradient so far.

    Collective: every rank must call. Synchronizes.
    """
    result = window.results[-1]
    timer.start(None)
    seconds = time.perf_counter() - window.start
    phases = timer.read()
    losses = window.read("loss")
    norms = window.read("grad_norm")
    tokens = sum(each.tokens for each in window.results)
    group_norms = dict(zip(groups, result.group_norms.tolist(), strict=True))
    applied = [loss for loss in losses if math.isfinite(loss)]
    moe = None
    if result.tokens_per_expert is not None:
        counts = [
            each.tokens_per_expert for each in window.results if each.tokens_per_expert is not None
        ]
        since = torch.stack(counts).sum(dim=0)
        moe = MoEState(result.tokens_per_expert, bias_range, since, top_k)
    backwards: list[Backward] = []
    if result.units is not None and result.squares is not None:
        units = result.units.cumsum(dim=0).tolist()
        backwards = list(map(Backward, units, result.squares.tolist()))
    extra = dict(zip(metric_names, result.metrics.tolist(), strict=True))
    if job.training.on_nonfinite == "skip":
        extra["nonfinite_steps"] = float(nonfinite_steps)
    if job.moe.aux_loss_coeff or job.moe.z_loss_coeff:
        extra["loss/aux"] = result.aux_loss.item()
    return StepPoint(
        step,
        loss=sum(applied) / len(applied) if applied else math.nan,
        grad_norm=norms[-1],
        lr=lr,
        tokens=tokens,
        num_padding=tokens - int(sum(window.read("unpadded_tokens"))),
        seconds=seconds,
        slowest_s=timer.read_slowest(),
        largest={
            "loss/train_max": find_largest(losses, step),
            "grad_norm_max": find_largest(norms, step),
        },
        phases=phases,
        ranks=gather_ranks(phases, device),
        group_norms=group_norms if len(group_norms) > 1 else {},
        moe=moe,
        backwards=backwards,
        extra=extra,
    )


@dataclass(frozen=True)
class Example:
    """One prompt in readable form, with the generated answer and its score."""

    prompt: str
    prediction: str
    reference: str
    score: float


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation, the same on all ranks."""

    name: str  # name of the scorer
    score: float  # mean over the prompts
    ended: float  # fraction of the texts that the model ended by itself
    num_prompts: int
    seconds: float
    examples: list[Example]


@dataclass
class Series:
    """Results of one kind over a run. Steps are completed optimizer steps; -1: none yet. NaN is
    never the best.
    """

    name: str = ""  # name of the metric, as in the logs
    first: float | None = None
    last: float | None = None
    last_step: int = -1
    best: float | None = None
    best_step: int = -1
    reference: float | None = None  # value to improve on by `early_stopping_min_delta`
    stale: int = 0  # number of results since then that did not


class Results:
    """Validation losses (lower is better) and evaluation scores of a run; kept on all ranks, and
    saved in checkpoints.
    """

    def __init__(
        self, section: ValidationSection, save_best: str, saved: Mapping[str, Any] | None = None
    ) -> None:
        self._validation = section
        self._save_best = save_best
        self.validation = Series(**(saved or {}).get("validation", {}))
        self.evaluation = Series(**(saved or {}).get("evaluation", {}))

    def add_validation(self, step: int, loss: float, mixture: str = "") -> bool:
        """Add a validation loss; return True if the checkpoint of this step becomes the best one.

        Losses of different mixtures of sources are not comparable: if `mixture` changes, the record
        restarts.
        """
        series = self.validation
        name = f"validation loss ({mixture})" if mixture else "validation loss"
        if series.name not in ("", name):
            best = "no number" if series.best is None else f"{series.best:.4f}"
            logger.info(
                f"validation: the best {series.name} was {best}; from here on it is the {name}"
            )
        improved = _add(series, name, step, loss, -1.0, self._validation.early_stopping_min_delta)
        return improved and self._save_best == "validation"

    def add_evaluation(self, step: int, name: str, score: float) -> bool:
        """Add an evaluation score; return True if the checkpoint of this step becomes the best
        one.
        """
        improved = _add(self.evaluation, name, step, score, 1.0, 0.0)
        return improved and self._save_best == "evaluation"

    @property
    def out_of_patience(self) -> bool:
        """True once the validation loss has not improved for `validation.early_stopping_patience`
        validations.
        """
        patience = self._validation.early_stopping_patience
        return self._validation.enable and 0 < patience <= self.validation.stale

    def describe(self) -> str:
        """Describe the best validation loss and how long it has not improved."""
        series = self.validation
        if series.best is None:
            return f"the {series.name} was never a number"
        best = f"the {series.name} was best ({series.best:.4f}) at step {series.best_step}"
        if series.reference is None or series.best == series.reference:
            return f"{best} and has not improved in {series.stale} validations"
        least = self._validation.early_stopping_min_delta
        return (
            f"{best}, but in {series.stale} validations it was never {least:g} "
            f"(validation.early_stopping_min_delta) below {series.reference:.4f}"
        )

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the results as `__init__` takes them in `saved`; kinds without results are
        omitted.
        """
        kinds = {"validation": self.validation, "evaluation": self.evaluation}
        return {kind: asdict(series) for kind, series in kinds.items() if series.last_step >= 0}


def _add(series: Series, name: str, step: int, value: float, sign: float, min_delta: float) -> bool:
    """Add a value; return True if it is the best so far. A value from before training is never the
    best, because it has no checkpoint.
    """
    if series.name != name:  # a different scorer than before: values are not comparable
        series.__dict__.update(asdict(Series(name=name)))
    series.last = value
    series.last_step = step
    if series.first is None:
        series.first = value
    if step == 0:
        return False
    beats = series.reference is None or sign * value > sign * series.reference + min_delta
    if beats and not math.isnan(value):
        series.reference = value
        series.stale = 0
    else:
        series.stale += 1
    if math.isnan(value) or (series.best is not None and sign * value <= sign * series.best):
        return False
    series.best = value
    series.best_step = step
    return True
