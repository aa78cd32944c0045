"""The run's folder: the same on all machines, and locked against other runs. Its start, events and
traces.
"""

import os
import re
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, schedule

from titanlite.base.agree import (
    new_host_group,
    on_first_rank,
    together,
)
from titanlite.base.errors import RENDEZVOUS, ConfigError, raise_problems
from titanlite.base.events import open_events, record_event
from titanlite.base.files import LOCK_WAIT_S, FolderLock, check_regular, is_full
from titanlite.base.log import log_to_folder, logger
from titanlite.base.process import read_variable
from titanlite.config import JobConfig, find_changes, format_changes, save_resolved
from titanlite.config.assets import base_model_of
from titanlite.config.parallelism import CHOSEN
from titanlite.config.schema import ProfilingSection
from titanlite.config.settings import get_settings, get_value, get_values
from titanlite.launch.protocol import read_restart

_WRITTEN = (".jsonl", ".json", ".toml", ".txt")  # files of the run
# Settings that identify a run.
_BASE = "checkpoint.initial_load_path"
_IDENTITY = (
    _BASE,
    "training.objective",
    "lora.rank",
    "data.converter",
    "data.dataset",
    "data.path",
    "data.subset",
    "data.split",
)
# Settings that a resumed run takes over unless they are set.
_KEPT = ("training.global_batch_size", "moe.aux_loss_coeff", *CHOSEN)
# Paths that may differ between machines although the files are the same: a hub model is in each
# machine's cache. `check_shared_folder` checks the run's folder.
_MAY_DIFFER = {
    "job.dump_folder",
    "model.path",
    "model.hf_assets_path",
    "checkpoint.initial_load_path",
    "lora.init_from",
    "data.path",
    "data.validation_path",
    "data.tokenizer_path",
    "data.cache_folder",
    "data.chat_template",
    "evaluation.path",
}
# On a network file system, other machines may see a new file only when their cache of the folder
# has expired.
_VISIBLE_WITHIN_S = 30.0
_PAUSE_S = 0.1
_PREPARING = timedelta(days=1)
# configuration of the run that is in the folder, and of a run that is being built
_CONFIG = "config.toml"
_NEXT_CONFIG = "config.next.toml"


def hold_folders(job: JobConfig, folder: Path) -> list[FolderLock | None]:
    """Create the run's folder, and the checkpoint folder if it is outside; return locks that keep
    other runs out as long as they live (an empty list on ranks other than 0).

    If the file system has no locks, there is only a warning.

    Raises ConfigError, on all ranks: another run holds a folder, or rank 0 cannot write there.
    Collective: every rank must call.
    """
    locks: list[FolderLock | None] = []
    wait_s = min(LOCK_WAIT_S, job.comm.timeout_seconds / 2)  # the other ranks wait in a collective

    def take() -> None:
        checkpoints = folder / job.checkpoint.folder
        inside = not job.checkpoint.enable or checkpoints.resolve().is_relative_to(folder.resolve())
        for each in (folder,) if inside else (folder, checkpoints):
            try:
                each.mkdir(parents=True, exist_ok=True)
                locks.append(FolderLock.take(each, read_variable(RENDEZVOUS) or "", wait_s))
            except OSError as error:
                raise ConfigError(
                    f"job.dump_folder: cannot write to {each}: {error.strerror}. Choose another "
                    "folder."
                ) from None
            if locks[-1] is None:
                logger.warning(
                    f"job.dump_folder: the file system of {each} has no locks. Start no other run "
                    "in this folder before this one ends: each would remove the other's "
                    "checkpoints."
                )

    on_first_rank(take)
    return locks


def make_dump_folder(job: JobConfig, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Save the resolved configuration in the run's folder, which `hold_folders` created, on rank 0.
    From then on, log and events are written there.

    The configuration has a temporary file name until `record_start` renames it. Returns, on rank 0,
    the settings that differ from the run that is already in the folder (`find_changes`).

    Raises ConfigError, on all ranks: rank 0 cannot write there; if `checkpoint.on_save_error` is
    "continue", a full disk is only a warning. Collective: every rank must call.
    """
    changes: dict[str, tuple[Any, Any]] = {}

    def make() -> None:
        try:
            for path in folder.iterdir():
                if path.suffix in _WRITTEN and path.exists():
                    check_regular(path)
            changes.update(find_changes(job, folder / _CONFIG))
            save_resolved(job, folder / _NEXT_CONFIG)
        except OSError as error:
            if not is_full(error) or job.checkpoint.on_save_error == "stop":
                raise ConfigError(
                    f"job.dump_folder: cannot write to {folder}: {error}. Choose another folder."
                ) from None
            logger.warning(f"cannot write {folder / _CONFIG}: {error.strerror}.")

    on_first_rank(make)
    log_to_folder(folder)
    open_events(folder)
    return changes


def get_identity(job: JobConfig) -> dict[str, str]:
    """Return the settings that distinguish one run from another, by key; a hub model appears as its
    id and commit.
    """
    share = job.data.validation_share
    settings = {key: str(get_value(job, key)) for key in (*_IDENTITY, *_KEPT)}
    settings["data.validation_share"] = "" if share is None else f"{share:g}"
    base = base_model_of(job.checkpoint.initial_load_path)
    return settings | ({_BASE: f"{base.name}@{base.revision}"} if base and base.on_hub else {})


def check_same_run(job: JobConfig, step: int, before: Mapping[str, str]) -> list[str]:
    """Return why a run cannot resume its checkpoint: base model, data or objective differ, or the
    checkpoint has more steps than the run should have. Call on one rank.

    The sources of a mixture may change. `before` is the identity in the checkpoint of `step`.
    """
    folder = job.job.dump_folder
    asked = job.training.steps
    now = get_identity(job)
    others = {key: (before[key], now[key]) for key in _IDENTITY if before[key] != now[key]}
    text = format_changes(
        {key: tuple(map(get_settings()[key].kind, pair)) for key, pair in others.items()}
    )
    never = "lora.rank" in text  # weights of a different rank do not fit
    if text and (job.checkpoint.resume == "auto" or step >= asked or never):
        weights = Path(folder) / job.checkpoint.folder / f"step-{step}"
        forced = (
            ""
            if never
            else f", or train more than {step} steps in all with --checkpoint.resume=force"
        )
        return [
            f"checkpoint: {folder} holds another run, at step {step}: {text}. Set another "
            f"job.dump_folder for a new run, there with model.path = {weights} to begin with its "
            f"weights{forced}."
        ]
    if step > asked:
        return [
            f"training.steps (or epochs) are {asked} steps, but the checkpoint in {folder} is at "
            f"step {step}. Set more to continue, or another job.dump_folder for a new run."
        ]
    return []


def record_start(
    folder: Path, step: int, where: str, *, resumed: bool, changes: Mapping[str, tuple[Any, Any]]
) -> None:
    """Record on rank 0 that training starts after `step`: save the settings, and write one event
    ("restart", "resume" or "start").

    Also log why the ranks were restarted, and which settings a resumed run changed.
    """
    if dist.get_rank() == 0 and (folder / _NEXT_CONFIG).exists():
        (folder / _NEXT_CONFIG).replace(folder / _CONFIG)
    if resumed and changes:
        text = f"settings changed since the last start: {format_changes(changes)}"
        logger.info(f"resume: {text}")
        where = f"{where}; {text}"
    restart = read_restart()
    if not restart:
        record_event("resume" if resumed else "start", where, step)
        return
    text = f"{restart}; training continues from step {step}"
    logger.info(text)
    record_event("restart", f"{text}; {where}", step)


@contextmanager
def profiling(section: ProfilingSection, dump_folder: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function to call after every training step with the number of steps that the run has
    done.

    With `profiling.enable_profiling` it records the last step of every `profile_freq` steps of this
    process, after one warm-up step, and every rank writes `save_traces_folder/step-N/rank-R.json`,
    for chrome://tracing or Perfetto. If a step is trained again after a resume, its trace is
    replaced.
    """
    if not section.enable_profiling:
        yield lambda step: None
        return
    now = -1  # step of the run; the profiler's own counter restarts in every process

    def save(recorded: profile) -> None:
        if now < 0:
            return  # training ended during a recorded step, or never began
        folder = dump_folder / section.save_traces_folder / f"step-{now}"
        path = folder / f"rank-{dist.get_rank()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
        logger.info(f"profiler: trace of step {now} in {path}")

    def end_step(step: int) -> None:
        nonlocal now
        now = step
        profiler.step()

    # The warning appears from the second trace on. Clearing is wanted: each trace has only its own
    # step's events.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
    warmup = int(section.profile_freq > 1)
    turns = schedule(wait=section.profile_freq - 1 - warmup, warmup=warmup, active=1)
    with profile(schedule=turns, on_trace_ready=save) as profiler:
        try:
            yield end_step
        finally:
            now = -1


def check_same_settings(job: JobConfig) -> None:
    """Check that all ranks have the same settings: otherwise they would wait in different
    collectives.

    Raises ConfigError, on all ranks: settings differ; names the settings and the ranks. Collective:
    every rank must call.
    """
    mine = {
        s.key: x
        for s, x in get_values(job)
        if re.sub(r"\.sources\.\w+", "", s.key) not in _MAY_DIFFER
    }
    first = on_first_rank(lambda: mine)
    problems = [
        f"{key} = {mine.get(key)!r} on {socket.gethostname()}, {first.get(key)!r} on rank 0. "
        "Start every machine with the same files and arguments."
        for key in {**mine, **first}
        if mine.get(key) != first.get(key)
    ]
    with together():
        raise_problems(ConfigError, "configuration", problems)


def check_shared_folder(folder: Path) -> None:
    """Check that all ranks see the same `folder` and can write there: each writes its part of every
    checkpoint.

    Rank 0 creates a temporary file there. On one machine the check does nothing.

    Raises ConfigError, on all ranks: some ranks do not see it or cannot write; names them.
    Collective: every rank must call.
    """
    if not _are_several():
        return

    def make() -> str:
        name = f".machines-{secrets.token_hex(8)}"
        (folder / name).touch()
        return name

    token = folder / on_first_rank(make)
    problem = (
        f"job.dump_folder: {folder.absolute()} on {socket.gethostname()} is not the folder that "
        "rank 0 has, or cannot be written to. Put the folder on a file system that all "
        "machines share, with the same user."
    )
    is_shared = _appears(token) and os.access(folder, os.W_OK)
    try:
        with together():
            if not is_shared:
                raise ConfigError(problem)
    finally:
        if dist.get_rank() == 0:
            token.unlink(missing_ok=True)


@contextmanager
def waiting_for_machines() -> Iterator[None]:
    """Let machines take different times for the body: at the end, all wait for the last one,
    regardless of `comm`.

    One machine may have the data cached, while a new machine, in place of a lost one, prepares them
    for hours.

    Raises TitanliteError, on all ranks: the first error that a rank raises inside. Collectives: one
    gather at the end, with several machines over a new group; every rank must call, and the body
    must have none.
    """
    group = new_host_group(_PREPARING) if _are_several() else None
    with together(group):
        yield
    if group is not None:
        dist.destroy_process_group(group)


def _are_several() -> bool:
    return int(read_variable("LOCAL_WORLD_SIZE") or dist.get_world_size()) != dist.get_world_size()


def _appears(path: Path) -> bool:
    end = time.monotonic() + _VISIBLE_WITHIN_S
    while time.monotonic() < end:
        with suppress(OSError):  # rank 0 has just created the folder
            # Listing asks the server; a plain look-up may be cached.
            if path.name in os.listdir(path.parent):
                return True
        time.sleep(_PAUSE_S)
    return False
