"""torch.compile with a cache that only this user can write to: the libraries in it are loaded and run.

torch's own is a folder in /tmp with a name that anybody can guess, and make first.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from titanlite.base.env import get_cache_home, set_defaults
from titanlite.base.errors import ConfigError

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_OTHERS_WRITE = 0o022


def compile_function(function: Callable[..., Any], **options: Any) -> Any:
    """Return `torch.compile(function, **options)`, once `secure_cache` has looked."""
    secure_cache()
    return torch.compile(function, **options)


def secure_cache() -> None:
    """Name torch a cache in the user's own cache folder (mode 0700), unless TORCHINDUCTOR_CACHE_DIR names another.

    Raises:
        ConfigError: it belongs to another user, others can write to it, or it cannot be made.
    """
    own = get_cache_home() / "torchinductor"
    folder = Path(set_defaults({_VARIABLE: str(own)})[_VARIABLE])
    remedy = f"Set {_VARIABLE} to a folder of yours that others cannot write to."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder == own and folder.stat().st_uid == os.getuid():
            folder.chmod(0o700)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"compile: cannot use the cache folder {folder}: {error.strerror}. {remedy}") from None
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"compile: torch.compile loads libraries from {folder}, which belongs to user {found.st_uid} and not to "
            f"user {os.getuid()}, who runs this. {remedy}"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"compile: torch.compile loads libraries from {folder}, where others can write (mode "
            f"{found.st_mode & 0o777:o}). `chmod go-w` it. {remedy}"
        )
