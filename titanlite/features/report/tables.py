"""The parts of a report that are text: plan, configuration, environment, events, warnings, generations. As HTML.

Whatever comes from a run is escaped: a name or a generated text must not become markup.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from titanlite.config.check import format_value
from titanlite.config.settings import find_setting
from titanlite.features.report.headline import format_bytes, format_count
from titanlite.features.report.read import Run

_MOST_EVENTS = 500
_MOST_TENSORS = 400


def render_table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    classes: Sequence[str],
    marked: Iterable[bool] = (),
    *,
    narrow: bool = False,
) -> str:
    """A table; `classes` of its columns, `marked` rows stand out, `narrow` ones are as wide as their text."""
    marks = list(marked)
    lines = [f'<div class="scroll"><table{_class("narrow" if narrow else "")}>']
    if any(header):
        cells = "".join(
            f'<th scope="col"{_class("number" if kind == "number" else "")}>{escape(text)}</th>'
            for text, kind in zip(header, classes, strict=True)
        )
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    for index, row in enumerate(rows):
        cells = "".join(
            f"<td{_class(kind)}>{escape(str(value))}</td>" for value, kind in zip(row, classes, strict=True)
        )
        lines.append(f"<tr{_class('changed' if index < len(marks) and marks[index] else '')}>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def render_examples(run: Run) -> str:
    """Generations of the last evaluation."""
    if not run.examples:
        return ""
    rows = [
        (
            example.get("prompt", ""),
            example.get("prediction", ""),
            example.get("reference", ""),
            example.get("score", ""),
        )
        for example in run.examples
    ]
    table = render_table(["prompt", "generated", "wanted", "score"], rows, ["text", "text", "text", "number"])
    return f"<h3>Generations at step {run.examples_step:,}</h3>{table}"


def render_plan(run: Run) -> str:
    """Where every tensor comes from and lies, from plan.json."""
    plan = run.plan
    if plan is None:
        return ""
    memory = plan.get("memory")
    sizes = (
        [(str(name), format_bytes(float(size))) for name, size in memory.items()] if isinstance(memory, dict) else []
    )
    if isinstance(plan.get("read_bytes"), int):
        sizes.append(("read from checkpoints", format_bytes(plan["read_bytes"])))
    tensors = [tensor for tensor in plan.get("tensors", []) if isinstance(tensor, dict)]
    rows = [
        (
            tensor.get("name", ""),
            tensor.get("count", 1),
            "x".join(map(str, tensor.get("shape", []))),
            str(tensor.get("dtype", "")).removeprefix("torch."),
            tensor.get("placement", ""),
            tensor.get("source", ""),
            format_bytes(float(tensor.get("local_bytes", 0))),
        )
        for tensor in tensors[:_MOST_TENSORS]
    ]
    header = ["tensor", "count", "shape", "dtype", "placement", "source", "on this rank"]
    table = render_table(header, rows, ["code", "number", "code", "code", "code", "text", "number"])
    more = f'<p class="none">{len(tensors) - len(rows)} more are in plan.json.</p>' if len(tensors) > len(rows) else ""
    where = f"Rank {plan.get('rank', 0)} of {plan.get('world_size', 1)}."
    memory_table = render_table(["", ""], sizes, ["name", "number"], narrow=True)
    return f'<p class="none">{escape(where)}</p>{memory_table}{table}{more}'


def render_config(run: Run) -> str:
    """Settings that differ from their defaults, and all of them."""
    if not run.config:
        return '<p class="none">There is no config.toml.</p>'
    rows, changed = [], []
    for key, value in run.config.items():
        known = find_setting(key)
        default = None if known is None else known.default
        differs = known is None or value != default
        shown = "" if not differs else "unknown to this version" if known is None else f"default {_show(default)}"
        rows.append((key, _show(value), shown))
        changed.append(differs)
    of_run = [row for row, differs in zip(rows, changed, strict=True) if differs]
    classes = ["code", "code", "text"]
    short = render_table(["changed setting", "value", ""], of_run, classes) if of_run else ""
    whole = render_table(["setting", "value", ""], rows, classes, changed)
    return f"{short}<details><summary>All {len(rows)} settings</summary>{whole}</details>"


def render_config_differences(runs: Sequence[Run]) -> str:
    """Settings in which runs differ, side by side."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    rows = [
        [key, *(_show(run.config.get(key)) for run in runs)]
        for key in keys
        if any(run.config.get(key) != runs[0].config.get(key) for run in runs) and key != "job.dump_folder"
    ]
    if not rows:
        return '<p class="none">All settings are the same.</p>'
    return "<h3>Settings that differ</h3>" + render_table(
        ["setting", *(run.name for run in runs)], rows, ["code"] * (len(runs) + 1)
    )


def _show(value: Any) -> str:
    return "unset" if value is None else format_value(value)


def render_environment(run: Run) -> str:
    """Versions, machines, devices, commit and command."""
    if not run.environment:
        return '<p class="none">There is no environment.json.</p>'
    rows: list[tuple[str, str]] = []
    for name, value in run.environment.items():
        label = name.replace("_", " ")
        if name == "machines" and isinstance(value, dict):
            rows += [("machine", _machine(host, machine)) for host, machine in value.items()]
        elif isinstance(value, dict):
            rows.append((label, ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)))
        elif name in ("parameters", "trained") and isinstance(value, int):
            rows.append((label, f"{value:,} ({format_count(value)})"))
        elif value is not None:
            rows.append((label, str(value)))
    return render_table(["", ""], rows, ["name", "text"])


def _machine(host: str, machine: Mapping[str, Any]) -> str:
    devices = ", ".join(f"{count} x {name}" for name, count in dict(machine.get("devices", {})).items())
    ranks = list(machine.get("ranks", []))
    return f"{host}: {devices}, ranks {ranks[0]} to {ranks[-1]}" if ranks else f"{host}: {devices}"


def render_events(run: Run) -> str:
    """Resumes, saves, skipped steps and the like, the latest last."""
    if not run.events:
        return '<p class="none">None recorded.</p>'
    events = run.events[-_MOST_EVENTS:]
    rows = [
        (_when(event.get("time")), event.get("step", ""), event.get("kind", ""), event.get("text", ""))
        for event in events
    ]
    left = len(run.events) - len(events)
    more = f'<p class="none">{left} earlier ones are in events.jsonl.</p>' if left else ""
    return more + render_table(["time", "step", "kind", ""], rows, ["time", "number", "name", "text"])


def _when(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def render_warnings(run: Run) -> str:
    """Warnings of the log, and what of the run's files could not be read."""
    texts = [*run.problems, *run.warnings]
    if not texts:
        return '<p class="none">None.</p>'
    return f'<ul class="warnings">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'
