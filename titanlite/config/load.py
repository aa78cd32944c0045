"""Loading of a checked `JobConfig` from the command line, and saving as TOML.

TOML values and override texts are converted by the declared type, and only then given to OmegaConf:
its own parsers read YAML 1.1 before they know the type (`off` becomes False, `12:30` becomes 750,
True is a valid int) and stop at the first error, without the file's name.
"""

import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.extension import import_from
from titanlite.base.files import read_regular, replace_file
from titanlite.base.text import find_near, list_names, parse_object
from titanlite.config.check import check_values
from titanlite.config.data import SourceSection
from titanlite.config.defaults import fill_in, is_derived
from titanlite.config.schema import JobConfig
from titanlite.config.settings import (
    SOURCES,
    TABLES,
    BadValueError,
    Setting,
    check_value,
    find_nearest,
    find_section,
    find_setting,
    format_value,
    get_sections,
    get_sections_of,
    get_settings,
    get_value,
    get_values,
    parse_text,
    shorten,
)

USAGE = """\
usage: --config FILE [--section.key=value ...]

  --config FILE           TOML file of the run; --job.config_file FILE means the same
  --section.key=value     override one setting of the file; '--section.key value' means the
                          same, the last one wins
  -h, --help              print this text

sections: {sections}
example:  --config configs/qwen3_moe.toml --training.steps=50 --model.overrides.num_layers=4
Every setting with its type and default: docs/config.md
"""

_FILE_FLAGS = ("config", "job.config_file")
_MOST_FILE_BYTES, CODE = 16 << 20, "configuration"  # CODE: the place of a setting that Python gives
_LANGUAGES = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".py": "Python"}
# Pages for what other trainers' files are known by: a key, or the suffix.
_PAGES = {
    "base_model": "docs/from_axolotl.md",
    "model_name_or_path": "docs/from_trl.md",
    ".py": "docs/from_torchtitan.md",
}
_OTHER_NAMES = (
    "Names of other trainers: docs/from_trl.md, docs/from_axolotl.md, docs/from_torchtitan.md."
)
_KEY = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+")


def load_config(argv: Sequence[str]) -> JobConfig:
    """Read the TOML file and the overrides named by the arguments `argv`; on `--help` print a text
    and leave.

    Raises ConfigError: an argument, the file, a key or a value is wrong or out of range
    (`check_values`); all problems.
    """
    reader = Reader()
    path, overrides = reader.read_arguments(argv)
    table = None if path is None else reader.read_file(path)
    reader.read_table(path or CODE, table or {})
    return reader.finish(path, overrides, is_whole=table is not None)


def save_resolved(job: JobConfig, path: str | Path) -> None:
    """Write `job` to the TOML file `path`, which `load_config` reads as `job` again. Its folder is
    made.

    Raises OSError: the file cannot be written; one that was there before is left as it was.
    """
    lines: list[str] = []
    for section, settings in get_sections_of(job).items():
        values = [
            (each.name, get_value(job, each.key))
            for each in settings
            if not is_derived(job, each.key)
        ]
        body = [f"{name} = {format_value(value)}" for name, value in values if value is not None]
        lines += [f"[{section}]", *body, ""] if body else []
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), "\n".join(lines))


def find_changes(job: JobConfig, path: str | Path) -> dict[str, tuple[Any, Any]]:
    """Return the settings of `job` that differ from those saved in `path`, by key, as (before,
    now).
    """
    try:
        before = load_config(["--config", str(path)]) if Path(path).exists() else job
    except ConfigError:
        return {}
    old, new = (
        {
            s.key: value
            for s, value in get_values(one)
            if s.key.endswith("_path") or not is_derived(one, s.key)
        }
        for one in (before, job)
    )
    both = {key: (old.get(key), new.get(key)) for key in old | new}
    return {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def format_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return `changes` as 'optimizer.lr 0.003 -> 0.001, ...'."""
    shown = [
        [key, *("unset" if value is None else format_value(value) for value in changes[key])]
        for key in changes
    ]
    return ", ".join(f"{key} {before} -> {now}" for key, before, now in shown)


class Reader:
    """Values read so far, where each came from, and all problems."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[tuple[str, str]] = []
        # keys and sections with a problem: a range check on them would mislead
        self.suspects: set[str] = set()

    def read_arguments(self, argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str, str]]]:
        """Return the configuration file and the overrides as (where, key, text); on `--help` print
        a text and leave.
        """
        paths: list[str] = []
        overrides: list[tuple[str, str, str]] = []
        queue = list(argv)
        while queue:
            argument = queue.pop(0)
            key, has_value, text = argument.removeprefix("--").partition("=")
            if argument in ("-h", "--help"):
                sys.stdout.write(USAGE.format(sections=", ".join(get_sections())))
                raise SystemExit(0)
            if not argument.startswith("--") or not key:
                is_file = Path(argument).suffix in (".toml", *_LANGUAGES)
                likely = "--config " if is_file else "--" if key and has_value else ""
                hint = (
                    f"Did you mean '{likely}{argument.lstrip('-+')}'?"
                    if likely
                    else "Write --section.key=value."
                )
                self.refuse(
                    f"argument {argument!r}", f"is neither --config nor an override. {hint}"
                )
                continue
            if not has_value and queue and not queue[0].startswith("--"):
                has_value, text = " ", queue.pop(0)
            where = f"override {f'--{key}{has_value}{text}'!r}"
            if key in _FILE_FLAGS:
                paths.append(text)
            elif has_value:
                overrides.append((where, key, text))
            else:
                self.refuse(where, f"has no value. Write --{key}=VALUE.", key)
        if "" in paths:
            self.refuse("--config", f"no file follows it. Write --config FILE.{_list_configs()}")
        elif not paths:
            self.refuse(
                "command line",
                f"no configuration file. Pass one with --config FILE.{_list_configs()}",
            )
        elif len(paths) > 1:
            self.refuse("--config", f"given {len(paths)} times: {', '.join(paths)}. Keep one.")
        return (paths[0] or None if len(paths) == 1 else None), overrides

    def read_file(self, path: str) -> dict[str, object] | None:
        """Return the parsed TOML file, or None with a problem noted."""
        raw = b""
        try:
            raw = read_regular(path, _MOST_FILE_BYTES)
            return tomllib.loads(raw.decode("utf-8"))
        except FileNotFoundError:
            file = Path(path)
            near = find_near(file.stem, [found.stem for found in file.parent.glob("*.toml")])
            hint = (
                f"Did you mean '{file.with_name(near)}.toml'?"
                if near
                else f"Check --config.{_list_configs()}"
            )
            self.refuse(path, f"no such file. {hint}")
        except OSError as error:
            self.refuse(
                path,
                f"cannot be read: {error.strerror}. Pass a file with --config "
                f"FILE.{_list_configs(path)}",
            )
        # no UTF-8, no TOML, too many digits or brackets
        except (ValueError, RecursionError) as error:
            text = (
                "Write sections as [model], each once; text in quotes (with a \\ in single ones); "
                "true or false"
            )
            self.refuse(
                path, f"{_describe_language(path, raw) or f'not valid TOML: {error}.'} {text}."
            )
        return None

    def read_table(self, where: str, table: dict[str, object], section: str = "") -> None:
        """Take the values of one TOML table and of the tables inside it."""
        for name, value in table.items():
            key = f"{section}.{name}".lstrip(".")
            if "." in name:
                self.refuse(
                    where,
                    f"key {name!r} has a dot inside its quotes. Write it without quotes.",
                    key,
                )
            elif (setting := find_setting(key)) is not None:
                is_table = setting.name in TABLES and isinstance(value, dict)
                self.accept(where, setting, json.dumps(value) if is_table else value)
            elif find_section(key) is None:
                self.refuse_unknown(where, key, "section" if isinstance(value, dict) else "key")
            elif isinstance(value, dict):
                if not value:  # of a source, a mistake to be named
                    self.origins[key] = where
                self.read_table(where, cast(dict[str, object], value), key)
            else:
                shown, header, suspects = shorten(format_value(value)), key, [key]
                if key == SOURCES:  # without them data.path would be missing
                    header, suspects = f"{SOURCES}.NAME", [key, "data.path", "data.dataset"]
                text = f"{key} = {shown} is not a section. Write [{header}] and its keys below."
                self.refuse(where, text, *suspects)

    def read_override(self, where: str, key: str, text: str) -> None:
        """Take one override of the command line."""
        table, _, name = key.rpartition(".")
        if (setting := find_setting(key)) is not None:
            self.accept(where, setting, text, is_text=True)
        elif (setting := find_setting(table)) is not None and setting.name in TABLES:
            self.accept_entry(where, setting, name, text)
        elif (section := find_section(key)) is not None:
            example = section[0].key if section else f"{key}.NAME.path"
            self.refuse(
                where, f"'{key}' is a section. Set its keys one by one: --{example}=VALUE.", key
            )
        else:
            self.refuse_unknown(where, key, "key")

    def accept(self, where: str, setting: Setting, value: Any, *, is_text: bool = False) -> None:
        """Keep a value that fits its setting; note a problem otherwise."""
        try:
            checked = parse_text(setting, value) if is_text else check_value(setting, value)
        except BadValueError as problem:
            self.refuse(where, str(problem), setting.key)
            return
        self.values[setting.key] = checked
        self.origins[setting.key] = where

    def accept_entry(self, where: str, table: Setting, name: str, text: str) -> None:
        """Keep one entry of a table: JSON where entries may be anything, otherwise text."""
        value: Any = text
        with suppress(ValueError):
            value = text if table.name == "fields" else json.loads(text)
        try:
            entries = parse_object(table.key, self.values.get(table.key, ""))
        except ConfigError:
            entries = {}  # what is there is refused by itself
        self.accept(where, table, json.dumps(entries | {name: value}))

    @property
    def source_names(self) -> list[str]:
        """The names of `data.sources`, in the order in which they came."""
        keys = (
            key.removeprefix(f"{SOURCES}.") for key in self.origins if key.startswith(f"{SOURCES}.")
        )
        return list(dict.fromkeys(key.partition(".")[0] for key in keys))

    def refuse_unknown(self, where: str, key: str, noun: str) -> None:
        """Note an unknown key or section, with the nearest match or what there is to choose
        from.
        """
        section, _, name = key.replace("-", "_").rpartition(".")
        while section and find_section(section) is None:
            section = section.rpartition(".")[0]
        settings = find_section(section) or []
        known = (
            [*get_sections(), SOURCES]
            if noun == "section"
            else [*get_settings(), *(s.key for s in settings)]
        )
        nearest = find_nearest(key, known) or [
            each for each in known if each.replace(".", "_") == name
        ]
        if section == SOURCES:
            nearest, hint = (
                [],
                f". Name a source with small letters, digits and underscores: {SOURCES}.my_data.",
            )
        elif nearest:
            hint = f"; did you mean {' or '.join(repr(candidate) for candidate in nearest)}?"
        elif settings:
            hint = (
                f". Keys of [{section}]: {', '.join(setting.name for setting in settings)}. "
                f"{_OTHER_NAMES}"
            )
        else:
            hint = (
                ". Sections: "
                f"{', '.join(section for section in get_sections() if '.' not in section)}. "
                f"{_OTHER_NAMES}"
            )
        self.refuse(where, f"unknown {noun} {key!r}{hint}", key, *nearest)

    def refuse(self, where: str, problem: str, *suspects: str) -> None:
        self.problems.append((where, problem))
        self.suspects.update(suspects)

    def build(self) -> JobConfig:
        """Build the configuration of all values that were accepted."""
        # here: kernels and their benchmarks run where it is missing
        from omegaconf import OmegaConf

        config = OmegaConf.structured(JobConfig)
        for name in self.source_names:  # OmegaConf.update makes none
            config.data.sources[name] = SourceSection()
        for key, value in self.values.items():
            OmegaConf.update(config, key, value)
        return cast(JobConfig, OmegaConf.to_object(config))

    def finish(
        self, path: str | None, overrides: Sequence[tuple[str, str, str]], *, is_whole: bool
    ) -> JobConfig:
        """Take the overrides and build; check ranges only if it `is_whole`: the file might set what
        is missing.
        """
        for where, key, text in overrides:
            self.read_override(where, key, text)
        if path is not None:
            import_from(Path(path).parent)
        job = self.build()
        self.note(fill_in(job, self.origins, "" if path is None else Path(path).stem), path or CODE)
        if is_whole:
            self.note(check_values(job), path or CODE)
        wheres = {where for where, _ in self.problems}
        if len(wheres) == 1:
            raise_problems(ConfigError, wheres.pop(), [problem for _, problem in self.problems])
        raise_problems(
            ConfigError,
            "configuration",
            [f"{where}: {problem}" for where, problem in self.problems],
        )
        return job

    def note(self, problems: Sequence[str], path: str) -> None:
        """Note problems of settings without one already, each where one was given, else in the file
        `path`.
        """
        known = tuple(self.suspects)
        for problem in problems:
            keys = [key for key in _KEY.findall(problem) if find_setting(key) is not None]
            if not any(
                key == suspect or key.startswith(f"{suspect}.") for key in keys for suspect in known
            ):
                wheres = (self.origins.get(key, path) for key in _KEY.findall(problem))
                self.refuse(
                    next((where for where in wheres if where != path), path), problem, *keys
                )


def _describe_language(path: str, raw: bytes) -> str:
    """Say what the file is written in, if that is another language than TOML, and which page helps;
    or "".
    """
    import yaml  # here: only a refusal needs it

    try:
        table = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, RecursionError):
        table = None
    suffix = Path(path).suffix.lower()
    is_table = isinstance(table, dict)
    language = _LANGUAGES.get(suffix, "YAML" if is_table else "")
    if not language:
        return ""
    language = "JSON" if is_table and raw.lstrip()[:1] == b"{" else language
    known: Any = table if is_table else {suffix: ""}
    page = next((page for key, page in _PAGES.items() if key in known), "")
    names = f"{page} has the names of its settings" if page else "docs/config.md has all settings"
    return f"it is {language}, and titanlite reads TOML; {names}."


def _list_configs(folder: str | Path = "configs") -> str:
    """' Files in FOLDER: a.toml, b.toml' or nothing; what a user who forgot the file's name
    needs.
    """
    names = sorted(path.name for path in Path(folder).glob("*.toml"))
    return f" Files in {folder}: {list_names(names)}" if names else ""
