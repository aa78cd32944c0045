"""What a run left in its folder, read for the report. No torch, and no values kept that no plot shows.

A run of 100,000 steps has as many lines, so values go into arrays, one per metric name, and not into dictionaries.
"""

import tomllib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from titanlite.base.errors import TitanliteError
from titanlite.base.files import check_regular, open_regular, parse_json, read_json, read_regular

METRICS, EXPERT_LOAD, EVENTS = "metrics.jsonl", "expert_load.jsonl", "events.jsonl"
CONFIG, ENVIRONMENT, PLAN, LOG = "config.toml", "environment.json", "plan.json", "log.txt"
_MOST_WARNINGS = 200
_NAN = float("nan")
_LAST_TIME_S = 2**36  # in the year 4147; the clock's functions refuse others


@dataclass
class Series:
    """Values of one metric over steps; nan where a value was not finite. Lists have one row per step.

    Attributes:
        steps: increasing.
        values: numbers, or arrays of numbers per layer or rank.
    """

    steps: array = field(default_factory=lambda: array("q"))
    values: Any = field(default_factory=lambda: array("d"))

    def drop_from(self, step: int) -> None:
        """Forget the points from `step` on: a resumed run has done these steps again."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    @property
    def last(self) -> Any:
        return self.values[-1]


@dataclass
class Run:
    """One run.

    Attributes:
        folder: its dump folder.
        scalars: by metric name.
        lists: metrics with one value per MoE layer or per rank, by name.
        first_layer: layer of the first value of lists per layer.
        layers: layers of all of them, if others lie between.
        slow_reasons: why the slowest rank was slow, (step, reason).
        examples: generations of the last evaluation.
        loads: tokens per expert, (step, rows), oldest first.
        begin, end: Unix seconds of the first and the last line.
        problems: what could not be read, in sentences.
    """

    folder: Path
    scalars: dict[str, Series] = field(default_factory=dict)
    lists: dict[str, Series] = field(default_factory=dict)
    first_layer: int = 0
    layers: list[int] = field(default_factory=list)
    slow_reasons: list[tuple[int, str]] = field(default_factory=list)
    examples: list[Mapping[str, Any]] = field(default_factory=list)
    examples_step: int = 0
    loads: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Lines that are no JSON are left out and named in `problems`, but for a torn last one, which a killed run leaves.
    Where a resumed run did steps again, the later lines count, and earlier ones of later steps are gone.

    Raises:
        TitanliteError: there is no such folder, it is no run, or there is no point of training in it.
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
        raise TitanliteError(
            f"report: {path} has no point of training yet. Wait for its first log step (metrics.log_freq), or look at "
            f"its log for an error{_list(run.problems)}."
        )
    _read_load(run)
    run.events = [event for event in _read_lines(folder / EVENTS, run.problems) if _is_event(event)]
    run.config = _read_toml(folder / CONFIG, run.problems)
    run.environment = _read_json(folder / ENVIRONMENT, run.problems) or {}
    run.plan = _read_json(folder / PLAN, run.problems)
    _read_log(run)
    return run


def _read_log(run: Run) -> None:
    path = run.folder / LOG
    if not path.exists():
        return
    try:
        with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
            found = (line.rstrip("\n") for line in file if " WARNING " in line or " ERROR " in line)
            run.warnings = list(deque(found, _MOST_WARNINGS))
    except OSError as error:
        run.problems.append(f"{path.name} cannot be read: {error.strerror}.")


def read_metrics(path: Path) -> Run:
    """The run of a `metrics.jsonl`, without what the files beside it say; lines are left out as in `read_run`."""
    run = Run(path.parent)
    for line in _read_lines(path, run.problems):
        try:
            _add(run, line)
        except (TypeError, ValueError, OverflowError) as error:
            run.problems.append(f"{path.name}: a line has values of another kind and is left out ({error}).")
    return run


def _why_no_run(folder: Path) -> str:
    if not folder.exists():
        return f"there is no folder {folder}. Give the job.dump_folder of a run."
    if not folder.is_dir():
        return f"{folder} is a file. Give the job.dump_folder of a run."
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    hint = (
        f"It holds runs: {', '.join(inside[:8])}. Give one of them." if inside else "Give the job.dump_folder of a run."
    )
    return f"{folder} is no run, there is no {METRICS} in it. {hint}"


def _list(problems: Sequence[str]) -> str:
    return "".join(f"; {problem.rstrip('.')}" for problem in problems[:3])


def _read_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, those that are broken named in `problems`."""
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
        problems.append(f"{path.name}: {len(broken)} of {number} lines are broken and left out (line {shown}).")


def _add(run: Run, line: Mapping[str, Any]) -> None:
    """Take one line of `metrics.jsonl`."""
    step = line.get("step")
    if not isinstance(step, int):
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
        elif name == "ranks/slowest_reason":
            run.slow_reasons.append((step, str(value)))
        elif name == "moe/first_layer":
            run.first_layer = int(value)
        elif name == "moe/layers":
            run.layers = [int(number) for number in value]
        elif isinstance(value, list):
            series = run.lists.get(name)
            if series is None:
                series = run.lists[name] = Series(values=[])
            series.steps.append(step)
            series.values.append(_numbers(value))
        elif value is None or isinstance(value, int | float):
            series = run.scalars.get(name)
            if series is None:
                series = run.scalars[name] = Series()
            series.steps.append(step)
            series.values.append(_NAN if value is None else value)


def _numbers(values: Sequence[Any]) -> array:
    try:
        return array("f", values)
    except TypeError:  # null, or worse
        return array("f", [_number(value) for value in values])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else _NAN


def _drop_redone(run: Run, line: Mapping[str, Any], step: int) -> None:
    """A step that comes again, or an earlier one, means that the run was resumed before it."""
    # All values of a line go together, so one of them tells.
    name = next((name for name in line if name not in ("step", "time")), "")
    series = run.scalars.get(name) or run.lists.get(name)
    if series is None or not series.steps or series.steps[-1] < step:
        return
    of_training = "loss/train" in line
    for other in (*run.scalars.values(), *run.lists.values()):
        other.drop_from(step if of_training else step + 1)
    series.drop_from(step)
    run.slow_reasons = [(s, reason) for s, reason in run.slow_reasons if s < step]


def _read_load(run: Run) -> None:
    for line in _read_lines(run.folder / EXPERT_LOAD, run.problems):
        step, rows = line.get("step"), line.get("tokens_per_expert")
        if not isinstance(step, int) or not _are_counts(rows):
            continue
        while run.loads and run.loads[-1][0] >= step:
            run.loads.pop()
        run.loads.append((step, rows))
        first = line.get("first_layer")
        run.first_layer = first if isinstance(first, int) else run.first_layer


def _is_event(event: Mapping[str, Any]) -> bool:
    time = event.get("time", 0)
    return "kind" in event and isinstance(time, int | float) and 0 <= time < _LAST_TIME_S


def _are_counts(rows: Any) -> TypeGuard[list[list[int]]]:
    return (
        isinstance(rows, list)
        and len(rows) > 0
        and all(isinstance(row, list) and row and all(type(count) is int for count in row) for row in rows)
    )


def _read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}.")
        return None
    return found if isinstance(found, dict) else None


def _read_toml(path: Path, problems: list[str]) -> dict[str, Any]:
    """The settings by dotted key."""
    if not path.exists():
        return {}
    try:
        table = dict(_flatten("", tomllib.loads(read_regular(path).decode("utf-8"))))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}.")
        return {}
    return table


def _flatten(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
