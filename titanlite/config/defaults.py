"""Defaults that depend on the rest of the configuration."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from titanlite.base.log import warn_once
from titanlite.config.assets import is_hub_id
from titanlite.config.data import get_sources, holds_rows
from titanlite.config.schema import JobConfig
from titanlite.config.settings import Problem, format_value

# Peak learning rate of runs that begin with pretrained weights, by (DPO, adapters).
_FINE_TUNING_RATES = {
    (False, False): 2e-5,  # Alpaca; the default of TRL's SFTTrainer
    # QLoRA, arXiv:2305.14314; ten times the rate for all weights: "LoRA Without Regret", 2025
    (False, True): 2e-4,
    (True, False): 5e-7,  # Zephyr, arXiv:2310.16944; Tulu 3, arXiv:2411.15124
    (True, True): 5e-6,  # Zephyr's LoRA configuration
}


def fill_in(job: JobConfig, given: Mapping[str, str], name: str) -> list[Problem]:
    """Set, in place, the settings that follow from those in `given`; return the problems found.

    `given` maps the full key of each given setting to the file or argument that gave it; other
    settings have the schema's default. `name` is the configuration's name, from which its folder
    gets its name.
    """

    def default(key: str, value: object) -> None:
        section, _, setting = key.partition(".")
        if key not in given:
            setattr(getattr(job, section), setting, value)

    problems = [*_fill_in_model(job), *_fill_in_length(job, given)]
    problems += _fill_in_data(job, is_given="data.dataset" in given)
    for key in ("validation_share", "validation_path"):
        if (value := getattr(job.data, key)) and not wants_held_out(job):
            text = f"data.{key} = {format_value(value)} holds rows out, and nothing uses them"
            warn_once(f"{text}. Set validation.enable = true, or leave it out.")
    default("training.seq_len", -1)
    default("job.dump_folder", f"outputs/{name}" if name else "outputs")
    is_pretrained = job.checkpoint.initial_load_path != ""
    has_lora = job.lora.rank > 0
    if is_pretrained and (job.data.dataset not in ("text", "stdlib") or has_lora):
        default("training.global_batch_size", None)  # other runs with weights continue pretraining
    elif job.training.global_batch_size is None:
        job.training.global_batch_size = -1
    if is_pretrained:
        default("optimizer.lr", _FINE_TUNING_RATES[job.training.objective == "dpo", has_lora])
        default("optimizer.weight_decay", 0.0)
        default("optimizer.beta2", 0.999)
    return problems


def _fill_in_model(job: JobConfig) -> list[Problem]:
    """Turn `model.path` and `model.init` into `model.hf_assets_path` and
    `checkpoint.initial_load_path`.
    """
    model = job.model
    checkpoint = job.checkpoint
    problems = [
        Problem(
            key,
            f"{key} = {format_value(other)} and model.path = {format_value(model.path)} both name "
            f"the model. Leave {key} out; for another tokenizer, set data.tokenizer_path.",
        )
        for key, other in (
            ("checkpoint.initial_load_path", checkpoint.initial_load_path),
            ("model.hf_assets_path", model.hf_assets_path),
        )
        if model.path and other and other != model.path
    ]
    weights = model.path or (model.hf_assets_path if model.init == "pretrained" else "")
    if model.init == "random" and checkpoint.initial_load_path and not problems:
        text = (
            'model.init = "random" and checkpoint.initial_load_path contradict each other. Leave '
            "one of them out."
        )
        problems.append(Problem("model.init", text))
    if model.init == "pretrained" and not (weights or checkpoint.initial_load_path):
        text = (
            'model.init = "pretrained" needs model.path, which is empty. Set it to a folder or hub '
            "id."
        )
        problems.append(Problem("model.init", text))
    if not problems and model.init != "random":
        checkpoint.initial_load_path = checkpoint.initial_load_path or weights
    if not problems and (not model.flavor or model.init == "random"):
        model.hf_assets_path = model.hf_assets_path or model.path
    return problems


def _fill_in_length(job: JobConfig, given: Mapping[str, str]) -> list[Problem]:
    """Resolve `training.steps` and `training.epochs`: if both are given, the later one counts. With
    pretrained weights and neither, train for 3 epochs.
    """
    training = job.training
    data = job.data
    steps = given.get("training.steps")
    epochs = given.get("training.epochs")
    if epochs is None:
        mixed = any(source.weight is not None for source in data.sources.values())
        has_end = not mixed and not any(source.streaming for source in get_sources(data).values())
        if steps is None and job.checkpoint.initial_load_path and has_end:
            training.epochs = 3.0  # the default of transformers
    elif steps is None and not training.epochs:
        text = "training.epochs = 0 trains nothing. Set it to more, or leave it out."
        return [Problem("training.epochs", text)]
    elif steps is not None and training.epochs:
        is_late = steps.startswith("override")
        if is_late == epochs.startswith("override"):
            text = (
                f"training.steps = {training.steps} and training.epochs = {training.epochs:g} both "
                "set the length of the run. Leave one of them out."
            )
            return [Problem("training.epochs", text)]
        training.epochs = 0.0 if is_late else training.epochs
    return []


def wants_held_out(job: JobConfig) -> bool:
    """Return True if the run holds out rows of its training data for validation or evaluation."""
    return job.validation.enable or (job.evaluation.enable and not job.evaluation.path)


def is_derived(job: JobConfig, key: str) -> bool:
    """Return True if `fill_in` derives the setting from other settings. It is not saved, so that a
    resumed run can change the others.
    """
    if key == "training.steps":
        return job.training.epochs > 0
    if key == "data.validation_share":
        return job.data.validation_share == 0 and not wants_held_out(job)
    return key in ("model.hf_assets_path", "checkpoint.initial_load_path") and job.model.path != ""


def find_kind(path: str, pattern: str = "") -> Literal["examples", "text", "mixed"]:
    """Detect the kind of data at `path` by file names: rows for fine-tuning, plain documents, or
    both in one folder.

    A path that does not exist counts as rows if its name is a hub id or the name of a file of rows.
    """
    found = Path(os.path.expanduser(path))
    if not found.is_dir():
        return (
            "examples"
            if holds_rows(found.name) or (is_hub_id(path) and not found.exists())
            else "text"
        )
    if pattern:
        return "examples" if holds_rows(pattern) else "text"
    names = (name for _, _, files in os.walk(found) for name in files)
    kinds = {holds_rows(name) for name in names if name.endswith(".txt") or holds_rows(name)}
    return "mixed" if len(kinds) == 2 else "examples" if True in kinds else "text"


def _fill_in_data(job: JobConfig, *, is_given: bool) -> list[Problem]:
    """Set `data.dataset` according to the files at the paths, unless it `is_given`; return
    contradictions.
    """
    data = job.data
    sources = get_sources(data).values()
    kinds: dict[str, Any] = {
        source.path: find_kind(source.path, source.pattern) for source in sources
    }
    kinds.pop("", None)
    if not is_given and kinds:
        if len({*kinds.values()}) > 1 or "mixed" in kinds.values():
            text = (
                f"data.dataset is not set, and there are rows and text files in {', '.join(kinds)}."
                ' Set data.dataset = "examples" for the rows, or "text" for the text files.'
            )
            return [Problem("data", text)]
        data.dataset = next(iter(kinds.values()))
    elif not is_given and job.checkpoint.initial_load_path:
        data.dataset = "none"
    rows = [
        source.path
        for source in sources
        if (not Path(source.path).is_dir() and holds_rows(source.path))
        or ".jsonl" in source.pattern
    ]
    if data.dataset == "text" and rows:
        text = (
            f'data.dataset = "text" would train {rows[0]} as it is written, with braces and field '
            'names. Set data.dataset = "examples", which trains data.text_field of each row.'
        )
        return [Problem("data.dataset", text)]
    return []
