"""The files of a run's folder, read for the report, without torch.

A run of 100,000 steps has as many lines, so values go into arrays, one per metric name, and not into dictionaries.
"""

import math
import tomllib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from titanlite.base.errors import TitanliteError
from titanlite.base.files import check_regular, open_regular, parse_json, read_json, read_regular

METRICS, EXPERT_LOAD, EVENTS = "metrics.jsonl", "expert_load.jsonl", "events.jsonl"
CONFIG, ENVIRONMENT, PLAN, LOG = "config.toml", "environment.json", "plan.json", "log.txt"
_MOST_WARNINGS = 200
_LAST_TIME_S = 2**36  # in the year 4147; the clock's functions refuse others
_LARGEST = 2**53  # a float holds whole numbers below exactly


@dataclass
class Series:
    """Values of one metric over increasing steps: numbers, or arrays per layer or rank; nan where not finite."""

    steps: array = field(default_factory=lambda: array("q"))
    values: Any = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: Any) -> None:
        self.steps.append(step)
        self.values.append(value)

    def drop_from(self, step: int) -> None:
        """Forget the points from `step` on: a resumed run has done these steps again."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()


@dataclass
class Run:
    """One run."""

    folder: Path
    scalars: dict[str, Series] = field(default_factory=dict)  # metrics by name
    lists: dict[str, Series] = field(default_factory=dict)  # those with one value per MoE layer or per rank
    first_layer: int = 0  # of the MoE layers
    layers: list[int] = field(default_factory=list)  # all of them, if others are between
    examples: list[Mapping[str, Any]] = field(default_factory=list)  # generations of the last evaluation
    examples_step: int = 0
    loads: list[tuple[int, list[list[int]]]] = field(default_factory=list)  # tokens per expert: step, rows
    events: list[Mapping[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    begin: float = 0.0  # Unix seconds of the first line
    end: float = 0.0
    problems: list[str] = field(default_factory=list)  # sentences on what could not be read

    @property
    def name(self) -> str:
        return self.folder.name


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Broken lines are left out and named in `problems`, except a torn last one, which a killed run leaves. Where a
    resumed run did steps again, the later lines count, and earlier ones of later steps are dropped.

    Raises:
        TitanliteError: there is no such folder, it is no run, or no training step was logged.
    """
    folder = folder.expanduser().resolve()
    path = folder / METRICS
    if not path.exists():
        raise TitanliteError(f"report: {_why_no_run(folder)}")
    try:
        check_regular(path)
    except OSError as error:
        raise TitanliteError(f"report: cannot read {path}: {error.strerror}. Give the folder of a run.") from None
    run = read_metrics(path)
    if "loss/train" not in run.scalars:
        broken = "".join(f"; {problem.rstrip('.')}" for problem in run.problems[:3])
        raise TitanliteError(
            f"report: {path} has no logged step yet. Wait for its first log step (metrics.log_freq), or look at "
            f"its log for an error{broken}."
        )
    _read_load(run)
    run.events = [event for event in _read_lines(folder / EVENTS, run.problems) if _is_event(event)]
    run.config = dict(
        _flatten(
            "", _read_table(folder / CONFIG, run.problems, lambda path: tomllib.loads(read_regular(path).decode()))
        )
    )
    run.environment = _read_table(folder / ENVIRONMENT, run.problems, read_json)
    run.plan = _read_table(folder / PLAN, run.problems, read_json)
    try:
        if (folder / LOG).exists():
            with open_regular(folder / LOG, "r", encoding="utf-8", errors="replace") as file:
                found = (line.rstrip("\n") for line in file if " WARNING " in line or " ERROR " in line)
                run.warnings = list(deque(found, _MOST_WARNINGS))
    except OSError as error:
        run.problems.append(f"{LOG} cannot be read: {error.strerror}.")
    return run


def read_metrics(path: Path) -> Run:
    """Read the run of a `metrics.jsonl`, without the other files of its folder; leaves out lines as `read_run` does."""
    run = Run(path.parent)
    for line in _read_lines(path, run.problems):
        try:
            _add(run, line)
        except (TypeError, ValueError, OverflowError) as error:
            run.problems.append(f"{path.name}: a line has values of another kind and is left out ({error}).")
    for metrics in (run.scalars, run.lists):
        for name in [name for name, series in metrics.items() if not series.steps]:
            del metrics[name]  # a resumed run dropped all of its points
    return run


def _why_no_run(folder: Path) -> str:
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    remedy = (
        f"It holds runs: {', '.join(inside[:8])}. Give one of them." if inside else "Give the job.dump_folder of a run."
    )
    return f"{folder} is no run, there is no {METRICS} in it. {remedy}"


def _read_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, those that are broken named in `problems`."""
    broken: list[int] = []
    number = 0
    if not path.exists():
        return
    try:
        with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = parse_json(text)
                except ValueError:
                    line = None
                if isinstance(line, dict):
                    yield line
                elif text.endswith("\n"):  # else the writer was killed in the middle of it
                    broken.append(number)
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}.")
    if broken:
        shown = ", ".join(map(str, broken[:8])) + (", ..." if len(broken) > 8 else "")
        problems.append(f"{path.name}: {len(broken)} of {number} lines are broken and skipped (line {shown}).")


def _add(run: Run, line: Mapping[str, Any]) -> None:
    step = line.get("step")
    if not is_count(step):
        run.problems.append(f"{METRICS}: a line without a step is left out.")
        return
    time = line.get("time")
    if isinstance(time, int | float):
        run.begin, run.end = run.begin or float(time), float(time)
    _drop_redone(run, line, step)
    for name, value in line.items():
        if name in ("step", "time"):
            continue
        if name == "eval/examples":
            run.examples, run.examples_step = [example for example in value if isinstance(example, dict)], step
        elif name == "moe/first_layer":
            run.first_layer = int(value)
        elif name == "moe/layers":
            run.layers = [int(number) for number in value]
        elif isinstance(value, list):
            run.lists.setdefault(name, Series(values=[])).add(step, array("f", map(_number, value)))
        elif value is None or isinstance(value, int | float):
            run.scalars.setdefault(name, Series()).add(step, _number(value))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _drop_redone(run: Run, line: Mapping[str, Any], step: int) -> None:
    """Drop the later points if `step` comes again, or an earlier one: the run was resumed before it."""
    # All values of a line go together, so one of them tells.
    name = next((name for name in line if name not in ("step", "time")), "")
    series = run.scalars.get(name) or run.lists.get(name)
    if series is None or not series.steps or series.steps[-1] < step:
        return
    of_training = "loss/train" in line
    for other in (*run.scalars.values(), *run.lists.values()):
        other.drop_from(step if of_training else step + 1)
    series.drop_from(step)


def _read_load(run: Run) -> None:
    for line in _read_lines(run.folder / EXPERT_LOAD, run.problems):
        step, rows = line.get("step"), line.get("tokens_per_expert")
        if not is_count(step) or not _are_counts(rows):
            continue
        while run.loads and run.loads[-1][0] >= step:
            run.loads.pop()
        run.loads.append((step, rows))
        first = line.get("first_layer")
        run.first_layer = first if isinstance(first, int) else run.first_layer


def _is_event(event: Mapping[str, Any]) -> bool:
    time = event.get("time", 0)
    return "kind" in event and isinstance(time, int | float) and 0 <= time < _LAST_TIME_S


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether `value` can be a step or a number of tokens."""
    return type(value) is int and 0 <= value < _LARGEST


def _are_counts(rows: Any) -> TypeGuard[list[list[int]]]:
    if not isinstance(rows, list) or not rows:
        return False
    return all(isinstance(row, list) and row and all(map(is_count, row)) for row in rows)


def _read_table(path: Path, problems: list[str], read: Callable[[Path], Any]) -> dict[str, Any]:
    try:
        found = read(path) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}.")
        found = {}
    return found if isinstance(found, dict) else {}


def _flatten(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
