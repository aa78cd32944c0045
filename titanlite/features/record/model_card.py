"""The README.md of a checkpoint: what the model is, what it was trained on, how, and what came out.

Nothing in it depends on when or where the run took place, so that a resumed run writes the same. Local folders appear
by their last part only: a card is made to be published.
"""

import json
import math
import re
from pathlib import Path

from titanlite.base.files import read_regular
from titanlite.base.tables import format_count
from titanlite.checkpoint import Progress
from titanlite.config import JobConfig
from titanlite.config.assets import BaseModel, base_model_of, is_hub_id, public_name
from titanlite.config.check import format_value
from titanlite.config.data import get_sources
from titanlite.config.settings import get_sections_of, get_value
from titanlite.metrics.results import Results, Series

# These say where and how a run took place, not what the model is.
_LEFT_OUT = ("job", "metrics", "profiling", "comm")
_LEFT_OUT_KEYS = ("checkpoint.folder", "data.cache_folder", "checkpoint.push_to_hub")
_LICENSE = re.compile(r"(license|license_name|license_link):\s*(\S.*)")
_MOST_CARD_BYTES = 16 << 20
_QUOTES = "\"'"


def render_model_card(job: JobConfig, *, family: str, num_parameters: int, progress: Progress, results: Results) -> str:
    """Return the card as Markdown with the hub's YAML header; ends with a line break.

    Args:
        job: the configuration; what differs from the defaults is listed.
        family: Hugging Face model_type.
        num_parameters: of the whole model.
        progress: steps done, data order and versions.
        results: validation losses and evaluation scores.
    """
    base = base_model_of(job.checkpoint.initial_load_path)
    header = [*_header(base, job), *_license(job.checkpoint.initial_load_path)]
    header += _model_index(base.name if base is not None else family, job, results)
    lines = ["---", *header, "---", "", "# Model card", ""]
    origin = "trained from random weights" if base is None else f"trained from {_link(base)}"
    lines += [f"A `{family}` model with {num_parameters / 1e6:,.1f} M parameters, {origin} with titanlite.", ""]
    paths = "".join(f", `{public_name(path)}`" for path in _get_paths(job))
    lines += ["## Data", "", f"- dataset: `{job.data.dataset}`{paths}", f"- fingerprint: {progress.data}", ""]
    lines += [
        "## Results",
        "",
        f"After {progress.step} of {format_count(job.training.steps, 'step')}.",
        "",
        *_results(results),
        "",
    ]
    lines += [
        "## Configuration",
        "",
        "Settings that differ from the defaults:",
        "",
        "```toml",
        *_settings(job),
        "```",
        "",
    ]
    lines += ["## Versions", "", *(f"- {name} {version}" for name, version in sorted(progress.versions.items())), ""]
    return "\n".join(lines)


def _header(base: BaseModel | None, job: JobConfig) -> list[str]:
    """Return the hub's metadata. JSON strings are YAML strings."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- titanlite"]
    if base is not None and base.on_hub:
        lines.append(f"base_model: {json.dumps(base.name)}")
    names = [path.partition("@")[0] for path in _get_paths(job) if is_hub_id(path) and not Path(path).exists()]
    if names:
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in dict.fromkeys(names))]
    return lines


def _get_paths(job: JobConfig) -> list[str]:
    return [source.path for source in get_sources(job.data).values() if source.path]


def _license(folder: str) -> list[str]:
    """Return the license lines of the card of the model in `folder`: a model trained from it is bound by them."""
    path = Path(folder, "README.md")
    try:
        text = read_regular(path, _MOST_CARD_BYTES).decode("utf-8") if folder and path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return []
    parts = text.split("---\n", 2)
    if not text.startswith("---\n") or len(parts) < 3:
        return []
    # Only keys at the top level with a value on the same line, so that nothing else of the header can come along.
    found = (_LICENSE.fullmatch(line.rstrip()) for line in parts[1].splitlines())
    return [f"{match[1]}: {json.dumps(match[2].strip().strip(_QUOTES))}" for match in found if match]


def _model_index(name: str, job: JobConfig, results: Results) -> list[str]:
    """Return the latest results as the hub's metadata, which it shows beside the model."""
    held_out = [source.validation_path or source.path for source in get_sources(job.data).values()]
    evaluated = [job.evaluation.path] if job.evaluation.path else held_out
    measured = [("loss", results.validation, held_out), (results.evaluation.name, results.evaluation, evaluated)]
    rows = [(*row, row[1].last) for row in measured if row[1].last is not None and math.isfinite(row[1].last)]
    if not rows:
        return []
    lines = ["model-index:", f"- name: {json.dumps(name)}", "  results:"]
    for kind, series, paths, value in rows:
        dataset = json.dumps(", ".join(map(public_name, paths)) or job.data.dataset)
        lines += ["  - task:", "      type: text-generation", "    dataset:"]
        lines += [f"      type: {dataset}", f"      name: {dataset}", "    metrics:"]
        lines += [
            f"    - type: {json.dumps(kind)}",
            f"      value: {value!r}",
            f"      name: {json.dumps(series.name)}",
        ]
    return lines


def _link(base: BaseModel) -> str:
    if not base.on_hub:
        return f"`{base.name}`"
    return f"[{base.name}](https://huggingface.co/{base.name}) (revision `{base.revision[:12]}`)"


def _results(results: Results) -> list[str]:
    rows = [_row(series) for series in (results.validation, results.evaluation) if series.last_step >= 0]
    if not rows:
        return ["No validation or evaluation took place."]
    return ["| metric | first | last | best |", "|---|---|---|---|", *rows]


def _row(series: Series) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    best = f"{shown(series.best)} (step {series.best_step})" if series.best_step >= 0 else "-"
    return f"| {series.name} | {shown(series.first)} | {shown(series.last)} (step {series.last_step}) | {best} |"


def _settings(job: JobConfig) -> list[str]:
    lines: list[str] = []
    for section, settings in get_sections_of(job).items():
        if section.split(".")[0] in _LEFT_OUT:
            continue
        changed = []
        for setting in settings:
            value = get_value(job, setting.key)
            if setting.key not in _LEFT_OUT_KEYS and value is not None and value != setting.default:
                shown = public_name(value) if isinstance(value, str) else value
                changed.append(f"{setting.name} = {format_value(shown)}")
        if changed:
            lines += ["" if lines else None, f"[{section}]", *changed]  # type: ignore[list-item]
    return [line for line in lines if line is not None]
