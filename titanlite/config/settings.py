"""All settings: every leaf of the schema by its dotted key, how its value is read."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from titanlite.base.errors import ConfigError
from titanlite.base.extension import FORM, is_extension, load_extension
from titanlite.base.text import find_near
from titanlite.config.data import SourceSection
from titanlite.config.schema import JobConfig

# settings with a table of the user's names, kept as JSON text
TABLES = ("chat_template_kwargs", "fields")
SOURCES = "data.sources"  # section whose tables the user names
_INT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_REMEDIES = {
    int: "Write a whole number",
    float: "Write a number",
    bool: "Write true or false",
    str: "Put it in quotes",
}
_KIND_NAMES = {int: "an int", float: "a float", bool: "a bool", str: "a str"}
_SOURCE = re.compile(rf"{re.escape(SOURCES)}\.([a-z]\w*)(?:\.(\w+))?", re.ASCII)
_KINDS = (int, float, bool, str)
BOUNDS = ("ge", "gt", "le", "lt", "also")


class Setting(NamedTuple):
    """One leaf of the schema."""

    key: str  # dotted: section.name
    kind: type  # int, float, bool or str
    choices: tuple[str, ...]  # allowed values, next to extensions; empty: any
    optional: bool  # None is allowed
    default: Any
    doc: str
    calls: tuple[str, ...] | None = None  # how an extension is called that it may name
    is_list: bool = False  # text with commas, which may be given as a list
    # of a number: ge, gt, le, lt, and a value that it may have `also`
    bounds: Mapping[str, float] = {}

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def walk_schema(schema: type, section: str = "") -> Iterable[Setting]:
    """Yield the settings of `schema` and of the dataclasses inside it, in order, but not of
    dictionaries.

    Raises TypeError: a field's type is not int, float, bool, str, a Literal of strings, or one of
    these or None.
    """
    hints = get_type_hints(schema)
    for item in fields(schema):
        key, declared = f"{section}.{item.name}".lstrip("."), hints[item.name]
        if get_origin(declared) is dict and is_dataclass(get_args(declared)[1]):
            continue
        if is_dataclass(declared):
            yield from walk_schema(cast(type, declared), key)
            continue
        kinds = (
            list(get_args(declared)) if get_origin(declared) in (Union, UnionType) else [declared]
        )
        optional = type(None) in kinds
        kinds = [kind for kind in kinds if kind is not type(None)]
        choices = (
            get_args(kinds[0])
            if get_origin(kinds[0]) is Literal
            else item.metadata.get("choices", ())
        )
        kind = str if choices and all(isinstance(choice, str) for choice in choices) else kinds[0]
        if len(kinds) != 1 or kind not in _KINDS:
            raise TypeError(
                f"schema: {key} has type {declared}, which no value can be read as. Use another "
                "type."
            )
        default = item.default if item.default_factory is MISSING else item.default_factory()
        calls, is_list = item.metadata.get("calls"), item.metadata.get("is_list", False)
        bounds = {name: item.metadata[name] for name in BOUNDS if name in item.metadata}
        yield Setting(
            key,
            kind,
            choices,
            optional,
            default,
            item.metadata.get("doc", ""),
            calls,
            is_list,
            bounds,
        )


@cache
def get_settings() -> dict[str, Setting]:
    """Return all settings by dotted key, in the order of the schema."""
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
    """Return the settings of section `key`, or None if there is no such section; `data.sources` has
    tables only.
    """
    if key == SOURCES:
        return []
    match = _SOURCE.fullmatch(key)
    return get_source_section(match[1]) if match and not match[2] else get_sections().get(key)


def find_setting(key: str) -> Setting | None:
    """Return the setting with the dotted `key`, or None."""
    match = _SOURCE.fullmatch(key)
    if match and match[2]:
        return next(
            (setting for setting in get_source_section(match[1]) if setting.name == match[2]), None
        )
    return get_settings().get(key)


def get_sections_of(job: JobConfig) -> dict[str, list[Setting]]:
    """Return `get_sections`, with the tables of `data.sources` that `job` has."""
    return get_sections() | {
        f"{SOURCES}.{name}": get_source_section(name) for name in job.data.sources
    }


def get_values(job: JobConfig) -> Iterator[tuple[Setting, Any]]:
    """Yield the settings that `job` has, with their values."""
    for setting in (each for settings in get_sections_of(job).values() for each in settings):
        yield setting, get_value(job, setting.key)


def find_extension_problems(job: JobConfig) -> list[str]:
    """Return what is wrong with the user's functions that settings of `job` name. Imports their
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
        value = (
            cast(Mapping[str, Any], value)[name]
            if isinstance(value, dict)
            else getattr(value, name)
        )
    return value


def find_nearest(key: str, candidates: Iterable[str]) -> list[str]:
    """Return up to three dotted candidates that `key` may have meant, all equally near; empty if
    none is near.
    """
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


def spell_dtype(text: str) -> str:
    """Return `bfloat16` for `bf16` or `torch.bfloat16`, and so on; other texts in small letters."""
    name = text.lower().removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(
        name, name
    )


def format_value(value: object) -> str:
    """Return `value` as TOML writes it: one line, strings quoted and escaped, floats that read back
    equal.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # which JSON leaves as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, int | float) else str(value)


class BadValueError(Exception):
    """A value does not fit its setting; the text is the problem without its place."""


def check_value(setting: Setting, value: Any) -> Any:
    """Check `value` (from TOML, or converted from an override's text); return it as the setting
    stores it.
    """
    shown = f"{setting.key} = {shorten(format_value(value))}"
    if setting.kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if (
        isinstance(value, str)
        and value not in setting.choices
        and spell_dtype(value) in setting.choices
    ):
        value = spell_dtype(value)
    if setting.is_list and isinstance(value, list):
        value = ", ".join(map(str, value))
    if setting.kind is str and setting.name.endswith(("path", "folder")) and isinstance(value, str):
        value = os.path.expanduser(value)
    is_free = setting.calls is not None and is_extension(value)
    if setting.choices and value not in setting.choices and not is_free:
        near = find_near(str(value), setting.choices)
        hint = f'; did you mean "{near}"?' if near else ". Write one of these."
        if setting.key == "data.dataset" and not near:
            hint = ". For your own data set data.path: a file, folder or hub id."
        choices = [*setting.choices, *([] if setting.calls is None else [FORM])]
        raise BadValueError(f"{shown} is not one of {', '.join(map(format_value, choices))}{hint}")
    if setting.calls and not setting.choices and value and not is_free:
        raise BadValueError(f'{shown} does not name a function. Write "{FORM}".')
    if type(value) is not setting.kind:  # not isinstance: a bool is an int
        raise BadValueError(
            f"{shown} is not {_KIND_NAMES[setting.kind]}. {_remedy(setting, value)}."
        )
    if isinstance(value, str):
        if "${" in value:
            raise BadValueError(
                f"{shown} contains '${{', which OmegaConf takes for an interpolation. Write the "
                "value it stands for."
            )
        if value == "???":
            raise BadValueError(
                f"{shown} is OmegaConf's mark of a missing value. Write another text."
            )
    elif setting.kind is int and not -(2**63) <= value < 2**63:
        raise BadValueError(f"{shown} does not fit in 64 bits. Write a smaller number.")
    elif not math.isfinite(value):  # after the range of int: isfinite overflows on huge ones
        raise BadValueError(f"{shown} is not finite. Write a finite number.")
    return value


def _remedy(setting: Setting, value: Any) -> str:
    """Return what to write instead of a TOML value of the wrong type."""
    remedy = _REMEDIES[setting.kind]
    if isinstance(value, str) and setting.kind is not str:
        with suppress(BadValueError):  # otherwise the general remedy; TOML has no null
            return (
                f"Write {format_value(parse_text(setting._replace(optional=False), value))} "
                "without quotes"
            )
    if setting.kind is int and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}"
    if setting.name in TABLES:
        return 'Write a table, as {question = "problem"}'
    if isinstance(value, list) and setting.key.endswith("path"):
        return "Write one path; several are [data.sources.NAME] with a path each"
    if setting.kind is str and isinstance(value, int | float):
        return f"Put it in quotes: {format_value(format_value(value))}"
    return remedy + (", or leave it out" if setting.optional else "")


def parse_text(setting: Setting, text: str) -> Any:
    """Convert an override's text to the setting's declared type; never guess from how the text
    looks.
    """
    if setting.optional and text == "none":
        return None
    value: Any = text
    if setting.is_list and text.startswith("["):
        with suppress(ValueError):
            value = json.loads(text)
    if setting.kind is str:
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of the command line that Python passes on as surrogates
            raise BadValueError(f"{setting.key} is not valid UTF-8 text. Use UTF-8.") from None
    elif setting.kind is bool and text in ("true", "false"):
        value = text == "true"
    # Python refuses more than 4300 digits
    elif setting.kind is int and _INT.fullmatch(text) and len(text) < 100:
        value = int(text)
    elif setting.kind is float and _FLOAT.fullmatch(text):
        value = float(text)
    else:
        hint = _REMEDIES[setting.kind]
        none = ", or none" if setting.optional else ""
        shown = shorten(text or "''")
        raise BadValueError(
            f"{setting.key} = {shown} is not {_KIND_NAMES[setting.kind]}. {hint}{none}."
        )
    return check_value(setting, value)


def shorten(text: str) -> str:
    """Cut to at most 80 characters, so that a pasted table or template does not bury the
    message.
    """
    return text if len(text) <= 80 else f"{text[:77]}..."
