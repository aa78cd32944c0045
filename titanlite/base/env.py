"""The environment of a rank, read and set here alone outside `base` and `launch`. Without a launcher: rank 0 of 1."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def read_rank() -> int:
    """Return RANK: the number of this process among all ranks."""
    return int(os.environ.get("RANK", "0"))


def read_world_size() -> int:
    """Return WORLD_SIZE: the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def read_ranks_here() -> int:
    """Return LOCAL_WORLD_SIZE: the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def read_variable(name: str) -> str | None:
    """Return the text of the variable `name`, or None if it is not set."""
    return os.environ.get(name)


def set_defaults(values: Mapping[str, str]) -> dict[str, str]:
    """Set the variables that are not set; return what each is now."""
    return {name: os.environ.setdefault(name, value) for name, value in values.items()}


def get_cache_home() -> Path:
    """Return titanlite's folder in `$XDG_CACHE_HOME`, or in `~/.cache`. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titanlite"


@contextmanager
def environment_kept() -> Iterator[None]:
    """Put all variables back as they were."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
