"""Range checks of single settings, and of the few that only make sense together.

Checks that need the world size, the resolved model or the file system are made where those are
known.
"""

import math
import operator
import re
from collections.abc import Iterator
from pathlib import Path

from titanlite.base.errors import ConfigError
from titanlite.base.text import parse_date, parse_multipliers, parse_object, split_patterns
from titanlite.config.assets import is_hub_id
from titanlite.config.data import DataSection, get_fields, get_source_key, get_sources
from titanlite.config.schema import JobConfig, OptimizerSection
from titanlite.config.settings import format_value, get_value, get_values

_OF_EXAMPLES = (
    "split",
    "subset",
    "validation_path",
    "validation_split",
    "format",
    "text_field",
    "fields",
    "train_on",
    "too_long",
    "bad_rows",
    "chat_template",
    "chat_template_kwargs",
    "chat_date",
    "dropped_parts",
    "streaming",
    "streaming_block_rows",
    "converter",
)

# Every test is written so that nan fails it.
_TESTS = {
    "ge": (operator.ge, "{} or more"),
    "gt": (operator.gt, "more than {}"),
    "le": (operator.le, "at most {}"),
    "lt": (operator.lt, "less than {}"),
}


def check_values(job: JobConfig) -> list[str]:
    """Return problems of single values and of values that contradict each other; each names its
    settings in full.
    """
    return _check_ranges(job) + _check_contradictions(job) + _check_data(job)


def _check_ranges(job: JobConfig) -> list[str]:
    problems = []
    for setting, value in get_values(job):
        if (
            setting.kind not in (int, float)
            or setting.section.startswith("model.")
            or value is None
        ):
            continue
        bounds = setting.bounds if "gt" in setting.bounds else {"ge": 0, **setting.bounds}
        tests = [(_TESTS[name], bound) for name, bound in bounds.items() if name in _TESTS]
        if value == bounds.get("also") or (
            value < math.inf and all(test(value, bound) for (test, _), bound in tests)
        ):
            continue
        allowed = " and ".join(words.format(bound) for (_, words), bound in tests)
        allowed += f", or to {bounds['also']}" if "also" in bounds else ""
        problems.append(
            f"{setting.key} = {format_value(value)} is out of range. Set it to {allowed}."
        )
    return problems


def _check_data(job: JobConfig) -> list[str]:
    data = job.data
    if data.sources and (problems := _check_sources(data)):
        return problems
    sources = get_sources(data)
    problems = [
        problem for name, source in sources.items() for problem in _check_source(data, name, source)
    ]
    problems = list(dict.fromkeys(problems))  # what several sources have from [data] is one problem
    problems = problems or _find_unused(data)
    streams = [
        get_source_key(data, name, "streaming")
        for name, source in sources.items()
        if source.streaming
    ]
    if job.training.epochs and streams:
        key = streams[0]
        problems.append(
            f"training.epochs needs data whose end is known, but {key} is on. Set training.steps "
            "instead."
        )
    elif job.training.epochs and any(source.weight is not None for source in data.sources.values()):
        problems.append(
            "training.epochs needs sources without weights, with which each has epochs of its own. "
            "Set training.steps, " + "or leave the weights out."
        )
    return problems or _check_held_out(job)


def _check_sources(data: DataSection) -> list[str]:
    """Problems of `data.sources` as a whole, and of weights."""
    if data.dataset not in ("examples", "text"):
        return [
            'data.sources are for data.dataset = "examples" or "text", which is '
            f"{format_value(data.dataset)}. Set " + "that, or remove the sources."
        ]
    misplaced = [key for key in ("path", "validation_path") if getattr(data, key)]
    if misplaced:
        first = next(iter(data.sources))
        return [
            f"data.{key} has no effect next to data.sources. Set data.sources.{first}.{key}."
            for key in misplaced
        ]
    weights = {
        f"data.sources.{name}.weight": source.weight for name, source in data.sources.items()
    }
    problems = []
    unset = [key for key, weight in weights.items() if weight is None]
    if 0 < len(unset) < len(weights):
        problems.append(
            f"{unset[0]} is not set, but other sources have weights. Set all of them, or none."
        )
    if len(unset) == len(weights):
        problems += [
            f"{get_source_key(data, name, 'streaming')}: how many sequences a stream has is not "
            "known, so sources need "
            + f"shares. Set data.sources.{name}.weight, and that of every other source."
            for name, source in get_sources(data).items()
            if source.streaming and len(weights) > 1
        ][:1]
    return problems


def _check_held_out(job: JobConfig) -> list[str]:
    """Return a problem for each user of held-out data that finds none."""
    data = job.data
    sources = get_sources(data).values()
    if any(
        source.validation_path or not (source.streaming or source.validation_share == 0)
        for source in sources
    ):
        return []
    users = {
        "validation.enable is on": job.validation.enable,
        "evaluation.enable is on and evaluation.path empty": job.evaluation.enable
        and not job.evaluation.path,
    }
    path = (
        f"data.sources.{next(iter(data.sources))}.validation_path"
        if data.sources
        else "data.validation_path"
    )
    why = "no rows are held out (data.validation_share is 0, or data.streaming is on)"
    return [
        f"{why}, but {user}. Set {path}, or switch one of them off."
        for user in users
        if users[user]
    ]


def _check_source(data: DataSection, name: str, source: DataSection) -> list[str]:
    """List the problems of one source of `data`; `name` is empty if `[data]` itself is the only
    one.
    """

    def get_key(setting: str) -> str:
        return get_source_key(data, name, setting)

    path = get_key("path")
    wanted = {
        "text": "a text file or a folder",
        "images": "a .jsonl file",
        "examples": "a file, folder or hub id",
    }
    if bool(source.path) != (source.dataset in wanted):
        dataset = f"data.dataset = {format_value(source.dataset)}"
        if source.path:
            return [f"{path} has no effect on {dataset}. Leave one of them out."]
        return [f"{dataset} needs {path}, which is empty. Set it to {wanted[source.dataset]}."]
    if source.dataset == "examples":
        if source.train_on == "all" and source.format == "preference":
            return [
                f'{get_key("train_on")} = "all" does not go with {get_key("format")} = '
                '"preference": the prompt is the '
                + f'same on both sides. Set {get_key("train_on")} = "assistant".'
            ]
        if not source.text_field:
            return [
                f'{get_key("text_field")} = "" names no field. Set it to the field with the text, '
                "or leave it out."
            ]
        try:
            get_fields(source, get_key("fields"))
        except ConfigError as error:
            return [str(error)]
        return []
    if source.dataset in ("text", "stdlib") and not source.packing:
        return [
            f"{get_key('packing')} = false: documents of files are packed. Write them as rows with "
            "a field 'text', and "
            f'set {get_key("too_long")} = "split" for the long ones.'
        ]
    return []


def _is_on_hub(path: str) -> bool:
    """Return True if `path` is an id of the hub, and nothing here has this name."""
    return is_hub_id(path) and not Path(path).exists()


def _find_unused(data: DataSection) -> list[str]:
    """Return a problem for each setting of examples that nothing in these data reads."""

    def has_splits(path: str) -> bool:
        return path != "" and (_is_on_hub(path) or Path(path).is_dir())

    unused, used = dict[str, str](), set[str]()
    for name, source in get_sources(data).items():
        is_read: dict[str, object] = dict.fromkeys(_OF_EXAMPLES, source.dataset == "examples")
        is_read["document_separator"] = source.dataset == "text"
        is_read["validation_share"] = not source.validation_path and not source.streaming
        if source.dataset == "examples":
            is_read |= {
                "split": has_splits(source.path),
                "subset": _is_on_hub(source.path),
                "validation_split": has_splits(source.validation_path),
                "streaming_block_rows": source.streaming,
                "text_field": source.format in ("auto", "text"),
            }
        for setting, reads in is_read.items():
            key, value = get_source_key(data, name, setting), getattr(source, setting)
            if reads:
                used.add(key)
            elif value != getattr(DataSection, setting):
                kind = format_value(source.dataset)
                unused[key] = (
                    f"{key} = {format_value(value)} has no effect on this data (data.dataset = "
                    f"{kind}). Leave it out."
                )
    return [text for key, text in unused.items() if key not in used]


def _check_contradictions(job: JobConfig) -> list[str]:
    """Return problems of settings that would be ignored, that lack another one, or whose text
    cannot be parsed.
    """

    def shown(key: str) -> str:
        return f"{key} = {format_value(get_value(job, key))}"

    model, optimizer, lora, checkpoint = job.model, job.optimizer, job.lora, job.checkpoint
    option, is_dpo, has_muon = (
        job.activation_checkpoint.selective_ac_option,
        job.training.objective == "dpo",
        optimizer.name == "Muon",
    )
    is_option = option == "op" or re.fullmatch("[1-9][0-9]*", option) is not None
    needs_cache = job.dpo.reference == "cached" or (
        job.dpo.reference == "auto" and (lora.rank == 0 or lora.init_from)
    )
    streams = [name for name, source in get_sources(job.data).items() if source.streaming]
    stream = get_source_key(job.data, streams[0], "streaming") if streams else ""
    best = checkpoint.save_best
    found: list[tuple[object, str]] = [
        (
            not is_option,
            f"{shown('activation_checkpoint.selective_ac_option')} is not 'op' or a positive "
            'integer. Write "op", or '
            'for example "2" to recompute every second layer.',
        ),
        (
            is_option and option != "op" and job.activation_checkpoint.mode != "selective",
            f'{shown("activation_checkpoint.selective_ac_option")} is for mode "selective", and '
            f"mode is {format_value(job.activation_checkpoint.mode)}. Set "
            "activation_checkpoint.mode, or leave it out.",
        ),
        (
            not (model.flavor or model.hf_assets_path or checkpoint.initial_load_path),
            "model.path and model.flavor are both empty, so there is no model. Set model.path to "
            "a folder or hub id, or model.name and model.flavor for a new model with random "
            "weights.",
        ),
        *((True, problem) for problem in _find_wrong_texts(job)),
        (
            optimizer.name == "AdamW" and optimizer.momentum != OptimizerSection().momentum,
            f'{shown("optimizer.momentum")} is Muon\'s, and optimizer.name is "AdamW". Set that, '
            "or leave the momentum out.",
        ),
        (
            has_muon and lora.rank,
            'optimizer.name = "Muon" makes steps of whole matrices orthogonal, which adapters '
            "(lora.rank) are not. Set "
            'it to "AdamW".',
        ),
        (
            has_muon and job.training.enable_cpu_offload,
            'optimizer.name = "Muon" multiplies matrices, for which the host of '
            "training.enable_cpu_offload is too "
            'slow. Set one of them to another value: "AdamW", or false.',
        ),
        (
            lora.rank > 0 and not checkpoint.initial_load_path,
            f"{shown('lora.rank')} trains adapters of a pretrained model, and there is none. "
            + (
                "Leave model.init out."
                if model.init == "random"
                else "Set model.path to that model."
            ),
        ),
        (
            lora.rank > 0 and job.moe.expert_bias_update_rate,
            f"{shown('moe.expert_bias_update_rate')}: with {shown('lora.rank')} the model is "
            "frozen, and adapters have no place for the bias. Leave it out.",
        ),
        (
            is_dpo and job.dpo.reference == "adapters_off" and lora.rank == 0,
            'dpo.reference = "adapters_off" needs adapters, but lora.rank = 0. Set dpo.reference = '
            '"cached".',
        ),
        (
            is_dpo and streams and needs_cache,
            f"{stream} has no end that dpo.reference could be computed up to before training. Set "
            "it to false, or train adapters with lora.rank, whose reference needs no cache.",
        ),
        (
            best != "none" and not getattr(job, best).enable,
            f"{shown('checkpoint.save_best')} needs {best}s. Set {best}.enable = true, or "
            'save_best = "none".',
        ),
        (
            checkpoint.push_to_hub
            and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", checkpoint.push_to_hub),
            f'{shown("checkpoint.push_to_hub")} is no name of a repository. Write "owner/name", or '
            '"" for no upload.',
        ),
        *(
            (
                value and not checkpoint.enable,
                f"{shown(key)} needs checkpoints. Set checkpoint.enable = true.",
            )
            for key, value in {
                "checkpoint.push_to_hub": checkpoint.push_to_hub,
                "checkpoint.save_best": best != "none",
            }.items()
        ),
    ]
    return [problem for is_one, problem in found if is_one]


def _find_wrong_texts(job: JobConfig) -> Iterator[str]:
    for parse, key in (
        (split_patterns, "optimizer.freeze"),
        (parse_multipliers, "optimizer.lr_multipliers"),
        (split_patterns, "lora.targets"),
        (parse_object, "data.chat_template_kwargs"),
        (parse_date, "data.chat_date"),
    ):
        try:
            parse(key, get_value(job, key))
        except ConfigError as error:
            yield str(error)
