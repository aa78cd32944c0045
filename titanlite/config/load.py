"""Loading of a checked `JobConfig` from the command line, and saving it as TOML.

Each value is set by `OmegaConf.update`, which converts it to the declared type. `from_dotlist` and
`from_cli` would read it as YAML 1.1 before they know the type: `off` would become False, and
`12:30` would become 750.
"""

import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.extension import FORM, import_from, is_extension
from titanlite.base.files import read_regular, replace_file
from titanlite.base.text import cut, find_near, list_names, parse_object
from titanlite.config.check import check_values, find_ignored
from titanlite.config.data import SourceSection
from titanlite.config.defaults import fill_in, is_derived
from titanlite.config.schema import JobConfig
from titanlite.config.settings import (
    SOURCES,
    TABLES,
    Problem,
    Setting,
    find_nearest,
    find_section,
    find_setting,
    format_value,
    get_sections,
    get_sections_of,
    get_value,
    get_values,
    spell_dtype,
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
CODE = "configuration"  # named in messages about settings given in Python
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "one text in quotes",
}
_OTHER_NAMES = (
    "docs/config.md has all settings; docs/from_trl.md, docs/from_axolotl.md and "
    "docs/from_torchtitan.md have the names of other trainers."
)


def load_config(argv: Sequence[str]) -> JobConfig:
    """Read the TOML file and the overrides in the arguments `argv`; for `--help`, print a help text
    and exit.

    Raises ConfigError: an argument, the file, a key or a value is wrong or out of range
    (`check_values`); lists all problems.
    """
    reader = Reader()
    path = reader.read_arguments(argv)
    if path is not None:
        reader.set_table(path, reader.read_file(path))
    return reader.finish(path)


def save_resolved(job: JobConfig, path: str | Path) -> None:
    """Write `job` to the TOML file `path`, in a form that `load_config` reads as `job` again. Its
    folder is created.

    Raises OSError: the file cannot be written; an existing file keeps its content.
    """
    lines: list[str] = []
    for section, settings in get_sections_of(job).items():
        body = []
        for setting in settings:
            value = get_value(job, setting.key)
            if value is not None and not is_derived(job, setting.key):
                body.append(f"{setting.name} = {format_value(value)}")
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
            setting.key: value
            for setting, value in get_values(one)
            if setting.key.endswith("_path") or not is_derived(one, setting.key)
        }
        for one in (before, job)
    )
    keys = (key for key in old | new if old.get(key) != new.get(key))
    return {key: (old.get(key), new.get(key)) for key in keys}


def format_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return `changes` as 'optimizer.lr 0.003 -> 0.001, ...'."""

    def show(value: object) -> str:
        return "unset" if value is None else format_value(value)

    return ", ".join(f"{key} {show(old)} -> {show(new)}" for key, (old, new) in changes.items())


class Reader:
    """A configuration that is being filled, with the origin of each value and all problems."""

    def __init__(self) -> None:
        # imported here, because kernels and their benchmarks also run without OmegaConf
        from omegaconf import OmegaConf

        self.omegaconf = OmegaConf
        self.config: Any = OmegaConf.structured(JobConfig)
        self.overrides: list[tuple[str, str, str]] = []  # (origin, key, text)
        self.given: dict[str, str] = {}  # key or section -> origin
        self.problems: list[tuple[str, str]] = []  # where, text
        # keys and sections with a problem; further problems of the same key are not reported
        self.wrong: set[str] = set()
        self.is_whole = True  # False: a file that might set the missing values cannot be read

    def read_arguments(self, argv: Sequence[str]) -> str | None:
        """Return the configuration file, and store the overrides for `finish`; for `--help`, print
        a help text and exit.
        """
        paths: list[str] = []
        queue = list(argv)
        while queue:
            argument = queue.pop(0)
            key, between, text = argument.removeprefix("--").partition("=")
            if argument in ("-h", "--help"):
                sys.stdout.write(USAGE.format(sections=", ".join(get_sections())))
                raise SystemExit(0)
            if not argument.startswith("--") or not key:
                self.refuse(f"argument {argument!r}", "unknown. Write --section.key=value.")
                continue
            if not between and queue and not queue[0].startswith("--"):
                between = " "
                text = queue.pop(0)
            where = f"override {f'--{key}{between}{text}'!r}"
            if key in _FILE_FLAGS:
                paths.append(text)
            elif between:
                self.overrides.append((where, key, text))
            else:
                self.refuse(where, f"has no value. Write --{key}=VALUE.", key)
        if len(paths) == 1 and paths[0]:
            return paths[0]
        found = f"{len(paths)} files ({', '.join(paths)})" if any(paths) else "no file"
        self.refuse("--config", f"names {found}. Write --config FILE once.{_list_configs()}")
        self.is_whole = False
        return None

    def read_file(self, path: str) -> dict[str, object]:
        """Return the parsed TOML file; if it cannot be read, record a problem and return an empty
        table.
        """
        try:
            return tomllib.loads(read_regular(path).decode("utf-8"))
        except OSError as error:
            file = Path(path)
            what = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
            near = find_near(file.stem, [found.stem for found in file.parent.glob("*.toml")])
            hint = f"Did you mean '{file.with_name(near)}.toml'?" if near else "Check --config."
            self.refuse(path, f"{what}. {hint}{_list_configs()}")
        # invalid UTF-8, invalid TOML, too many digits or brackets
        except (ValueError, RecursionError) as error:
            self.refuse(
                path,
                f"not valid TOML: {error}. Write sections as [model], each once; text in quotes "
                f"(with a \\ in single ones); true or false. {_OTHER_NAMES}",
            )
        self.is_whole = False
        return {}

    def set_table(self, where: str, table: Mapping[str, object], section: str = "") -> None:
        """Set the values of one TOML table and of the tables inside it."""
        self._add_source(section)
        self.given[section] = where
        for name, value in table.items():
            key = f"{section}.{name}".lstrip(".")
            if isinstance(value, dict) and find_section(key) is not None:
                self.set_table(where, cast(dict[str, object], value), key)
            else:
                self.set(where, key, value)

    def _set_text(self, where: str, key: str, text: str) -> None:
        """Set one setting from an override of the command line, or one entry of a table."""
        table, _, name = key.rpartition(".")
        setting = find_setting(key)
        value: Any = text
        if setting is None and table.endswith(TABLES) and find_setting(table) is not None:
            entries: dict[str, Any] = {}
            with suppress(ConfigError):  # the present value has its own problem
                entries |= parse_object(table, get_value(self._get_job(), table))
            with suppress(ValueError):
                value = text if table.endswith("fields") else json.loads(text)
            key = table
            value = entries | {name: value}
        elif setting is not None and setting.optional and text == "none":
            value = None
        elif setting is not None and setting.metadata.get("is_list") and text.startswith("["):
            with suppress(ValueError):
                value = json.loads(text)
        self.set(where, key, value)

    def set(self, where: str, key: str, value: Any) -> None:
        """Set one setting, or record why the value does not fit it."""
        setting = find_setting(key)
        if setting is None:
            self._refuse_key(where, key, value)
            return
        if setting.name in TABLES and isinstance(value, dict):
            value = json.dumps(value)
        if setting.metadata.get("is_list") and isinstance(value, list):
            value = ", ".join(map(str, value))
        if spell_dtype(str(value)) in setting.choices:
            value = spell_dtype(str(value))
        if isinstance(value, str) and setting.name.endswith(("path", "folder")):
            value = os.path.expanduser(value)
        problem = _find_misfit(setting, value)
        try:
            self._add_source(setting.section)
            if not problem:
                self.omegaconf.update(self.config, key, value)
                self.given[key] = where
        except (ValueError, OverflowError):
            more = "; several are [data.sources.NAME]" if key.endswith("path") else ""
            problem = f"does not fit. Write {_KINDS[setting.kind]}{more}."
        if problem:
            self.refuse(where, f"{key} = {cut(format_value(value), 80)} {problem}", key)

    def _get_job(self) -> JobConfig:
        return cast(JobConfig, self.omegaconf.to_object(self.config))

    def _add_source(self, section: str) -> None:
        name = section.removeprefix(f"{SOURCES}.")
        if name != section and name not in self.config.data.sources:
            self.config.data.sources[name] = SourceSection()

    def _refuse_key(self, where: str, key: str, value: object) -> None:
        """Record that `key` is unknown, and suggest the nearest keys; or that it is a section, and
        show how to set its keys.
        """
        is_table = isinstance(value, dict)
        of_sources = key.startswith(SOURCES)
        section = key if find_section(key) is not None else key.rpartition(".")[0]
        settings = find_section(section) or []
        near = [find_near(key, get_sections())] if is_table else find_nearest(key)
        near = [each for each in near if each]
        problem = f"unknown {'section' if is_table else 'key'} {key!r}"
        if section == key:
            example = settings[0].key if settings else f"{key}.NAME.path"
            problem = f"{key} is a section"
            below = example.rpartition(".")[0]
            hint = f". Set its keys one by one: [{below}] and keys below, or --{example}=VALUE."
        elif section == SOURCES:
            hint = f". Name a source with small letters, digits and underscores: {SOURCES}.my_data."
        elif near:
            hint = f"; did you mean {' or '.join(map(repr, near))}?"
        else:
            names = ", ".join(setting.name for setting in settings) or ", ".join(get_sections())
            hint = f". Known here: {names}. {_OTHER_NAMES}"
        self.refuse(where, problem + hint, *(["data"] if of_sources else [key, *near]))

    def refuse(self, where: str, problem: str, *wrong: str) -> None:
        """Record a problem, found at `where`, of the keys `wrong`."""
        self.problems.append((where, problem))
        self.wrong.update(wrong)

    def add(self, problems: Iterable[Problem], path: str) -> None:
        """Record each problem under the file or argument that gave its setting, or else under the
        file `path`. Keys that already have a problem are skipped.
        """
        for key, text in problems:
            names = {f"{each}." for each in self.wrong}
            if not any(f"{key}.".startswith(each) or each.startswith(f"{key}.") for each in names):
                self.refuse(self.given.get(key, path), text, key)

    def finish(self, path: str | None) -> JobConfig:
        """Apply the overrides and return the configuration; check values only if it `is_whole`.

        Raises ConfigError: the configuration has problems; lists all of them.
        """
        for override in self.overrides:
            self._set_text(*override)
        if path is not None:
            import_from(Path(path).parent)
        job = self._get_job()
        self.add(fill_in(job, self.given, "" if path is None else Path(path).stem), path or CODE)
        if self.is_whole:
            self.add([*check_values(job), *find_ignored(job, self.given)], path or CODE)
        wheres = {where for where, _ in self.problems}
        if len(wheres) == 1:
            raise_problems(ConfigError, wheres.pop(), [problem for _, problem in self.problems])
        raise_problems(ConfigError, CODE, map(": ".join, self.problems))
        return job


def _find_misfit(setting: Setting, value: Any) -> str:
    """Return the problem of a value that does not fit but that OmegaConf would accept; "" if it
    fits.
    """
    is_free = setting.calls is not None and is_extension(value)
    if setting.choices and value not in (*setting.choices, None) and not is_free:
        near = find_near(str(value), setting.choices)
        hint = f'; did you mean "{near}"?' if near else ". Write one of these."
        choices = [*setting.choices, *([] if setting.calls is None else [FORM])]
        return f"is not one of {', '.join(map(format_value, choices))}{hint}"
    if setting.calls and not setting.choices and value and not is_free:
        return f'does not name a function. Write "{FORM}".'
    if isinstance(value, bool | int) and isinstance(value, bool) != (setting.kind is bool):
        return f"does not fit. Write {_KINDS[setting.kind]}."
    if "${" in str(value) or value == "???":
        return "holds '${' or is '???', which OmegaConf resolves. Write the value it stands for."
    # Bytes of the command line that are not UTF-8 arrive as surrogates.
    if any("\ud800" <= char <= "\udfff" for char in str(value)):
        return "is not valid UTF-8 text. Use UTF-8."
    return ""


def _list_configs() -> str:
    """Return ' Files in configs: a.toml, b.toml' for a user who left out the file, or ""."""
    names = sorted(path.name for path in Path("configs").glob("*.toml"))
    return f" Files in configs: {list_names(names)}" if names else ""
