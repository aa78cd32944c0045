"""One self-contained HTML page: style, script and data inside, nothing loaded from anywhere.

A content security policy holds the browser to that: no connection is allowed, and no script but the page's own, by its
digest. So a text of a run could do nothing even if it were not escaped.
"""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files

from titanlite.features.report import tables
from titanlite.features.report.charts import Chart, build_charts
from titanlite.features.report.headline import compare_headlines, describe_end, get_headline
from titanlite.features.report.read import CONFIG, ENVIRONMENT, PLAN, Run

# Section -> its plots, by name; those that start with other_ follow the last of the first section.
_SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("learning", "Learning", ("loss", "validation", "lr", "grad_norm", "grad_groups")),
    ("speed", "Speed", ("throughput", "mfu", "padding", "time", "busy", "ranks", "memory")),
    ("experts", "Experts", ("expert_load", "layer_load", "entropy", "bias", "lost_rows")),
    ("evaluation", "Evaluation", ("evaluation",)),
)
_WIDE = ("expert_load", "layer_load")


def render_page(runs: Sequence[Run]) -> str:
    """The page of the first run, compared with the others."""
    run, charts = runs[0], build_charts(runs)
    sections = [(name, title, body) for name, title, body in _sections(runs, charts) if body]
    script, style = (
        files("titanlite.features.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.js", "page.css")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    description = str(run.config.get("job.description", ""))
    written = time.strftime("%Y-%m-%d %H:%M")
    data = json.dumps([_data(chart) for chart in charts], allow_nan=False, separators=(",", ":"))
    body = "\n".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{text}</section>'
        for name, title, text in sections
    )
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
{f"<p>{escape(description)}</p>" if description else ""}
<p class="status">{escape(describe_end(run))}</p>
{_tiles(run)}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>
{body}
</main>
<footer>Written by titanlite on {written} from {escape(str(run.folder))}.</footer>
<script type="application/json" id="charts">{data.replace("<", chr(92) + "u003c")}</script>
<script>{script}</script>
</body>
</html>
"""


def _data(chart: Chart) -> dict[str, object]:
    return {key: value for key, value in asdict(chart).items() if key != "note"}


def _tiles(run: Run) -> str:
    tiles = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(text)}{detail and f'<small>{escape(detail)}</small>'}</dd></div>"
        for label, text, detail in get_headline(run)
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _sections(runs: Sequence[Run], charts: Sequence[Chart]) -> list[tuple[str, str, str]]:
    run, found = runs[0], []
    if len(runs) > 1:
        labels, columns = compare_headlines(runs)
        header = ["", *(other.name for other in runs)]
        rows = [[label, *(column[i] for column in columns)] for i, label in enumerate(labels)]
        body = tables.render_table(header, rows, ["name"] + ["number"] * len(runs))
        found.append(("comparison", "Comparison", body + tables.render_config_differences(runs)))
    by_name = {chart.name: chart for chart in charts}
    others = tuple(name for name in by_name if name.startswith("other_"))
    for name, title, plots in _SECTIONS:
        wanted = plots + (others if name == "learning" else ())
        body = "".join(_figure(by_name[plot]) for plot in wanted if plot in by_name)
        body = f'<div class="plots">{body}</div>' if body else ""
        if name == "experts" and body:
            body = f'<p class="none">{escape(_lost_rows(run))}</p>{body}'
        if name == "evaluation":
            body += tables.render_examples(run)
        found.append((name, title, body))
    return [
        *found,
        ("plan", "Plan", _render(run, PLAN, tables.render_plan)),
        ("configuration", "Configuration", _render(run, CONFIG, tables.render_config)),
        ("environment", "Environment", _render(run, ENVIRONMENT, tables.render_environment)),
        ("warnings", "Warnings", tables.render_warnings(run)),
        ("events", "Events", tables.render_events(run)),
    ]


def _render(run: Run, name: str, render: Callable[[Run], str]) -> str:
    """A section from a file with values of any kind."""
    try:
        return render(run)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        run.problems.append(f"{name} is left out, for it has values of another kind ({error}).")
        return ""


def _figure(chart: Chart) -> str:
    unit = f" <span>({escape(chart.unit)})</span>" if chart.unit else ""
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    wide = ' class="wide"' if chart.name in _WIDE else ""
    return f'<figure id="plot-{chart.name}"{wide}><figcaption>{escape(chart.title)}{unit}{note}</figcaption></figure>'


def _lost_rows(run: Run) -> str:
    """Whether the dispatcher brought every row to its expert once, in words."""
    names = ("moe/dropped_rows", "moe/duplicated_rows")
    if not all(name in run.lists for name in names):
        return ""
    dropped, twice = (sum(sum(row) for row in run.lists[name].values) for name in names)
    if not dropped and not twice:
        return "Every row that a router chose reached its expert once: none was dropped or duplicated in any step."
    rows = f"{dropped:,.0f} rows were dropped and {twice:,.0f} duplicated"
    return f"{rows} on the way to their experts: the token dispatcher is broken."
