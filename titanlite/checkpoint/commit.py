"""Checkpoint folders on disk: a folder appears complete or not at all, and its manifest lists its
files.

All ranks write into one hidden folder. The manifest, with the size and Adler-32 of every file, is
written last. All of it is flushed to the disk, then one rename makes the folder visible. A process
may be killed at any point.
"""

import glob
import json
import os
import re
import secrets
import shutil
import traceback
import zlib
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from titanlite.base.agree import is_lost_peer, on_first_rank, together
from titanlite.base.errors import CheckpointError, TitanliteError, TransientError
from titanlite.base.files import check_regular, is_full, open_regular, sync
from titanlite.base.log import logger
from titanlite.checkpoint.folder import OWN_FOLDER, read_json, shown
from titanlite.checkpoint.pieces import SIDECAR_FILE
from titanlite.checkpoint.writer import FileLayout, Item, checksum, create_files, write_items
from titanlite.materialize.digest import add_up

MANIFEST_FILE = f"{OWN_FOLDER}/manifest.json"
BEST = "best"  # symlink next to the checkpoints, to the best one
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
# Hidden folders of checkpoints that are being written, replaced or removed; part of the name is
# random.
_HIDDEN = re.compile(r"\.(step-\d+)\.[^.]+\.(tmp|old|gone)")
_CHUNK = 8 << 20
# Makes more files (content by name) from the model's items and the digest of each item, by key.
Certify = Callable[[Sequence[Item], Mapping[Hashable, int]], Mapping[str, bytes]]


def commit_folder(
    folder: Path,
    files: Sequence[FileLayout],
    rest: Mapping[str, bytes],
    group: dist.ProcessGroup | None = None,
    certify: Certify | None = None,
) -> None:
    """Write a checkpoint and make it visible as `folder`; an older `folder` is replaced.

    All ranks write their parts of `files`, which have the same layout on all ranks. Rank 0 also
    writes `rest` (content by file name), and the files that `certify` makes from the model's items
    and the digest of each item, by key.

    Raises CheckpointError, on all ranks of `group`: a rank could not write. An older `folder` is
    untouched.

    Collectives: four small ones over `group`; every rank must call, and all must see the same file
    system.
    """
    certified = _certified(files) if certify else []
    temporary = on_first_rank(lambda: _hidden(folder, "tmp"), group)
    on_first = dist.get_rank(group) == 0
    try:
        with together(group), saving(folder):
            if on_first:
                temporary.mkdir(parents=True)
                create_files(temporary, files)
        sums: dict[Hashable, int] = {}
        digested = [item.key for item in certified]
        with together(group), saving(folder):
            sums = write_items(temporary, files, f"writing {folder}", digested)
        sums = add_up(sums, group)
        with together(group), saving(folder):
            if on_first:
                if certify is not None:
                    rest = {**rest, **certify(certified, sums)}
                _complete(temporary, files, rest, sums)
                _appear(temporary, folder)
    except CheckpointError:
        if on_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _certified(files: Sequence[FileLayout]) -> list[Item]:
    """Return the items of the model, without the items of the training state."""
    models = [f for f in files if f.is_of_model or f.name == SIDECAR_FILE]
    return [item for file in models for item in file.items]


def _complete(
    temporary: Path,
    files: Sequence[FileLayout],
    rest: Mapping[str, bytes],
    sums: Mapping[Hashable, int],
) -> None:
    """Write the files without tensors and the manifest, and flush the whole folder to the disk."""
    entries = {file.name: {"bytes": file.nbytes, "adler32": checksum(file, sums)} for file in files}
    for name, content in rest.items():
        path = temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        entries[name] = {"bytes": len(content), "adler32": f"{zlib.adler32(content):08x}"}
    manifest = {"format": 1, "files": dict(sorted(entries.items()))}
    (temporary / OWN_FOLDER).mkdir(exist_ok=True)
    (temporary / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="ascii")
    for path in [*temporary.rglob("*"), temporary]:
        sync(path)


def _hidden(folder: Path, kind: str) -> Path:
    """Return the path of a hidden folder next to `folder`, with a name that no other process
    uses.
    """
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.{kind}")


@contextmanager
def hidden_folder(folder: Path) -> Generator[Path]:
    """Yield a hidden folder, which the body renames to `folder` once it is complete; if it was not
    renamed, it is removed.

    Call in one process. Leftovers of killed processes that wrote `folder` are removed first.
    """
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.{'[0-9a-f]' * 16}.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    temporary = _hidden(folder, "tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def saving(folder: Path) -> Generator[None]:
    """Turn any exception of the body into a CheckpointError about `folder`, except a lost peer."""
    try:
        yield
        return
    except FileNotFoundError as error:
        problem = f"{error}. Another process removed it: give each run its own job.dump_folder."
    except OSError as error:
        remedy = "Free space there" if is_full(error) else "Make it writable"
        problem = f"{error}. {remedy}, or set another job.dump_folder."
    except TitanliteError as error:
        problem = str(error)
    except Exception as error:  # a bug: its traceback goes to the log
        if is_lost_peer(error):
            raise
        logger.error("%s", traceback.format_exc())
        problem = (
            f"{type(error).__name__}: {error}. This is an error of titanlite, see its traceback "
            "above."
        )
    raise CheckpointError(f"checkpoint: cannot save to {folder}: {problem}")


def check_folder(
    folder: Path, *, checksums: bool = False, stripe: tuple[int, int] = (0, 1)
) -> list[str]:
    """Compare the files in `folder` with its manifest; return a problem for each file that is
    missing or differs.

    Sizes cost a system call per file; `checksums` reads every byte. `stripe` = (i, n) selects every
    nth file, from the ith on.

    Raises TransientError: a file exists but cannot be read, which does not mean that it is damaged.
    """
    try:
        manifest = read_json(folder / MANIFEST_FILE, str(folder))
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise TransientError(str(error)) from None
        return [str(error)]
    files = manifest.get("files")
    if manifest.get("format") != 1 or not isinstance(files, dict) or not files:
        return [
            f"{folder}: {MANIFEST_FILE} lists no files, or is of a format that this version does "
            "not know."
        ]
    problems = list[str]()
    for name, entry in list(files.items())[stripe[0] :: stripe[1]]:
        path = folder / name
        try:
            size = check_regular(path).st_size
            wanted = entry["bytes"]
            value = entry["adler32"]
            if size != wanted:
                problems.append(f"{shown(name)}: has {size} bytes, {MANIFEST_FILE} says {wanted}.")
            elif checksums and _checksum_of(path) != value:
                problems.append(
                    f"{shown(name)}: its bytes are not those that were saved (the checksum "
                    "differs)."
                )
        except (TypeError, KeyError, ValueError):
            problems.append(f"{shown(name)}: its entry in {MANIFEST_FILE} is damaged.")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            problems.append(f"{shown(name)}: {error.strerror}.")
        except OSError as error:
            raise TransientError(
                f"checkpoint {folder}: {shown(name)} cannot be read: {error.strerror}. Start again "
                "when the file system works, or move the checkpoint away."
            ) from None
    return problems


def list_steps(folder: Path) -> list[int]:
    """List the numbers of the checkpoints `step-N` in `folder`, complete or not, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1]) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))
    )


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step-{step}"


def find_newest_complete(folder: Path) -> int | None:
    """Return the number of the newest complete checkpoint in `folder`; None if there is none."""
    steps = reversed(list_steps(folder))
    return next((step for step in steps if not check_folder(step_folder(folder, step))), None)


def clean_up(folder: Path) -> None:
    """Remove leftovers of killed processes. Only the process that holds the `FolderLock` may call
    it.
    """
    for path in sorted(folder.glob(".step-*")) if folder.is_dir() else ():
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            continue
        if match[2] == "old" and not (folder / match[1]).exists() and not check_folder(path):
            path.rename(folder / match[1])  # killed between the two renames of a replacement
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_old(
    folder: Path,
    keep_latest: int,
    keep_every: int,
    newest: int | None = None,
    best: int | None = None,
) -> None:
    """Remove all but the last `keep_latest` checkpoints (0: keep all); multiples of `keep_every`
    (0: none) stay.

    Incomplete checkpoints, and checkpoints after `newest` (the one just saved), are neither counted
    nor removed; `best` stays.
    """
    steps = [step for step in list_steps(folder) if newest is None or step <= newest]
    steps = [step for step in steps if not check_folder(step_folder(folder, step))]
    for step in steps[:-keep_latest] if keep_latest else ():
        if step != best and not (keep_every and step % keep_every == 0):
            path = step_folder(folder, step)
            hidden = path.rename(_hidden(path, "gone"))  # a resume never finds half a folder
            shutil.rmtree(hidden, ignore_errors=True)


def _checksum_of(path: Path) -> str:
    value = zlib.adler32(b"")
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            value = zlib.adler32(chunk, value)
    return f"{value:08x}"


def _appear(temporary: Path, folder: Path) -> None:
    old = temporary.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_best(folder: Path) -> int | None:
    """Return the step that the link `folder`/best points to, complete or not; None if there is no
    such link.
    """
    try:
        match = _STEP.fullmatch(os.readlink(folder / BEST))
    except OSError:  # missing, or not a link
        return None
    return int(match[1]) if match else None


def point_best(folder: Path, step: int) -> None:
    """Point the link to step-`step`, if that checkpoint is complete. Call in one process at a time.

    Raises OSError: the file system does not support links, or something else has this name.
    """
    if read_best(folder) == step or check_folder(step_folder(folder, step)):
        return
    temporary = folder / f".{BEST}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"step-{step}")  # relative: the run's folder may be moved
    os.replace(temporary, folder / BEST)
