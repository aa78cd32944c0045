"""Metrics for Weights & Biases, which wandb sends from a process of its own: training does not fail for it."""

import atexit
import importlib
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from titanlite.base.agree import get_rank
from titanlite.base.env import read_variable
from titanlite.base.files import read_regular, replace_file
from titanlite.base.log import logger
from titanlite.base.process import leave
from titanlite.config.assets import public_name
from titanlite.config.schema import JobConfig
from titanlite.config.settings import get_sections_of, get_value

ID_FILE = "wandb_id"
_FINISH_S = 10.0
_opened: list["WandbRun"] = []


def open_wandb(job: JobConfig, folder: Path) -> Callable[[int, Mapping[str, float]], None] | None:
    """Start the W&B run of the run in `folder`, which exists, and return what takes its points.

    None on ranks other than 0, or without `metrics.enable_wandb`.
    """
    if not job.metrics.enable_wandb or get_rank() != 0:
        return None
    _opened.append(run := WandbRun(job, folder))
    return lambda step, values: run.call(lambda wandb_run: wandb_run.log({"step": step, **values}))


def configure_wandb(found: Mapping[str, Any]) -> None:
    """Tell W&B what the run runs on, without the command, which has paths."""
    values = {"environment": {name: found[name] for name in found if name != "command"}}
    for run in _opened:
        run.call(lambda wandb_run: wandb_run.config.update(values, allow_val_change=True))


def finish_wandb(exit_code: int) -> None:
    """Close what `open_wandb` has opened, if anything. The process ends with `exit_code` afterwards."""
    while _opened:
        _opened.pop().finish(exit_code)


class WandbRun:
    """Writer of points to wandb. The first error is one warning, and nothing is written after it.

    A folder is one run of W&B, whose id is in `wandb_id` there: a resumed run goes on in it. wandb keeps its files in
    `wandb/` there, and gets the configuration, of local paths only their last part.
    """

    def __init__(self, job: JobConfig, folder: Path) -> None:
        defaults: dict[str, tuple[str, Any]] = {
            "WANDB_PROJECT": ("project", job.metrics.wandb_project),
            "WANDB_NAME": ("run_name", folder.resolve().name),
            "WANDB_RUN_ID": ("run_id", _get_id(folder / ID_FILE)),
            "WANDB_RESUME": ("resume", "allow"),
            "WANDB_DIR": ("root_dir", str(folder.resolve())),
            "WANDB_NOTES": ("run_notes", job.job.description or None),
            "WANDB_INIT_TIMEOUT": ("init_timeout", 30.0),
            "WANDB_SHOW_INFO": ("show_info", False),  # nor does it ask for a key on a terminal then
            "WANDB_CONSOLE": ("console", "off"),
            # The command has paths, the address of a git remote may have a token.
            "WANDB__DISABLE_META": ("x_disable_meta", True),
            "WANDB_DISABLE_GIT": ("disable_git", True),
        }
        settings = dict(defaults[name] for name in defaults if read_variable(name) is None)
        config: dict[str, dict[str, Any]] = {}
        for section, known in get_sections_of(job).items():
            values = {setting.name: get_value(job, setting.key) for setting in known}
            public = {name: public_name(value) for name, value in values.items() if isinstance(value, str)}
            config[section] = values | public
        config["job"]["description"] = job.job.description
        self._run: Any = None
        self._is_off = False
        self.call(lambda _: self._start(settings, config))

    def _start(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        wandb.setup(wandb.Settings(**settings))  # of `init`, what it prints does not follow them
        self._run = run = wandb.init(config=config)
        offline = f"`wandb sync {os.path.dirname(run.dir)}` uploads this run"
        logger.info("W&B: %s", offline if run.settings.mode == "offline" else run.url or "disabled")
        run.define_metric("*", step_metric="step")

    def call(self, function: Callable[[Any], object]) -> None:
        """Call `function` with wandb's run, if there was no error."""
        if self._is_off:
            return
        try:
            function(self._run)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is not the run's trouble
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._turn_off(lines[0].rstrip("."))

    def finish(self, exit_code: int) -> None:
        """End the W&B run, as failed if the exit code is not 0; wait for that for 10 s at most."""
        finish = partial(self.call, lambda run: run.finish(exit_code=exit_code))
        thread = threading.Thread(target=finish, name="wandb", daemon=True)
        thread.start()
        thread.join(_FINISH_S)
        if thread.is_alive():
            self._turn_off(f"not all is uploaded after {_FINISH_S:g} s")
        if self._is_off:  # wandb's own exit handlers would wait for its servers
            atexit.register(leave, exit_code, at_once=True)

    def _turn_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            logger.warning("W&B: %s. It gets no more points; metrics.jsonl has all.", reason)


def _get_id(path: Path) -> str:
    """Return the id in the file, or a new one that is there from now on."""
    with suppress(OSError):
        return read_regular(path, 1024).decode("ascii").strip()
    name = uuid.uuid4().hex[:12]
    try:
        replace_file(path, name + "\n")
    except OSError as error:
        logger.warning("cannot write %s: %s. A resume will be another run of W&B.", path, error.strerror or error)
    return name
