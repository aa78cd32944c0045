"""Command lines of the tools: the spellings of other trainers, the nearest word for unknown ones, one clear error."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn

from titanlite.base.errors import ConfigError, TitanliteError


def find_near(word: str, words: Iterable[str]) -> str:
    """Return the nearest of `words`, in small or large letters; "" if none is near."""
    lowered = {each.lower(): each for each in words}
    return next((lowered[near] for near in get_close_matches(word.lower(), lowered, 1)), "")


def suggest(word: str, words: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` with the nearest of `words`; "" if none is near."""
    near = find_near(word, words)
    return f" Did you mean '{near}'?" if near else ""


def command(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Make `main` return the exit code: its own, 0 for None, or 2 after printing a `TitanliteError`."""

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv) or 0
        except TitanliteError as error:
            sys.stderr.write(f"titanlite: error: {error}\n")
            return 2

    return run


def one_of(*choices: str, spell: Callable[[str], str] = str) -> Callable[[str], str]:
    """Make the type of an argument that is one of `choices`, after `spell` has unified its spellings."""

    def read(text: str) -> str:
        if spell(text) not in choices:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not one of {', '.join(choices)}.{suggest(spell(text), choices)}"
            )
        return spell(text)

    return read


class Parser(argparse.ArgumentParser):
    """Arguments of `python -m titanlite NAME`: `--like-this`, or `--like_this`; what is wrong is a `ConfigError`."""

    def __init__(self, name: str, description: str = "", *, add_help: bool = True) -> None:
        super().__init__(f"python -m titanlite {name}", None, description, add_help=add_help, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; `--model X` is the positional `model`, and a misspelt option is an error."""
        options = [option for action in self._actions for option in action.option_strings]
        takes_model = any(action.dest == "model" and not action.option_strings for action in self._actions)
        model, words, queue = [], [], list(sys.argv[1:] if args is None else args)
        while queue:
            name, has_value, value = queue.pop(0).partition("=")
            if name == "--model" and takes_model:
                model = [value] if has_value else [queue.pop(0)] if queue else []
                continue
            spelled = name.replace("_", "-")
            words.append((spelled if name.startswith("--") and spelled in options else name) + has_value + value)
        known, rest = super().parse_known_args([*model, *words], namespace)
        for name in (word.partition("=")[0] for word in rest if word.startswith("--")):
            if "." not in name and name != "--config" and (hint := suggest(name, options)):
                self.error(f"there is no argument '{name}'.{hint}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else f". `{self.prog} --help` lists the arguments."
        raise ConfigError(f"{self.prog.rpartition(' ')[2]}: {message}{end}")
