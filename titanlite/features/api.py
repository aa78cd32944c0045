"""Training from Python: `titanlite.train`, which may be called several times in a process."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite import TrainResult
from titanlite.assemble import assemble, close, explain
from titanlite.base.errors import NOTICE_FOLDER
from titanlite.base.events import open_events, record_event
from titanlite.base.log import logger, setup_logger, warn_once
from titanlite.base.process import environment_kept, read_variable, read_world_size
from titanlite.config import JobConfig
from titanlite.config.defaults import is_derived
from titanlite.config.load import CODE, Reader
from titanlite.config.settings import get_values
from titanlite.launch import protocol
from titanlite.launch.process_group import end_distributed
from titanlite.preflight import check_all

Config = str | os.PathLike[str] | Mapping[str, Any] | JobConfig


def train(config: Config, overrides: Sequence[str], sections: Mapping[str, Any]) -> TrainResult:
    """Implement `titanlite.train`. Collective: every rank of a launcher must call."""
    with environment_kept(), _alone():
        job = make_config(config, overrides, **sections)
        protocol.start_heartbeat()
        code = 1
        try:
            ranks = dist.get_world_size() if dist.is_initialized() else read_world_size()
            checked = check_all(job, (ranks,), weights=True)
            job = checked.job
            trainer = assemble(checked)
            trainer.train()
            code = 0
        except Exception as error:
            refusal = explain(error, job)
            text = f"{type(error).__name__}: {error}" if refusal is None else str(refusal)
            record_event("error", text.partition(". ")[0], protocol.steps_done())
            if refusal is None or refusal is error:
                raise
            raise refusal from error
        finally:
            close(code)
        saved = trainer.parts.checkpointer.folder / f"step-{trainer.step}"
        checkpoint = saved if saved.is_dir() else None
        return TrainResult(
            trainer.step, trainer.loss, checkpoint, Path(job.job.dump_folder), trainer.stopping
        )


def make_config(config: Config, overrides: Sequence[str] = (), **sections: Any) -> JobConfig:
    """Make a configuration from a file, a dictionary of sections, or a configuration; `sections`
    override it, and the arguments `overrides` override both.
    """
    reader = Reader()
    path = None
    if isinstance(config, JobConfig):
        for setting, value in get_values(config):
            if value is not None and not is_derived(config, setting.key):
                reader.set(CODE, setting.key, value)
    elif isinstance(config, Mapping):
        reader.set_table(CODE, _plain(config))
    else:
        path = os.fspath(config)
        reader.set_table(path, reader.read_file(path))
    reader.set_table("override", _plain(sections))
    reader.read_arguments(["--config", path or CODE, *overrides])
    return reader.finish(path)


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return `table` with values that TOML allows: paths become strings, and None is omitted."""
    values = {
        key: os.fspath(value) if isinstance(value, Path) else value for key, value in table.items()
    }
    return {
        str(key): _plain(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


@contextmanager
def _alone() -> Iterator[None]:
    """Give a run its own log, events and process group, and undo them afterwards, so that the
    process can start another run.

    After an error, a process group of several ranks is not destroyed: that would wait for ranks
    that are still in collectives.
    """
    had_group = dist.is_initialized()
    handlers = logger.handlers[:]
    failed = True
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    # each process group of torch wraps the previous hook, to print `[rank0]:` before its output
    excepthook = sys.excepthook
    logger.handlers.clear()
    setup_logger()
    logger.handlers += handlers
    warn_once.cache_clear()
    open_events(None)
    has_launcher = read_variable(NOTICE_FOLDER) is not None
    undo = protocol.catch_signals() if has_launcher else lambda: None
    try:
        yield
        failed = False
    finally:
        undo()
        if dist.is_initialized() and not had_group and not (failed and dist.get_world_size() > 1):
            end_distributed()
        open_events(None)
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:] = handlers
        sys.excepthook = excepthook
        torch.use_deterministic_algorithms(is_deterministic)
