"""User-defined functions and objects, which settings name as "package.module:name".

The module is imported from the folder of the configuration file, the current folder, PYTHONPATH or
the environment.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any

from titanlite.base.errors import ConfigError
from titanlite.base.text import describe_error, suggest

FORM = "package.module:name"
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_folders: list[Path] = []  # folders of configuration files, the latest first


def is_extension(value: object) -> bool:
    """Return True for a string of the form "package.module:name"."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def import_from(folder: Path) -> None:
    """Make `folder`, the folder of a configuration file, the first folder that extensions are
    imported from.
    """
    _folders.insert(0, folder.resolve())


def load_extension(key: str, name: str, calls: Sequence[str] = ()) -> Any:
    """Import the object that the setting `key` = `name` names. `calls` are the parameter lists with
    which it may be called, see `get_call`.

    Raises ConfigError: the object cannot be imported, does not exist, or cannot be called with any
    of them.
    """
    module_name, _, attribute = name.partition(":")
    where = f'{key} = "{name}"'
    sys.path += [
        folder
        for folder in dict.fromkeys(map(str, [*_folders, Path.cwd()]))
        if folder not in sys.path
    ]
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # noqa: BLE001  whatever the user's module does when it is imported; sys.exit, too
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            remedy = (
                "The module must lie in the folder of the configuration file, in the current "
                "folder, on PYTHONPATH, or be installed."
            )
        else:  # the module exists, and its code fails
            remedy = (
                f"{_describe_line(error)}. "
                f"{f'Install {missing}, or correct' if missing else 'Correct'} it there."
            )
        raise ConfigError(
            f"{where}: cannot import {module_name}: {describe_error(error)}. {remedy}"
        ) from None
    if not hasattr(module, attribute):
        hint = suggest(attribute, vars(module)) or " Correct the name."
        raise ConfigError(f"{where}: {module_name} has no '{attribute}'.{hint}")
    found = getattr(module, attribute)
    if calls and not callable(found):
        raise ConfigError(
            f"{where}: it is {type(found).__name__}, not a function. Name a function of "
            f"{module_name}."
        )
    if calls and get_call(found, calls) is None:
        wanted = " or ".join(f"{attribute}({call})" for call in calls)
        has = f"{attribute}{inspect.signature(found)}"
        raise ConfigError(
            f"{where}: it is called as {wanted}, but it is {has}. Give it these parameters."
        )
    return found


def _describe_line(error: BaseException) -> str:
    """Return a sentence with the line of code that raised `error`."""
    if isinstance(error, SyntaxError):  # the code was never run
        return f"It is in {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    last = frames[-1]
    return f"It was raised in {last.filename}, line {last.lineno}: {last.line}"


def get_call(function: Any, calls: Sequence[str]) -> str | None:
    """Return the first of `calls`, such as "logits, labels", that fits the parameters of
    `function`, or None. If there are several, the names must match too.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a C function without a signature
        return calls[0]
    for call in calls:
        names = call.split(", ")
        try:
            signature.bind(*names)
        except TypeError:
            continue
        if len(calls) == 1 or [*signature.parameters][: len(names)] == names:
            return call
    return None
