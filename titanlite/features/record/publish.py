"""Publication of a run: metrics to Weights & Biases, and the model with its card to the Hugging
Face hub.
"""

import importlib
import json
import os
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from titanlite.base.agree import get_rank
from titanlite.base.errors import CheckpointError
from titanlite.base.files import read_regular, replace_file
from titanlite.base.log import logger
from titanlite.base.process import read_variable
from titanlite.base.text import describe_error, format_count
from titanlite.checkpoint import Progress
from titanlite.checkpoint.folder import CERTIFICATE_FILE, OWN_FOLDER
from titanlite.checkpoint.pieces import SIDECAR_FILE
from titanlite.config import JobConfig
from titanlite.config.assets import BaseModel, base_model_of, is_hub_id
from titanlite.config.data import get_sources
from titanlite.config.settings import format_value, get_sections_of, get_value
from titanlite.metrics.point import Results

# Sections that describe where and how a run took place, not the model.
_LEFT_OUT = ("job", "metrics", "profiling", "comm")
_LEFT_OUT_KEYS = ("checkpoint.folder", "data.cache_folder", "checkpoint.push_to_hub")
_LICENSE = re.compile(r"(license|license_name|license_link):\s*(\S.*)")
# lines of the header
_TAG = "- titanlite"
_DATASETS = "datasets:"
_QUOTES = "\"'"


def public_name(text: str) -> str:
    """Return `text` without private paths: a path on this machine becomes its last part, a path in
    the hub's cache becomes the id.
    """
    base = base_model_of(text)
    if base is not None and base.on_hub:
        return f"{base.name}@{base.revision}"
    is_path = text.startswith(("/", "~", "./", "../")) or (not is_hub_id(text) and "/" in text)
    return Path(text).name if is_path else text


def render_model_card(
    job: JobConfig, *, family: str, num_parameters: int, progress: Progress, results: Results
) -> str:
    """Return the card as Markdown with the hub's YAML header; `family` is the Hugging Face
    model_type.

    The card does not depend on the time and place of the run, so that a resumed run writes the same
    card.
    """
    base = base_model_of(job.checkpoint.initial_load_path)
    header = [*_header(base), *_datasets(job), *_license(job.checkpoint.initial_load_path)]
    origin = "trained from random weights" if base is None else f"trained from {_link(base)}"
    paths = "".join(f", `{public_name(path)}`" for path in _get_paths(job))
    lines = "\n".join
    return f"""---
{lines(header)}
---

# Model card

A `{family}` model with {num_parameters / 1e6:,.1f} M parameters, {origin} with titanlite.

## Data

- dataset: `{job.data.dataset}`{paths}
- fingerprint: {progress.data}

## Results

After {progress.step} of {format_count(job.training.steps, "step")}.

{lines(_results(results))}

## Configuration

Settings that differ from the defaults:

```toml
{lines(_settings(job))}
```

## Versions

{lines(f"- {name} {version}" for name, version in sorted(progress.versions.items()))}
"""


def render_merge_card(
    folder: Path, adapters: Path, *, family: str, dtype: str, rank: int, scaling: float
) -> str:
    """Return the card of the model in `folder` with the `adapters` in a folder merged into it.

    Data, results and settings are copied from the card of the adapters, if titanlite wrote it. From
    the card in `folder` only the license is copied.
    """
    base = base_model_of(str(folder.resolve()))
    assert base is not None
    header = [*_header(base), *_license(str(folder))]
    known, text = _read_card(adapters)
    training = ""
    if _TAG in known:
        if _DATASETS in known:
            following = known[known.index(_DATASETS) + 1 :]
            header += [_DATASETS, *takewhile(lambda line: line.startswith("- "), following)]
        training = "\nThe rest is from the card of the adapters.\n" + text[text.find("\n## ") :]
    lines = "\n".join
    return f"""---
{lines(header)}
---

# Model card

A `{family}` model in {dtype}: LoRA adapters of rank {rank} (factor {scaling:g}) merged into {_link(base)}
by titanlite.
{training}"""  # noqa: E501


def _link(base: BaseModel) -> str:
    if not base.on_hub:
        return f"`{base.name}`"
    return f"[{base.name}](https://huggingface.co/{base.name}) (revision `{base.revision[:12]}`)"


def _header(base: BaseModel | None) -> list[str]:
    """Return the hub's metadata as YAML lines. JSON strings are valid YAML strings."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", _TAG]
    return (
        lines
        if base is None or not base.on_hub
        else [*lines, f"base_model: {json.dumps(base.name)}"]
    )


def _datasets(job: JobConfig) -> list[str]:
    names = [
        path.partition("@")[0]
        for path in _get_paths(job)
        if is_hub_id(path) and not Path(path).exists()
    ]
    return [_DATASETS, *(f"- {json.dumps(name)}" for name in dict.fromkeys(names))] if names else []


def _get_paths(job: JobConfig) -> list[str]:
    return [source.path for source in get_sources(job.data).values() if source.path]


def _license(folder: str) -> list[str]:
    """Return the license lines of the card of the model in `folder`; they also bind a model that is
    trained from it.
    """
    header, _ = _read_card(Path(folder)) if folder else ([], "")
    # Only keys at the top level with a value on the same line, so that no other part of the header
    # is copied.
    found = (_LICENSE.fullmatch(line.rstrip()) for line in header)
    return [
        f"{match[1]}: {json.dumps(match[2].strip().strip(_QUOTES))}" for match in found if match
    ]


def _read_card(folder: Path) -> tuple[list[str], str]:
    """Return the header lines and the text of the card in `folder`; both are empty if the card is
    unreadable.
    """
    path = folder / "README.md"
    try:
        text = read_regular(path).decode("utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return [], ""
    parts = text.split("---\n", 2)
    return (
        (parts[1].splitlines(), parts[2])
        if text.startswith("---\n") and len(parts) == 3
        else ([], "")
    )


def _results(results: Results) -> list[str]:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    rows = []
    for series in (results.validation, results.evaluation):
        if series.last_step >= 0:
            best = (
                f"{shown(series.best)} (step {series.best_step})" if series.best_step >= 0 else "-"
            )
            last = f"{shown(series.last)} (step {series.last_step})"
            rows.append(f"| {series.name} | {shown(series.first)} | {last} | {best} |")
    if not rows:
        return ["No validation or evaluation took place."]
    return ["| metric | first | last | best |", "|---|---|---|---|", *rows]


def _settings(job: JobConfig) -> list[str]:
    lines: list[str] = []
    for section, settings in get_sections_of(job).items():
        changed = []
        for setting in settings if section.split(".")[0] not in _LEFT_OUT else ():
            value = get_value(job, setting.key)
            if setting.key not in _LEFT_OUT_KEYS and value is not None and value != setting.default:
                shown = public_name(value) if isinstance(value, str) else value
                changed.append(f"{setting.name} = {format_value(shown)}")
        if changed:
            lines += [*([""] if lines else []), f"[{section}]", *changed]
    return lines


def push_to_hub(folder: Path, repository: str) -> None:
    """Upload the model in `folder`, without the training state, to `repository` ("owner/name"). A
    new repository is private.

    Call this on one process, when the folder is complete. The hub's library provides token and
    address.

    Raises:
        CheckpointError: the hub cannot be reached, refuses, or an upload fails. The folder is not
            changed.
    """
    from huggingface_hub import HfApi  # takes half a second, and is needed only here

    logger.info("hub: uploading %s to %s", folder, repository)
    names = {f"{OWN_FOLDER}/{path.name}" for path in (folder / OWN_FOLDER).glob("*")}
    # expert_bias.safetensors is part of the model, and the certificate says what was trained.
    left_out = sorted(names - {SIDECAR_FILE, CERTIFICATE_FILE})
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            ignore_patterns=left_out,
            commit_message=f"{folder.name}, trained with titanlite",
        )
    except Exception as error:  # from the library, its HTTP client, or the system
        raise CheckpointError(
            f"checkpoint.push_to_hub: cannot upload to {repository}: {describe_error(error)}. The "
            f"model is safe in {folder}; upload it with: hf upload {repository} {folder} "
            + " ".join(f"--exclude {name}" for name in left_out)
        ) from error
    logger.info("hub: uploaded to https://huggingface.co/%s", repository)


ID_FILE = "wandb_id"
_runs: list[Any] = []  # the run of `wandb`; empty without one, and after its first error


def open_wandb(job: JobConfig, folder: Path) -> Callable[[int, Mapping[str, float]], None] | None:
    """Start W&B for the run in the existing `folder`, and return a function that logs (step,
    values).

    None on ranks other than 0, or without `metrics.enable_wandb`. A folder is one run of W&B, whose
    id is in the file `wandb_id`; a resumed run continues it. wandb stores its files in `wandb/` of
    the folder. It gets the configuration with only the last part of local paths.
    """
    if not job.metrics.enable_wandb or get_rank() != 0:
        return None
    with _ending_at_error():
        _runs.append(_start(job, folder.resolve()))
    return _log


def _log(step: int, values: Mapping[str, float]) -> None:
    with _ending_at_error():
        for run in _runs:
            run.log({"step": step, **values})


def configure_wandb(found: Mapping[str, Any]) -> None:
    """Send the environment of the run to W&B, except the command, which contains paths."""
    values = {"environment": {name: found[name] for name in found if name != "command"}}
    with _ending_at_error():
        for run in _runs:
            run.config.update(values, allow_val_change=True)


def finish_wandb(exit_code: int) -> None:
    """Finish the W&B run, if `open_wandb` started one; a nonzero exit code marks it as failed."""
    with _ending_at_error():
        while _runs:
            _runs.pop().finish(exit_code=exit_code)


@contextmanager
def _ending_at_error() -> Iterator[None]:
    """Log an error of wandb as a warning, and write no more to its run."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - no error of wandb may end the run
        _runs.clear()
        logger.warning(
            "W&B: %s. It gets no more points; metrics.jsonl has all.", describe_error(error)
        )


def _start(job: JobConfig, folder: Path) -> Any:
    wandb = importlib.import_module("wandb")
    # With show_info False wandb does not ask for a key on a terminal. The metadata would include
    # the command, which has paths, and the address of a git remote, which may have a token.
    quiet = {"show_info": False, "console": "off", "x_disable_meta": True, "disable_git": True}
    # `init` still prints output that its own settings disable
    wandb.setup(wandb.Settings(init_timeout=30.0, **quiet))
    run = wandb.init(
        project=read_variable("WANDB_PROJECT") or job.metrics.wandb_project,
        name=read_variable("WANDB_NAME") or folder.name,
        id=_get_id(folder / ID_FILE),
        resume="allow",
        dir=str(folder),
        notes=job.job.description or None,
        config=_get_config(job),
    )
    run.define_metric("*", step_metric="step")
    offline = f"offline, `wandb sync {os.path.dirname(run.dir)}` uploads this run"
    logger.info("W&B: %s", run.url or offline)
    return run


def _get_config(job: JobConfig) -> dict[str, dict[str, Any]]:
    config = defaultdict[str, dict[str, Any]](dict)
    for section, known in get_sections_of(job).items():
        for setting in known:
            value = get_value(job, setting.key)
            is_text = isinstance(value, str) and setting.key != "job.description"
            config[section][setting.name] = public_name(value) if is_text else value
    return config


def _get_id(path: Path) -> str:
    """Return the id in the file; write a new id if the file does not exist."""
    with suppress(OSError):
        return read_regular(path).decode("ascii").strip()
    name = uuid.uuid4().hex[:12]
    try:
        replace_file(path, name + "\n")
    except OSError as error:
        logger.warning(
            "cannot write %s: %s. A resume will be another run of W&B.",
            path,
            error.strerror or error,
        )
    return name
