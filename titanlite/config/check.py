"""Checks of single settings, of settings that only make sense together, and of settings without
effect.

Checks that need the world size, the resolved model or the file system are made where those are
known.
"""

import math
import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from titanlite.base.errors import ConfigError
from titanlite.base.text import parse_date, parse_multipliers, parse_object, split_patterns
from titanlite.config.assets import is_hub_id
from titanlite.config.data import EXAMPLES, DataSection, get_fields, get_source_key, get_sources
from titanlite.config.schema import JobConfig
from titanlite.config.settings import (
    SOURCES,
    Problem,
    find_section,
    find_setting,
    format_value,
    get_settings,
    get_value,
    get_values,
)

# Every comparison is written so that NaN fails it.
_TESTS = {
    "ge": (operator.ge, "{} or more"),
    "gt": (operator.gt, "more than {}"),
    "le": (operator.le, "at most {}"),
    "lt": (operator.lt, "less than {}"),
}
_PATHS = {
    "text": "a text file or a folder",
    "images": "a .jsonl file",
    "examples": "a file, folder or hub id",
}
# Condition of a mistake, its key, and the problem; in the problem, `{}` is replaced by the key with
# its value.
_Row = tuple[object, str, str]


def check_values(job: JobConfig) -> list[Problem]:
    """Return the problems of single values, and of values that contradict each other."""
    rows = [*_check_combinations(job), *_check_data(job)]
    return [
        *_check_ranges(job),
        *(
            Problem(key, text.replace("{}", f"{key} = {format_value(get_value(job, key))}"))
            for is_wrong, key, text in rows
            if is_wrong
        ),
        *_check_texts(job),
    ]


def find_ignored(job: JobConfig, given: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each setting in `given` that has no effect in this run.

    `only_for` names a setting that must be given too, or a condition (`_holds`). In the second
    case, a setting that has its default value is not a mistake: saved configurations list all
    defaults.
    """
    problems = []
    for key in given:
        # The condition of a section is the condition of its first setting.
        setting = find_setting(key) or next(iter(find_section(key) or ()), None)
        if setting is None or not (scope := setting.metadata["only_for"]):
            continue
        sources = [
            source
            for name, source in get_sources(job.data).items()
            if not key.startswith("data.") or get_source_key(job.data, name, setting.name) == key
        ]
        if scope in get_settings():
            is_read = scope in given
        else:
            is_default = get_value(job, key) == setting.default
            is_read = is_default or not sources or any(_holds(job, scope, s) for s in sources)
        if not is_read:
            text = f"{key} has no effect without {scope}. Set that, or remove {key}."
            problems.append(Problem(key, text))
    return problems


def _holds(job: JobConfig, condition: str, source: DataSection) -> bool:
    """Return True if the `condition`, which `only_for` of a setting names, holds in this run: the
    value of another setting, such as 'checkpoint.enable = true', or one of the conditions below.
    For settings of data, `source` is the data source that they belong to.
    """
    is_rows = source.dataset == "examples"
    on_hub, in_folder = _has_splits(source.path)
    conditions = {
        EXAMPLES: is_rows,
        'data.dataset = "text"': source.dataset == "text",
        "rows with a text": is_rows and source.format in ("auto", "text"),
        "rows that are streamed": is_rows and source.streaming,
        "a dataset of the hub in path": is_rows and on_hub,
        "a folder or a dataset of the hub in path": is_rows and (on_hub or in_folder),
        "a folder or a dataset of the hub in validation_path": is_rows
        and any(_has_splits(source.validation_path)),
        "rows of path that are held out": not (source.validation_path or source.streaming),
        'optimizer.name = "Muon"': job.optimizer.name != "AdamW",  # or the user's own
        "parallelism.pipeline_parallel_degree > 1": job.parallelism.pipeline_parallel_degree > 1,
    }
    if condition in conditions:
        return bool(conditions[condition])
    key, wanted = condition.split(" = ")
    return format_value(get_value(job, key)) == wanted


def _has_splits(path: str) -> tuple[bool, bool]:
    """Return whether `path` is a hub id, and whether it is a local folder."""
    return is_hub_id(path) and not Path(path).exists(), path != "" and Path(path).is_dir()


def _check_ranges(job: JobConfig) -> Iterator[Problem]:
    for setting, value in get_values(job):
        if setting.kind not in (int, float) or value is None:
            continue
        # Sizes of a model are checked with the model.
        has_least = setting.section.startswith("model.") or "gt" in setting.metadata
        bounds = ({} if has_least else {"ge": 0}) | dict(setting.metadata)
        tests = [(*_TESTS[name], bound) for name, bound in bounds.items() if name in _TESTS]
        fits = abs(value) < (2**63 if setting.kind is int else math.inf)
        if value == bounds.get("also") or (fits and all(test(value, b) for test, _, b in tests)):
            continue
        allowed = " and ".join(words.format(bound) for _, words, bound in tests)
        allowed += f", or to {bounds['also']}" if "also" in bounds else ""
        allowed = allowed if fits else "a finite number that fits in 64 bits"
        shown = f"{setting.key} = {format_value(value)}"
        yield Problem(setting.key, f"{shown} is out of range. Set it to {allowed}.")


def _check_combinations(job: JobConfig) -> list[_Row]:
    """Return the mistakes in settings that contradict each other, or that need another setting."""
    model = job.model
    lora = job.lora
    checkpoint = job.checkpoint
    training = job.training
    reference = job.dpo.reference if training.objective == "dpo" else ""
    is_cached = reference == "cached" or (
        reference == "auto" and (lora.rank == 0 or lora.init_from != "")
    )
    has_muon = job.optimizer.name == "Muon"
    best = checkpoint.save_best
    push_to_hub = checkpoint.push_to_hub
    streams = [
        get_source_key(job.data, name, "streaming")
        for name, source in get_sources(job.data).items()
        if source.streaming
    ]
    return [
        (
            not re.fullmatch("op|[1-9][0-9]*", job.activation_checkpoint.selective_ac_option),
            "activation_checkpoint.selective_ac_option",
            '{} is not \'op\' or a positive integer. Write "op", or for example "2" to recompute '
            "every second layer.",
        ),
        (
            not (model.flavor or model.hf_assets_path or checkpoint.initial_load_path),
            "model",
            "model.path and model.flavor are both empty, so there is no model. Set model.path to "
            "a folder or hub id, or model.name and model.flavor for a new model with random "
            "weights.",
        ),
        (
            has_muon and lora.rank,
            "optimizer.name",
            "{} orthogonalizes steps of whole matrices; adapters (lora.rank) are only factors of "
            'them. Set it to "AdamW".',
        ),
        (
            has_muon and training.enable_cpu_offload,
            "optimizer.name",
            "{} multiplies matrices in each step, and the host (training.enable_cpu_offload) is "
            'too slow for that. Set it to "AdamW", or training.enable_cpu_offload to false.',
        ),
        (
            lora.rank and not checkpoint.initial_load_path,
            "lora.rank",
            "{} trains adapters of a pretrained model, and there is none. Set model.path to that "
            'model, without model.init = "random".',
        ),
        (
            lora.rank and job.moe.expert_bias_update_rate,
            "moe.expert_bias_update_rate",
            "{} changes the model, which lora.rank freezes, and adapters have no place for the "
            "bias. Leave it out.",
        ),
        (
            reference == "adapters_off" and not lora.rank,
            "dpo.reference",
            '{} needs adapters, but lora.rank is 0. Set dpo.reference = "cached".',
        ),
        (
            is_cached and streams,
            "".join(streams[:1]),
            "{} has no known end, so dpo.reference cannot be computed before training. Set it to "
            "false, or train adapters with lora.rank, whose reference needs no cache.",
        ),
        (
            best != "none" and not getattr(job, best).enable,
            "checkpoint.save_best",
            f'{{}} needs {best}s. Set {best}.enable = true, or save_best = "none".',
        ),
        (
            push_to_hub and ("@" in push_to_hub or not is_hub_id(push_to_hub)),
            "checkpoint.push_to_hub",
            '{} is not the name of a repository. Write "owner/name", or "" for no upload.',
        ),
        (
            training.epochs and streams,
            "training.epochs",
            f"{{}} needs data whose end is known, but {''.join(streams[:1])} is on. Set "
            "training.steps instead.",
        ),
        (
            training.epochs and any(each.weight is not None for each in job.data.sources.values()),
            "training.epochs",
            "{} needs sources without weights: with weights, each source has epochs of its own. "
            "Set training.steps, or leave the weights out.",
        ),
    ]


def _check_data(job: JobConfig) -> list[_Row]:
    """Return the mistakes in each data source, and the contradictions between sources."""
    data = job.data
    sources = get_sources(job.data)
    first = next(iter(data.sources), "NAME")
    weights = {f"{SOURCES}.{name}.weight": each.weight for name, each in data.sources.items()}
    unset = [key for key, weight in weights.items() if weight is None]
    no_rows = all(
        not source.validation_path and (source.streaming or source.validation_share == 0)
        for source in sources.values()
    )
    held_out = f"{SOURCES}.{first}.validation_path" if data.sources else "data.validation_path"
    rows: list[_Row] = [
        (
            data.sources and data.dataset not in ("examples", "text"),
            "data",
            'data.sources need data.dataset = "examples" or "text", but it is '
            f"{format_value(data.dataset)}. Set it to one of these, or remove the sources.",
        ),
        *(
            (
                data.sources and getattr(data, name),
                f"data.{name}",
                f"{{}} has no effect next to data.sources. Set {SOURCES}.{first}.{name}.",
            )
            for name in ("path", "validation_path")
        ),
        (
            0 < len(unset) < len(weights),
            "".join(unset[:1]),
            f"{''.join(unset[:1])} is not set, but other sources have weights. Set all of them, or "
            "none.",
        ),
        *(
            (
                no_rows and section.enable and not path,
                f"{name}.enable",
                "{} needs rows that are held out, and there are none (data.validation_share is 0, "
                f"or data.streaming is on). Set {held_out}, or {name}.enable = false.",
            )
            for name, section, path in (
                ("validation", job.validation, ""),
                ("evaluation", job.evaluation, job.evaluation.path),
            )
        ),
    ]
    for name, source in sources.items():
        keys = {
            setting: get_source_key(data, name, setting)
            for setting in ("path", "streaming", "train_on", "text_field", "fields", "packing")
        }
        dataset = f"data.dataset = {format_value(source.dataset)}"
        wanted = _PATHS.get(source.dataset, "")
        is_rows = source.dataset == "examples"
        rows += [
            (
                source.streaming and len(weights) == len(unset) > 1,
                keys["streaming"],
                "{}: the number of sequences of a stream is not known, so sources need "
                f"weights. Set {SOURCES}.{name}.weight, and the weight of every other source.",
            ),
            (
                source.path and not wanted,
                keys["path"],
                f"{{}} has no effect on {dataset}. Leave one of them out.",
            ),
            (
                wanted and not source.path,
                keys["path"],
                f"{dataset} needs {keys['path']}, which is empty. Set it to {wanted}.",
            ),
            (
                is_rows and source.train_on == "all" and source.format == "preference",
                keys["train_on"],
                '{} cannot be combined with format = "preference": the prompt is the same on '
                f'both sides. Set {keys["train_on"]} = "assistant".',
            ),
            (
                is_rows and not source.text_field,
                keys["text_field"],
                "{} names no field. Set it to the field with the text, or leave it out.",
            ),
            (
                source.dataset in ("text", "stdlib") and not source.packing,
                keys["packing"],
                "{}: documents of files are packed. Write them as rows with a field 'text', and "
                'set data.too_long = "split" for the long ones.',
            ),
        ]
    return rows


def _check_texts(job: JobConfig) -> Iterator[Problem]:
    """Yield the problems of strings that are parsed later."""
    texts = [
        (split_patterns, "optimizer.freeze", job.optimizer.freeze),
        (parse_multipliers, "optimizer.lr_multipliers", job.optimizer.lr_multipliers),
        (split_patterns, "lora.targets", job.lora.targets),
        (parse_object, "data.chat_template_kwargs", job.data.chat_template_kwargs),
        (parse_date, "data.chat_date", job.data.chat_date),
        *(
            (
                lambda key, source: get_fields(source, key),
                get_source_key(job.data, name, "fields"),
                source,
            )
            for name, source in get_sources(job.data).items()
        ),
    ]
    for parse, key, text in texts:
        try:
            parse(key, text)
        except ConfigError as error:
            yield Problem(key, str(error))
