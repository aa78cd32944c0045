"""What can be set: every leaf of the schema by its dotted key, with its type, default and description."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from titanlite.base.errors import ConfigError
from titanlite.base.extension import is_extension, load_extension
from titanlite.config.data import SourceSection
from titanlite.config.schema import JobConfig

TABLES = ("chat_template_kwargs", "fields")  # settings with a table of the user's names, kept as JSON text
SOURCES = "data.sources"  # tables below have names of the user's
_SOURCE = re.compile(rf"{re.escape(SOURCES)}\.([a-z]\w*)(?:\.(\w+))?", re.ASCII)
_KINDS = (int, float, bool, str)


class Setting(NamedTuple):
    """One leaf of the schema."""

    key: str
    """Dotted: section.name"""
    kind: type
    """int, float, bool or str"""
    choices: tuple[str, ...]
    """Allowed values, beside extensions; empty: any"""
    optional: bool
    """None is allowed"""
    default: Any
    doc: str
    calls: tuple[str, ...] | None = None
    """How an extension is called that it may name"""
    is_list: bool = False
    """Text with commas, which may be given as a list"""

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def walk_schema(schema: type, section: str = "") -> Iterable[Setting]:
    """Yield the settings of dataclass `schema` and of the dataclasses inside it, in order, keys below `section`.

    Raises:
        TypeError: A field's type is not int, float, bool, str, a Literal of strings, or one of these or None; or a
            dictionary of dataclasses, which is left out: its keys are the user's.
    """
    hints = get_type_hints(schema)
    for item in fields(schema):
        key, declared = f"{section}.{item.name}".lstrip("."), hints[item.name]
        if get_origin(declared) is dict and is_dataclass(get_args(declared)[1]):
            continue
        if is_dataclass(declared):
            yield from walk_schema(cast(type, declared), key)
            continue
        kinds = list(get_args(declared)) if get_origin(declared) in (Union, UnionType) else [declared]
        optional = type(None) in kinds
        kinds = [kind for kind in kinds if kind is not type(None)]
        choices = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else item.metadata.get("choices", ())
        kind = str if choices and all(isinstance(choice, str) for choice in choices) else kinds[0]
        if len(kinds) != 1 or kind not in _KINDS:
            raise TypeError(f"schema: {key} has type {declared}, which no value can be read as. Use another type.")
        default = item.default if item.default_factory is MISSING else item.default_factory()
        calls, is_list = item.metadata.get("calls"), item.metadata.get("is_list", False)
        yield Setting(key, kind, choices, optional, default, item.metadata.get("doc", ""), calls, is_list)


@cache
def get_settings() -> dict[str, Setting]:
    """All settings by dotted key, in the order of the schema."""
    return {setting.key: setting for setting in walk_schema(JobConfig)}


@cache
def get_sections() -> dict[str, list[Setting]]:
    """Return the settings of each section, nested sections (`model.overrides`) on their own."""
    sections: dict[str, list[Setting]] = {}
    for setting in get_settings().values():
        sections.setdefault(setting.section, []).append(setting)
    return sections


@cache
def get_source_section(name: str) -> list[Setting]:
    """Return the settings of the table `data.sources.NAME`."""
    return list(walk_schema(SourceSection, f"{SOURCES}.{name}"))


def find_section(key: str) -> list[Setting] | None:
    """Return the settings of section `key`, or None if there is no such section; `data.sources` has tables only."""
    if key == SOURCES:
        return []
    match = _SOURCE.fullmatch(key)
    return get_source_section(match[1]) if match and not match[2] else get_sections().get(key)


def find_setting(key: str) -> Setting | None:
    """Return the setting with the dotted `key`, or None."""
    match = _SOURCE.fullmatch(key)
    if match and match[2]:
        return next((setting for setting in get_source_section(match[1]) if setting.name == match[2]), None)
    return get_settings().get(key)


def get_sections_of(job: JobConfig) -> dict[str, list[Setting]]:
    """As `get_sections`, with the tables of `data.sources` that `job` has."""
    return get_sections() | {f"{SOURCES}.{name}": get_source_section(name) for name in job.data.sources}


def find_extension_problems(job: JobConfig) -> list[str]:
    """Return what is wrong with the user's functions that settings of `job` name. Imports their modules."""
    problems = []
    for setting in (each for settings in get_sections_of(job).values() for each in settings if each.calls):
        if is_extension(value := get_value(job, setting.key)):
            try:
                load_extension(setting.key, value, setting.calls or ())
            except ConfigError as error:
                problems.append(str(error))
    return problems


def get_value(job: JobConfig, key: str) -> Any:
    """Return the value of a dotted `key`, for example `get_value(job, "training.steps")`.

    Raises:
        AttributeError, KeyError: `key` names no setting.
    """
    value: Any = job
    for name in key.split("."):
        value = cast(Mapping[str, Any], value)[name] if isinstance(value, dict) else getattr(value, name)
    return value


def find_nearest(key: str, candidates: Iterable[str]) -> list[str]:
    """Up to three dotted candidates that `key` may have meant, all equally near; empty if none is near."""
    section, _, name = key.rpartition(".")
    scores: dict[str, float] = {}
    for candidate in candidates:
        its_section, _, its_name = candidate.rpartition(".")
        likeness = SequenceMatcher(None, name, its_name).ratio()
        if its_name.startswith(f"{name}_"):
            likeness = 0.95  # enable: enable_profiling
        # An exact name in another section beats a vague one here, but a near one here beats it.
        scores[candidate] = likeness + 0.2 * SequenceMatcher(None, section, its_section).ratio()
    best = max(scores.values())
    nearest = [candidate for candidate, score in scores.items() if score == best]
    return nearest if best >= 0.8 and len(nearest) <= 3 else []
