"""`python -m titanlite report RUN`: one self-contained HTML page on a run, from the files in its folder.

Style, scripts, plots and tables are inside, and nothing is loaded from anywhere: a content security policy allows no
connection, and no script except the page's own, by digest. Whatever comes from a run is escaped as well.
"""

import base64
import hashlib
import importlib.util
import itertools
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from titanlite.base.errors import TitanliteError
from titanlite.base.files import replace_file
from titanlite.base.text import Parser, command, format_memory
from titanlite.config.settings import find_setting, format_value
from titanlite.features.report.read import CONFIG, ENVIRONMENT, PLAN, Run, Series, read_run

if TYPE_CHECKING:
    from titanlite.features.report.plots import Plot

# Section -> its plots; those whose names start with other_ follow in the first one.
_SECTIONS = {
    "Learning": ("loss", "rewards", "accuracy", "logps", "validation", "evaluation", "lr", "grad_norm", "grad_groups"),
    "Speed": ("throughput", "mfu", "padding", "time", "busy", "ranks", "memory"),
    "Experts": ("expert_load",),
}
_MOST_EVENTS, _MOST_TENSORS, _MOST_TILES = 500, 400, 7
_STARTS, _ENDS = ("start", "resume", "restart"), ("end", "stop", "error")
# The slider of the expert load; and on a touch screen a finger scrolls the page, until a tool is chosen.
_SCRIPT = """
for (const input of document.querySelectorAll("input[type=range]")) input.addEventListener("input", () => {
  const step = JSON.parse(input.dataset.steps)[input.value];
  input.nextElementSibling.textContent = `step ${step.toLocaleString("en")}`;
  for (const doc of Bokeh.documents) doc.get_model_by_name("frame").indices = [Number(input.value)];
});
const touched = matchMedia("(pointer: coarse)").matches && setInterval(() => {
  if (!Bokeh.documents.length || !Bokeh.documents[0].is_idle) return;
  clearInterval(touched);
  for (const plot of Bokeh.documents[0].roots()) plot.toolbar.tools[0].active = false;
}, 50);
"""


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the page; exit code 0, or 2 after one clear error."""
    parser = Parser(
        "report",
        "Write one HTML page on a run: plots, expert load, ranks, plan, configuration, environment, "
        "events. It loads nothing from a network, so it can be mailed or kept with the run. Needs bokeh: "
        "pip install 'bokeh>=3.9'.",
    )
    parser.add_argument("run", type=Path, help="folder of the run (job.dump_folder)")
    parser.add_argument("--output", type=Path, help="file to write (default: report.html in the run's folder)")
    known = parser.parse_args(argv)
    output = known.output or known.run / "report.html"
    if importlib.util.find_spec("bokeh") is None:
        raise TitanliteError(
            f"report: the plots need bokeh, and {sys.executable} has no package 'bokeh'. Install it, the extra "
            f"titanlite[report]: `{sys.executable} -m pip install 'bokeh>=3.9'`."
        )
    run = read_run(known.run)
    page = render_page(run, output.resolve().parent)
    try:
        replace_file(output, page)
    except OSError as error:
        raise TitanliteError(
            f"report: cannot write {output}: {error.strerror or error}. Choose another file with --output."
        ) from error
    for problem in run.problems:
        print(f"titanlite: warning: {run.name}: {problem}", file=sys.stderr)
    print(f"{output} ({len(page.encode()) / 1024:,.0f} KiB)")


def render_page(run: Run, folder: Path | None = None) -> str:
    """Return the page of a run, for a file in `folder`; left out: the run's."""
    from bokeh.embed import components  # after `main` has found the package
    from bokeh.resources import Resources

    from titanlite.features.report.plots import THEME, build_plots

    plots = build_plots(run)
    scripts = [*Resources(mode="inline", components=["bokeh"], log_level="error").js_raw]
    places: dict[str, str] = {}
    if plots:
        script, places = components({name: plot.figure for name, plot in plots.items()}, wrap_script=False, theme=THEME)
        scripts += [script, _SCRIPT]
    digests = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {digests}"
    figures = {name: _figure(name, plot, places[name]) for name, plot in plots.items()}
    sections = {title: body for title, body in _sections(run, figures).items() if body}
    links = "".join(f'<a href="#{title.lower()}">{title}</a>' for title in sections)
    body = "\n".join(
        f'<section><h2 id="{title.lower()}">{title}</h2>{text}</section>' for title, text in sections.items()
    )
    style = files("titanlite.features.report").joinpath("page.css").read_text(encoding="utf-8")
    description = escape(str(run.config.get("job.description", "")))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.name)} - training report</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header>
<h1>{escape(run.name)}</h1>
{description and f"<p>{description}</p>"}
<p class="status">{escape(describe_end(run))}</p>
{_tiles(get_headline(run))}
{_checkpoint(run, folder or run.folder)}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>
{body}
</main>
<footer>Written by titanlite on {time.strftime("%Y-%m-%d %H:%M")} from {escape(str(run.folder))}.</footer>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def _figure(name: str, plot: "Plot", place: str) -> str:
    note = plot.note and f"<p>{escape(plot.note)}</p>"
    wide = ' class="wide"' if name == "expert_load" else ""
    figure = f'<figure id="plot-{name}"{wide}><figcaption>{escape(plot.title)}{note}</figcaption>{place}'
    if len(plot.frames) > 1:
        last = len(plot.frames) - 1
        slider = f'<input type="range" max="{last}" value="{last}" aria-label="step" data-steps="{list(plot.frames)}">'
        figure += f'<div class="slider">{slider}<output>step {plot.frames[-1]:,}</output></div>'
    return f"{figure}</figure>"


def _tiles(tiles: Sequence[tuple[str, str, str]]) -> str:
    """Split the tiles into rows of nearly equal length; CSS stretches those of a shorter one."""
    columns = -(-len(tiles) // -(-len(tiles) // _MOST_TILES))
    cells = [f"<dt>{escape(a)}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd>" for a, b, c in tiles]
    return f'<dl class="tiles" style="--columns: {columns}"><div>{"</div><div>".join(cells)}</div></dl>'


def _checkpoint(run: Run, page_folder: Path) -> str:
    """Link the newest checkpoint, with how to load it; empty without one."""
    saved = run.folder / str(run.config.get("checkpoint.folder", "checkpoint"))
    steps = [int(path.name[5:]) for path in saved.glob("step-*") if path.name[5:].isdecimal()]
    if not steps:
        return ""
    folder = saved / f"step-{max(steps)}"
    link = escape(quote(os.path.relpath(folder, page_folder)))
    library, kind = "transformers", "AutoModelForCausalLM"
    if (folder / "adapter_config.json").exists():
        library, kind = "peft", "AutoPeftModelForCausalLM"
    elif run.config.get("data.dataset") == "images":
        kind = "AutoModelForImageTextToText"
    text = f"""from {library} import {kind}
model = {kind}.from_pretrained({str(folder)!r})

python -m titanlite generate {shlex.quote(str(folder))} --prompt TEXT"""
    name = f'Newest checkpoint: <a href="{link}/">{folder.name}</a>, and how to load it'
    return f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>"


def _sections(run: Run, figures: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for title, names in _SECTIONS.items():
        wanted = names + tuple(name for name in figures if name.startswith("other_") and title == "Learning")
        shown = "".join(figures[name] for name in wanted if name in figures)
        found[title] = f'<div class="plots">{shown}</div>' if shown else ""
    if run.examples:
        names = ("prompt", "prediction", "reference", "score")
        rows = [[example.get(name, "") for name in names] for example in run.examples]
        table = _table(["prompt", "generated", "wanted", "score"], rows, "text text text number")
        found["Generations"] = _note(f"Step {run.examples_step:,}.") + table
    for name, render in ((PLAN, _plan), (CONFIG, _config), (ENVIRONMENT, _environment)):
        title = {CONFIG: "Configuration"}.get(name, name.partition(".")[0].title())
        try:
            found[title] = render(run)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            run.problems.append(f"{name} is left out, because it has values of another kind ({error}).")
    texts = "".join(f"<li>{escape(text)}</li>" for text in (*run.problems, *run.warnings))
    found["Warnings"] = f'<ul class="warnings">{texts}</ul>' if texts else _note("None.")
    found["Events"] = _events(run)
    return found


def _note(text: str) -> str:
    return f'<p class="none">{escape(text)}</p>'


def get_headline(run: Run) -> list[tuple[str, str, str]]:
    """Return the numbers that a reader wants first, where the run has them: label, value with unit, remark or ""."""
    steps, total = run.scalars["loss/train"].steps, run.config.get("training.steps")
    found = [("Steps", f"{steps[-1]:,}", f"of {total:,}" if isinstance(total, int) else "")]
    for name, label, form in (
        ("loss/train", "Training loss", "{:.4f}"),
        ("rewards/accuracy", "DPO accuracy", "{:.0%}"),
        ("rewards/margin", "DPO margin", "{:.3f}"),
    ):
        if recent := _finite(run, name, max(1, len(steps) // 10)):
            detail = f"mean of the last {len(recent)} points" if len(recent) > 1 else ""
            found.append((label, form.format(sum(recent) / len(recent)), detail))
    for name, series in run.scalars.items():
        if name == "loss/validation":
            found.append(("Validation loss", f"{series.values[-1]:.4f}", _best(series, min)))
        elif name.startswith("eval/") and name not in ("eval/ended", "eval/seconds"):
            label = f"Evaluation: {name[5:].replace('_', ' ')}"
            found.append((label, f"{series.values[-1]:.4f}", _best(series, max)))
    if rates := _finite(run, "throughput/tokens_per_s"):
        detail = f"median; {median(rates) / max(int(run.environment.get('world_size', 1)), 1):,.0f} per rank"
        found.append(("Tokens per second", f"{median(rates):,.0f}", detail))
    if shares := _finite(run, "throughput/mfu"):
        found.append(("MFU", f"{100 * median(shares):.1f} %", "median"))
    elif rates := _finite(run, "throughput/tflops_per_gpu"):
        found.append(("Model FLOP/s", f"{median(rates):.3g} TFLOP/s", "median, per rank"))
    if sizes := _finite(run, "memory/max_reserved_gib"):
        found.append(("Peak memory", f"{max(sizes):.2f} GiB", "reserved on the fullest GPU"))
    elif sizes := _finite(run, "memory/host_peak_rss_gib"):
        found.append(("Peak memory", f"{max(sizes):.2f} GiB", "of the fullest rank on the host"))
    times = run.scalars.get("time/step_s", Series())
    # A point has the mean over the steps since the last one.
    spans = zip(times.steps, [0, *times.steps], times.values, strict=False)
    if seconds := sum((step - before) * value for step, before, value in spans if math.isfinite(value)):
        whole = f"{_duration(run.end - run.begin)} from first to last point" if run.end > run.begin else ""
        found.append(("Time in steps", _duration(seconds), whole))
    return found


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _finite(run: Run, name: str, last: int = 0) -> list[float]:
    return [value for value in run.scalars.get(name, Series()).values[-last:] if math.isfinite(value)]


def _best(series: Series, choose: Callable[..., tuple[float, int] | None]) -> str:
    """Value and step that `choose`, min or max, takes of those that are finite; empty if none is."""
    points = ((value, step) for value, step in zip(series.values, series.steps, strict=True) if math.isfinite(value))
    best = choose(points, default=None)
    return "" if best is None else f"best {best[0]:.4f} at step {best[1]:,}"


def describe_end(run: Run) -> str:
    """Return how the run ended, or that it has not."""
    step = run.scalars["loss/train"].steps[-1]
    last = next((event for event in reversed(run.events) if event.get("kind") in _ENDS + _STARTS), {})
    text = str(last.get("text", ""))
    if last.get("kind") == "error":
        return f"Ended with an error at step {last.get('step', step)}: {text}."
    if last.get("kind") in _ENDS:
        return f"{text[:1].upper()}{text[1:]}."
    if not run.events:
        return f"Last point at step {step:,}."
    return f"No end recorded: it is running, or it was killed. Last point at step {step:,}, {_when(run.end)[:-3]}."


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], classes: str, marked: Iterable[Any] = ()) -> str:
    """Return a table; `classes` of its columns, separated by blanks; `marked` rows stand out."""
    kinds, marks = [f' class="{kind}"' for kind in classes.split()], list(marked)
    head = "".join(f"<th{kind}>{escape(text)}</th>" for text, kind in zip(header, kinds, strict=True))
    body = []
    for row, mark in itertools.zip_longest(rows, marks):
        cells = "".join(f"<td{kind}>{escape(str(value))}</td>" for value, kind in zip(row, kinds, strict=True))
        body.append(f"<tr{' class=changed' if mark else ''}>{cells}</tr>")
    head = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f'<div class="scroll"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _plan(run: Run) -> str:
    if not run.plan:
        return ""
    sizes = dict(run.plan.get("memory") or {})
    if isinstance(run.plan.get("read_bytes"), int):
        sizes["read from checkpoints"] = run.plan["read_bytes"]
    memory = _table(["", ""], [(name, format_memory(float(size))) for name, size in sizes.items()], "name number")
    tensors = [tensor for tensor in run.plan.get("tensors", []) if isinstance(tensor, dict)]
    rows = [
        (
            *(tensor.get(key, "") for key in ("name", "count", "placement", "source")),
            "x".join(map(str, tensor.get("shape", []))),
            str(tensor.get("dtype", "")).removeprefix("torch."),
            format_memory(float(tensor.get("local_bytes", 0))),
        )
        for tensor in tensors[:_MOST_TENSORS]
    ]
    header = ["tensor", "count", "placement", "source", "shape", "dtype", "on this rank"]
    table = _table(header, rows, "code number code text code code number")
    more = _note(f"{len(tensors) - len(rows)} more are in plan.json.") if len(tensors) > len(rows) else ""
    where = _note(f"Rank {run.plan.get('rank', 0)} of {run.plan.get('world_size', 1)}.")
    return f"{where}{memory}<details><summary>Tensors</summary>{table}{more}</details>"


def _config(run: Run) -> str:
    if not run.config:
        return _note("There is no config.toml.")
    rows = []
    for key, value in run.config.items():
        known = find_setting(key)
        default = "unknown to this version" if known is None else f"default {_show(known.default)}"
        rows.append((key, _show(value), default if known is None or value != known.default else ""))
    short = [row for row in rows if row[2]]
    table = _table(["changed setting", "value", ""], short, "code code text") if short else ""
    whole = _table(["setting", "value", ""], rows, "code code text", [row[2] for row in rows])
    return f"{table}<details><summary>All {len(rows)} settings</summary>{whole}</details>"


def _show(value: Any) -> str:
    return "unset" if value is None else format_value(value)


def _environment(run: Run) -> str:
    rows: list[tuple[str, str]] = []
    for name, value in run.environment.items():
        label = name.replace("_", " ")
        if name == "machines" and isinstance(value, dict):
            for host, machine in value.items():
                devices = ", ".join(f"{count} x {kind}" for kind, count in dict(machine.get("devices", {})).items())
                ranks = list(machine.get("ranks", []))
                rows.append(("machine", f"{host}: {devices}" + (f", ranks {ranks[0]} to {ranks[-1]}" if ranks else "")))
        elif isinstance(value, dict):
            rows.append((label, ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)))
        elif name in ("parameters", "trained") and isinstance(value, int):
            rows.append((label, f"{value:,}"))
        elif value is not None:
            rows.append((label, str(value)))
    return _table(["", ""], rows, "name text") if rows else _note("There is no environment.json.")


def _events(run: Run) -> str:
    events = run.events[-_MOST_EVENTS:]
    rows = [(_when(event.get("time")), *(event.get(name, "") for name in ("step", "kind", "text"))) for event in events]
    left = len(run.events) - len(events)
    if not rows:
        return _note("None recorded.")
    more = _note(f"{left} earlier ones are in events.jsonl.") if left else ""
    return more + _table(["time", "step", "kind", ""], rows, "time number name text")


def _when(seconds: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if isinstance(seconds, int | float) else ""
