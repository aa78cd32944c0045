"""Settings whose text has a grammar: shell patterns over names of parameters or modules, JSON objects, dates."""

import json
import math
from collections.abc import Iterable
from datetime import date
from fnmatch import fnmatchcase
from typing import Any

from titanlite.base.errors import ConfigError, raise_problems


def split_patterns(key: str, text: str) -> list[str]:
    """Return the comma-separated patterns of the setting `key` = `text`. ConfigError: nothing between two commas."""
    patterns = [part.strip() for part in text.split(",")] if text.strip() else []
    if "" in patterns:
        raise ConfigError(f"{key} = {text!r} has nothing between two commas. Remove one of them.")
    return patterns


def parse_multipliers(key: str, text: str) -> dict[str, float]:
    """Return the comma-separated `pattern=factor` of the setting `key` = `text`, in order.

    Raises ConfigError: an entry is not of this form, its factor is not positive and finite, or a pattern is there
    twice. All problems at once.
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
            problems.append(f"'{part}' is not pattern=factor with a positive factor. Write for example 'lm_head*=2'.")
        elif pattern in found:
            problems.append(f"'{pattern}' is there twice. Keep one.")
        else:
            found[pattern] = value
    raise_problems(ConfigError, f"{key} = {text!r}", problems)
    return found


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return those of the dotted `names` that `pattern` matches as a whole, or from one of their segments on.

    So `q_proj` and `self_attn.q_proj` match `model.layers.0.self_attn.q_proj`, as in PEFT's target_modules.
    """
    return [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]


def parse_object(key: str, text: Any) -> dict[str, Any]:
    """Return the JSON object that setting `key` has as text, which may be empty. ConfigError: it is something else."""
    try:
        found = json.loads(text or "{}") if isinstance(text, str) else text
    except ValueError:
        found = None
    if not isinstance(found, dict):
        example = '"question": "problem"' if key.endswith("fields") else '"enable_thinking": false'
        raise ConfigError(f'{key} = "{text}" is no JSON object. Write one, for example {{{example}}}.')
    return found


def parse_date(key: str, text: str) -> date | None:
    """Return the date that setting `key` has as ISO text, which may be empty. ConfigError: it is something else."""
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise ConfigError(f'{key} = "{text}" is no date. Write it as YYYY-MM-DD.') from None
