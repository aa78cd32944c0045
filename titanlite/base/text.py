"""Text formatting and parsing: tables, sizes, folded names; similar words, patterns, dates; command
lines.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn

from titanlite.base.errors import ConfigError, TitanliteError, raise_problems

_MOST_NAMES = 16
_MOST_NAME_CHARS = 80
_MOST_ERROR_CHARS = 400
_NUMBER = re.compile(r"\.(\d+)\.")


def format_table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> str:
    """Format `rows`, of which the first is the header, in columns as wide as their widest cell; one
    line per row.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join((indent + line).rstrip() for line in lines)


def format_count(number: float, noun: str) -> str:
    """Format a count: `1 file`, `2,000 files`, `0.5 epochs`."""
    return f"{number:{',' if isinstance(number, int) else 'g'}} {noun}{'' if number == 1 else 's'}"


def format_size(nbytes: int) -> str:
    """Format a file size, in powers of 1000."""
    return _scale(nbytes, ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def format_memory(nbytes: float) -> str:
    """Format an amount of memory, in powers of 1024."""
    return _scale(nbytes, ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def _scale(number: float, *units: tuple[str, float]) -> str:
    for unit, scale in units:
        if abs(number) >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f} B"


def list_names(names: Iterable[object], between: str = ", ", most: int = _MOST_NAMES) -> str:
    """Join `names`; if there are more than `most`, the first ones and the number of the others.
    Long names are cut.
    """
    shown = [cut(str(name), _MOST_NAME_CHARS) for name in names]
    rest = len(shown) - most
    return between.join(shown[:most]) + (f" and {rest} more" if rest > 0 else "")


def describe_error(error: BaseException) -> str:
    """Return the class and text of `error` in one line, cut to 400 characters, without a full stop.

    Errors of other packages may be long: transformers' error about an unknown model has 7,000
    characters.
    """
    text = cut(" ".join(str(error).split())).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without a full stop; its class name if it has no
    text.
    """
    return str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__


def cut(text: str, most: int = _MOST_ERROR_CHARS) -> str:
    """Return the first `most` characters of `text`, and the number of omitted ones."""
    return text if len(text) <= most else f"{text[:most]} [{len(text) - most:,} more characters]"


def fold_name(name: str) -> str:
    """Return the name of a tensor with `*` in place of its layer's number, so that all layers have
    the same name.
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def fold_names(names: Iterable[str]) -> str:
    """Return the `names` of tensors folded over layers, with the numbers of their layers, such as
    `model.layers.*.mlp.gate.expert_bias (layers 3, 4)`.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        number = _NUMBER.search(name)
        groups.setdefault(fold_name(name), []).append(number[1] if number else "")
    return "; ".join(f"{pattern} (layers {list_names(at)})" for pattern, at in groups.items())


def split_patterns(key: str, text: str) -> list[str]:
    """Return the comma-separated patterns of the setting `key` = `text`.

    Raises ConfigError: there is nothing between two commas.
    """
    patterns = [part.strip() for part in text.split(",")] if text.strip() else []
    if "" in patterns:
        raise ConfigError(f"{key} = {text!r} has nothing between two commas. Remove one of them.")
    return patterns


def parse_multipliers(key: str, text: str) -> dict[str, float]:
    """Return the comma-separated `pattern=factor` of the setting `key` = `text`, in order.

    Raises ConfigError: an entry is not of this form, its factor is not positive and finite, or a
    pattern occurs twice. Lists all problems.
    """
    found: dict[str, float] = {}
    problems: list[str] = []
    for part in split_patterns(key, text):
        pattern, _, factor = (side.strip() for side in part.rpartition("="))
        try:
            value = float(factor)
        except ValueError:
            value = math.nan
        if not pattern or not 0 < value < math.inf:
            problems.append(
                f"'{part}' is not pattern=factor with a positive factor. Write for example "
                "'lm_head*=2'."
            )
        elif pattern in found:
            problems.append(f"'{pattern}' is there twice. Keep one.")
        else:
            found[pattern] = value
    raise_problems(ConfigError, f"{key} = {text!r}", problems)
    return found


def parse_object(key: str, text: Any) -> dict[str, Any]:
    """Return the JSON object in the string value of setting `key`, which may be empty.

    Raises ConfigError: the value is not a JSON object.
    """
    try:
        found = json.loads(text or "{}") if isinstance(text, str) else text
    except ValueError:
        found = None
    if not isinstance(found, dict):
        example = '"question": "problem"' if key.endswith("fields") else '"enable_thinking": false'
        raise ConfigError(
            f'{key} = "{text}" is not a JSON object. Write one, for example {{{example}}}.'
        )
    return found


def parse_date(key: str, text: str) -> date | None:
    """Return the ISO date in the string value of setting `key`, or None if it is empty.

    Raises ConfigError: the value is not an ISO date.
    """
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise ConfigError(f'{key} = "{text}" is not a date. Write it as YYYY-MM-DD.') from None


def find_near(word: str, words: Iterable[str]) -> str:
    """Return the most similar of `words`, ignoring case; "" if none is similar."""
    lowered = {each.lower(): each for each in words}
    return next((lowered[near] for near in get_close_matches(word.lower(), lowered, 1)), "")


def suggest(word: str, words: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` with the most similar of `words`; "" if none is similar."""
    near = find_near(word, words)
    return f" Did you mean '{near}'?" if near else ""


def command(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Wrap `main` to return an exit code: its own, 0 for None, or 2 after printing a
    `TitanliteError`.
    """

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv) or 0
        except TitanliteError as error:
            sys.stderr.write(f"titanlite: error: {error}\n")
            return 2

    return run


class Parser(argparse.ArgumentParser):
    """Parser of the arguments of `python -m titanlite NAME`; it raises a `ConfigError` instead of
    exiting.
    """

    def __init__(self, name: str, description: str = "", *, add_help: bool = True) -> None:
        super().__init__(
            f"python -m titanlite {name}", None, description, add_help=add_help, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else f". `{self.prog} --help` lists the arguments."
        raise ConfigError(f"{self.prog.rpartition(' ')[2]}: {message}{end}")
