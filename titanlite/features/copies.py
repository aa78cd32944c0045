"""Comparison of a model's copies on several machines before they are read. Each rank reads its part
of a tensor from the copy on its machine, so the copies must be equal.
"""

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from titanlite.base.agree import gather_objects
from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.process import read_variable
from titanlite.base.text import list_names
from titanlite.checkpoint.folder import OWN_FOLDER, shown
from titanlite.config.assets import base_model_of

# The files of a model's folder that are read. Other files, such as a README, may differ.
_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    f"{OWN_FOLDER}/*.safetensors",
    "config.json",
    "*_config.json",
    "tokenizer*",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)
# windows that are compared in the data of safetensors: at the start, each quarter, and the end
_WINDOW_BYTES = 4096
_NUM_WINDOWS = 5
_COMMIT = "the commit"


def check_same_copies(paths: Mapping[str, str]) -> None:
    """Check that all machines have the same files at `paths` (setting to path); one rank of each
    machine reads them.

    The check compares sizes, safetensors headers and five windows of 4 KiB in their data, all bytes
    of other files, and the commit of a model in the hub's cache. On one machine it does nothing.

    Raises ConfigError, on all ranks: files differ; names the machines and the files. Collective:
    every rank must call.
    """
    ranks_here = int(read_variable("LOCAL_WORLD_SIZE") or dist.get_world_size())
    if ranks_here == dist.get_world_size():
        return
    looks = dist.get_rank() % ranks_here == 0  # one rank of each machine
    mine = {key: _summarize(Path(path)) for key, path in paths.items()} if looks else {}
    gathered = gather_objects((socket.gethostname(), dict(paths), mine))
    problems = []
    for key in paths:
        copies = {
            rank: frozenset(found[key].items())
            for rank, (_, _, found) in enumerate(gathered)
            if key in found
        }
        usual = Counter(copies.values()).most_common(1)[0][0]
        first = next(rank for rank, copy in copies.items() if copy == usual)
        for rank, copy in copies.items():
            if copy != usual:
                host, there, _ = gathered[rank]
                what = _describe_difference(dict(copy), dict(usual))
                problems.append(
                    f"{key}: {there[key]} on {host} (rank {rank}) is a different copy than "
                    f"{gathered[first][1][key]} on {gathered[first][0]} (rank {first}): {what} "
                    "differs. Copy it there again, or put it on a file system that all machines "
                    "share."
                )
    raise_problems(ConfigError, "configuration", problems)


def _describe_difference(copy: Mapping[str, str], usual: Mapping[str, str]) -> str:
    names = sorted(name for name in {*copy, *usual} if copy.get(name) != usual.get(name))
    if _COMMIT in names:
        return f"{_COMMIT} ({copy.get(_COMMIT)}, not {usual.get(_COMMIT)})"
    return list_names(shown(name if name in copy else f"{name} (missing)") for name in names)


def _summarize(path: Path) -> dict[str, str]:
    """Return a digest of each file at `path`, a folder or a file."""
    base = base_model_of(str(path))
    found = {_COMMIT: base.revision} if base is not None and base.on_hub else {}
    files = {file for pattern in _FILES for file in path.glob(pattern)} if path.is_dir() else {path}
    for file in sorted(files):
        name = str(file.relative_to(path)) if file != path else path.name
        try:
            found[name] = _digest(file)
        except OSError as error:
            found[name] = f"cannot be read: {error.strerror}"
    return found


def _digest(file: Path) -> str:
    """Return a digest of the bytes that are compared, and of the size of the file."""
    with open(file, "rb") as opened:
        if file.suffix != ".safetensors":
            return hashlib.blake2b(opened.read(), digest_size=8).hexdigest()
        size = os.fstat(opened.fileno()).st_size
        data = min(8 + int.from_bytes(opened.read(8), "little"), size)
        opened.seek(0)
        parts = [str(size).encode(), opened.read(data)]
        for window in range(_NUM_WINDOWS):
            opened.seek(data + max(size - data - _WINDOW_BYTES, 0) * window // (_NUM_WINDOWS - 1))
            parts.append(opened.read(_WINDOW_BYTES))
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
