"""Results of validations and evaluations: the best step, when to stop early, and their state for a resumed run."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from titanlite.base.log import logger
from titanlite.config import JobConfig


@dataclass(frozen=True)
class Example:
    """One prompt, as people read it, and what the scorer gave."""

    prompt: str
    prediction: str
    reference: str
    score: float


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation, the same on all ranks."""

    name: str  # of the scorer
    score: float  # mean over the prompts
    ended: float  # share of the texts that the model ended by itself
    num_prompts: int
    seconds: float
    examples: list[Example]


@dataclass
class Series:
    """Results of one kind over a run. Steps are optimizer steps done; -1: none yet. nan is never best."""

    name: str = ""  # of the metric, as in the logs
    first: float | None = None
    last: float | None = None
    last_step: int = -1
    best: float | None = None
    best_step: int = -1
    reference: float | None = None  # what the next one must beat by `early_stopping_min_delta`
    stale: int = 0  # results in a row that did not


class Results:
    """The losses of validations (lower is better) and scores of evaluations of a run: on all ranks, in checkpoints."""

    def __init__(self, job: JobConfig, saved: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._validation, self._save_best = job.validation, job.checkpoint.save_best
        self.validation = Series(**(saved or {}).get("validation", {}))
        self.evaluation = Series(**(saved or {}).get("evaluation", {}))

    def add_validation(self, step: int, loss: float, mixture: str = "") -> bool:
        """Take a validation loss; True if the checkpoint of this step is the one to keep as the best.

        Losses of one `mixture` of sources, in words, say nothing about those of another: with it all begins anew.
        """
        series, name = self.validation, f"validation loss ({mixture})" if mixture else "validation loss"
        if series.name not in ("", name):
            best = "no number" if series.best is None else f"{series.best:.4f}"
            logger.info("validation: the best %s was %s; from here on it is the %s", series.name, best, name)
        improved = _add(series, name, step, loss, -1.0, self._validation.early_stopping_min_delta)
        return improved and self._save_best == "validation"

    def add_evaluation(self, step: int, name: str, score: float) -> bool:
        """Take an evaluation score; True if the checkpoint of this step is the one to keep as the best."""
        improved = _add(self.evaluation, name, step, score, 1.0, 0.0)
        return improved and self._save_best == "evaluation"

    @property
    def exhausted(self) -> bool:
        """True once the validation loss has not improved for `validation.early_stopping_patience` validations."""
        patience = self._validation.early_stopping_patience
        return self._validation.enable and 0 < patience <= self.validation.stale

    def describe(self) -> str:
        """Return the state of the validation loss in words."""
        series = self.validation
        if series.best is None:
            return f"the {series.name} was never a number"
        return (
            f"the {series.name} was best ({series.best:.4f}) at step {series.best_step} and has not improved in "
            f"{series.stale} validations"
        )

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what `__init__` takes as `saved`; empty for what has no results."""
        kinds = {"validation": self.validation, "evaluation": self.evaluation}
        return {kind: asdict(series) for kind, series in kinds.items() if series.last_step >= 0}


def _add(series: Series, name: str, step: int, value: float, sign: float, min_delta: float) -> bool:
    """Add a value; return True if it is the best so far. One from before training never is: it has no checkpoint."""
    if series.name != name:  # another scorer than before the resume: nothing to compare with
        series.__dict__.update(asdict(Series(name=name)))
    series.last, series.last_step = value, step
    if series.first is None:
        series.first = value
    if step == 0:
        return False
    beats = series.reference is None or sign * value > sign * series.reference + min_delta
    if beats and not math.isnan(value):
        series.reference, series.stale = value, 0
    else:
        series.stale += 1
    if math.isnan(value) or (series.best is not None and sign * value <= sign * series.best):
        return False
    series.best, series.best_step = value, step
    return True
