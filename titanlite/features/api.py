"""Training from Python: `titanlite.train`, which leaves the process as it was."""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from titanlite import TrainResult
from titanlite.assemble import assemble, close, explain
from titanlite.base.errors import NOTICE_FOLDER, TitanliteError
from titanlite.base.files import FolderLock
from titanlite.base.log import logger, setup_logger, warn_once
from titanlite.base.process import environment_kept, read_variable, read_world_size
from titanlite.config import JobConfig
from titanlite.config.defaults import is_derived
from titanlite.config.load import CODE, Reader
from titanlite.config.settings import get_values
from titanlite.distributed.parallel_dims import end_distributed
from titanlite.launch import protocol
from titanlite.metrics import open_events, record_event
from titanlite.preflight import check_all, prepare

Config = str | os.PathLike[str] | Mapping[str, Any] | JobConfig


def train(config: Config, overrides: Sequence[str], sections: Mapping[str, Any]) -> TrainResult:
    """Implement `titanlite.train`. Collective: every rank of a launcher must call."""
    with environment_kept(), _left_as_found(), _deferred():
        job = make_config(config, overrides, **sections)
        if job.job.prepare:
            prepare(job)
            job = make_config(config, overrides, **sections)
        protocol.start_heartbeat()
        code = 1
        try:
            ranks = dist.get_world_size() if dist.is_initialized() else read_world_size()
            checked = check_all(job, (ranks,), weights=True)
            job = checked.job
            protocol.configure_heartbeat(job.comm.timeout_seconds, job.job.stop_grace_seconds, job.job.dump_folder)
            trainer = assemble(checked)
            trainer.train()
            code = 0
        except Exception as error:
            FolderLock.remove_unused()
            refusal = error if isinstance(error, TitanliteError) else explain(error, job)
            text = f"{type(error).__name__}: {error}" if refusal is None else str(refusal)
            protocol.note_error(text)
            record_event("error", protocol.first_sentence(text), protocol.steps_done())
            if refusal is None or refusal is error:
                raise
            raise refusal from error
        finally:
            close(code)
        saved = trainer.checkpointer.folder / f"step-{trainer.step}"
        checkpoint = saved if saved.is_dir() else None
        return TrainResult(trainer.step, trainer.loss, checkpoint, Path(job.job.dump_folder), trainer.stopping)


def make_config(config: Config, overrides: Sequence[str] = (), **sections: Any) -> JobConfig:
    """Load from a file, a dictionary of sections, or a configuration; `sections` override it, and the arguments
    `overrides` override both.
    """
    reader, path = Reader(), None
    if isinstance(config, JobConfig):
        for setting, value in get_values(config):
            if value is not None and not is_derived(config, setting.key):
                reader.accept(CODE, setting, value)
    elif isinstance(config, Mapping):
        reader.read_table(CODE, _plain(config))
    else:
        path = os.fspath(config)
        reader.read_table(path, reader.read_file(path) or {})
    reader.read_table("override", _plain(sections))
    texts = reader.read_arguments(["--config", path or CODE, *overrides])[1]
    return reader.finish(path, texts, is_whole=path is None or bool(reader.values))


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return `table` as a TOML file could have it: paths are text, and None is left out."""
    values = {key: os.fspath(value) if isinstance(value, Path) else value for key, value in table.items()}
    return {
        str(key): _plain(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


@contextmanager
def _deferred() -> Iterator[None]:
    """Defer SIGTERM and SIGINT: they end training after its current step, and are delivered when the context exits.

    The second one, and one before the first step, is delivered at once. Only in the main thread.
    """
    protocol.stop_requested.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def catch(number: int, frame: object) -> None:
        caught.append(number)
        protocol.stop_requested.set()
        if len(caught) > 1 or not protocol.current_beat().trains:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)

    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in protocol.STOP_SIGNALS}
    undo = protocol.catch_signals() if read_variable(NOTICE_FOLDER) is not None else lambda: None
    try:
        for number in protocol.STOP_SIGNALS if read_variable(NOTICE_FOLDER) is None else ():
            signal.signal(number, catch)
        yield
    finally:
        undo()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught[0])


@contextmanager
def _left_as_found() -> Iterator[None]:
    """Restore the process state that a run changes. After an error, several ranks keep their process group: others may
    be in collectives, and destroying it would wait for them.
    """
    had_group, cudnn, sdp = dist.is_initialized(), cast(Any, torch.backends.cudnn), torch.backends.cuda
    deterministic = cast(Any, torch.utils.deterministic)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: list[tuple[Callable[[Any], object], Any]] = [
        (logger.setLevel, logger.level),
        (partial(setattr, logger, "propagate"), logger.propagate),
        (partial(setattr, cudnn, "deterministic"), cudnn.deterministic),
        (partial(setattr, cudnn, "benchmark"), cudnn.benchmark),
        (partial(setattr, deterministic, "fill_uninitialized_memory"), deterministic.fill_uninitialized_memory),
        (partial(torch.use_deterministic_algorithms, warn_only=warn_only), is_deterministic),
        (sdp.enable_mem_efficient_sdp, sdp.mem_efficient_sdp_enabled()),
        (sdp.enable_cudnn_sdp, sdp.cudnn_sdp_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_initialized():
        settings.append((torch.cuda.set_device, torch.cuda.current_device()))
        settings.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    path, handlers, failed = list(sys.path), logger.handlers[:], True
    logger.handlers.clear()
    setup_logger()
    logger.handlers += handlers
    warn_once.cache_clear()
    open_events(None)
    try:
        yield
        failed = False
    finally:
        if dist.is_initialized() and not had_group and not (failed and dist.get_world_size() > 1):
            end_distributed()
        open_events(None)
        logger.handlers[:], sys.path[:] = handlers, path
        for put_back, value in settings:
            put_back(value)
