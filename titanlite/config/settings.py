"""All settings: every leaf of the schema by its dotted key, and its value in a configuration."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from titanlite.base.errors import ConfigError
from titanlite.base.extension import is_extension, load_extension
from titanlite.config.data import SourceSection
from titanlite.config.schema import JobConfig

# settings whose value is a table with the user's own names, stored as a JSON string
TABLES = ("chat_template_kwargs", "fields")
SOURCES = "data.sources"  # section whose tables have the user's own names
_SOURCE = re.compile(r"data\.sources\.([a-z]\w*)", re.ASCII)


class Problem(NamedTuple):
    """A mistake in a configuration, and what to do about it."""

    key: str  # key of the setting, or of the section
    text: str


class Setting(NamedTuple):
    """One leaf of the schema."""

    key: str  # dotted: section.name
    kind: type  # int, float, bool or str
    choices: tuple[str, ...]  # allowed values, in addition to extensions; empty: any
    optional: bool  # None is allowed
    default: Any
    metadata: Mapping[str, Any]  # see `model.setting`

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def doc(self) -> str:
        return self.metadata["doc"]

    @property
    def calls(self) -> tuple[str, ...] | None:
        """Parameter lists with which an extension named by the setting may be called; None: no
        extension is allowed.
        """
        return self.metadata.get("calls")


def walk_schema(schema: Any, section: str = "", only_for: str = "") -> Iterator[Setting]:
    """Yield the settings of `schema` and of the sections inside it, in order, except the sources'
    settings.

    A setting without `only_for` gets that of its section.
    """
    hints = get_type_hints(schema)
    for item in fields(schema):
        key = f"{section}.{item.name}".lstrip(".")
        declared = hints[item.name]
        metadata = {"only_for": only_for, **item.metadata}
        if is_dataclass(declared):
            yield from walk_schema(declared, key, metadata["only_for"])
        elif key != SOURCES:
            optional = NoneType in get_args(declared)
            kind = get_args(declared)[0] if optional else declared
            choices = get_args(kind) or metadata.get("choices", ())
            yield Setting(key, str if choices else kind, choices, optional, item.default, metadata)


@cache
def get_settings() -> dict[str, Setting]:
    """Return all settings by dotted key, in the order of the schema."""
    return {setting.key: setting for setting in walk_schema(JobConfig)}


@cache
def get_sections() -> dict[str, list[Setting]]:
    """Return the settings of each section; nested sections (`model.overrides`) are separate
    entries.
    """
    sections: dict[str, list[Setting]] = {}
    for setting in get_settings().values():
        sections.setdefault(setting.section, []).append(setting)
    return sections


@cache
def get_source_section(name: str) -> list[Setting]:
    """Return the settings of the table `data.sources.NAME`."""
    return list(walk_schema(SourceSection, f"{SOURCES}.{name}"))


def find_section(key: str) -> list[Setting] | None:
    """Return the settings of section `key`, or None if there is no such section. `data.sources` has
    no settings, only tables.
    """
    if key == SOURCES:
        return []
    match = _SOURCE.fullmatch(key)
    return get_source_section(match[1]) if match else get_sections().get(key)


def find_setting(key: str) -> Setting | None:
    """Return the setting with the dotted `key`, or None."""
    settings = find_section(key.rpartition(".")[0]) or []
    return next((setting for setting in settings if setting.key == key), None)


def get_sections_of(job: JobConfig) -> dict[str, list[Setting]]:
    """Return `get_sections`, extended by the tables of `data.sources` that `job` has."""
    return get_sections() | {
        f"{SOURCES}.{name}": get_source_section(name) for name in job.data.sources
    }


def get_values(job: JobConfig) -> Iterator[tuple[Setting, Any]]:
    """Yield the settings that `job` has, with their values."""
    for settings in get_sections_of(job).values():
        for setting in settings:
            yield setting, get_value(job, setting.key)


def find_extension_problems(job: JobConfig) -> list[str]:
    """Return the problems of the user's functions that settings of `job` name. Imports their
    modules.
    """
    problems = []
    for setting, value in get_values(job):
        if setting.calls and is_extension(value):
            try:
                load_extension(setting.key, value, setting.calls)
            except ConfigError as error:
                problems.append(str(error))
    return problems


def get_value(job: JobConfig, key: str) -> Any:
    """Return the value of a dotted `key`; raises AttributeError or KeyError if it names no
    setting.
    """
    value: Any = job
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def find_nearest(key: str) -> list[str]:
    """Return at most three settings that the user may have meant by an unknown `key`: a similar
    name in its section, a similar key, or the same name in other sections.
    """
    section, _, name = key.rpartition(".")
    names = [setting.name for setting in find_section(section) or []]
    if near := get_close_matches(name, names, 1):
        return [f"{section}.{near[0]}"]
    same = [each for each, setting in get_settings().items() if setting.name == name]
    return get_close_matches(key, get_settings(), 1, 0.85) or (same if len(same) <= 3 else [])


def spell_dtype(text: str) -> str:
    """Return `bfloat16` for `bf16` or `torch.bfloat16`, and so on; other strings in lower case."""
    name = text.lower().removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(
        name, name
    )


def format_value(value: object) -> str:
    """Return `value` in TOML syntax: one line, strings quoted and escaped, floats that read back
    equal.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON does not escape this character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)
