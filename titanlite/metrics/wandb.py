"""Metrics for Weights & Biases, through a process of its own (`wandb_process.py`).

wandb waits for its servers, puts itself into `sys.exit` and keeps what it was told in memory. Of all that training
shall know nothing, and a run that is killed shall still be closed there, with its last points.
"""

import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlite.base.files import read_regular, replace_file
from titanlite.base.log import logger
from titanlite.config.assets import public_name
from titanlite.config.schema import JobConfig
from titanlite.config.settings import get_sections_of, get_value

ID_FILE = "wandb_id"
_MOST_BYTES = 16 << 20  # that wait for a process which does not read
_FLUSH_S = 1.0
_FINISH_S = 10.0
_runs: dict[Path, "WandbRun"] = {}


def open_wandb(job: JobConfig, folder: Path) -> "WandbRun":
    """The W&B run of the run in `folder`, which exists: started, or what this process has."""
    if folder not in _runs:
        _runs[folder] = WandbRun(job, folder)
    return _runs[folder]


def finish_wandb(exit_code: int) -> None:
    """Close what `open_wandb` has opened, if anything. A process that ends without it has failed, for W&B."""
    while _runs:
        _runs.popitem()[1].finish(exit_code)


class WandbRun:
    """Hands configuration and points to a process that hands them to wandb. Never waits for it before `finish`.

    A folder is one run of W&B, whose id is in `wandb_id` there: a resumed run goes on in it.

    Args:
        job: the run's configuration, which W&B gets, of local paths only their last part.
        folder: the run's folder, where wandb keeps its files in `wandb/`.
    """

    def __init__(self, job: JobConfig, folder: Path) -> None:
        defaults = {
            "WANDB_PROJECT": job.metrics.wandb_project,
            "WANDB_NAME": folder.resolve().name,
            "WANDB_RUN_ID": _get_id(folder / ID_FILE),
            "WANDB_RESUME": "allow",
            "WANDB_DIR": str(folder.resolve()),
            "WANDB__STATS_PID": str(os.getpid()),  # the process whose memory it shows
            **({"WANDB_NOTES": job.job.description} if job.job.description else {}),
        }
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        program = str(Path(__file__).with_name("wandb_process.py"))
        # -P: or the modules beside it would hide others of their names. A session of its own: no Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-P", program], stdin=reader, env=defaults | os.environ, start_new_session=True
        )
        os.close(reader)
        self._unsent, self._failed = b"", False
        self.configure(
            {
                section: {setting.name: _get_public(job, setting.key) for setting in settings}
                for section, settings in get_sections_of(job).items()
            }
        )

    def configure(self, values: Mapping[str, Any]) -> None:
        """Add to the configuration that W&B shows."""
        self._send({"config": values})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point after `step` optimizer steps; steps may come again."""
        self._send({"point": {"step": step, **values}})

    def finish(self, exit_code: int) -> None:
        """End the W&B run, as failed if the exit code is not 0; after a success, wait for it for 10 s at most."""
        self._send({"exit_code": exit_code}, wait_s=_FLUSH_S)
        os.close(self._pipe)
        if exit_code or self._failed:
            return  # the launcher ends this rank at any moment
        try:
            self._process.wait(_FINISH_S)
        except subprocess.TimeoutExpired:
            logger.info("W&B: it takes longer to upload the last points; process %d stays for that", self._process.pid)

    def _send(self, message: Mapping[str, Any], wait_s: float = 0.0) -> None:
        if self._failed:
            return
        self._unsent += json.dumps(message).encode("ascii") + b"\n"
        end = time.monotonic() + wait_s
        with suppress(BrokenPipeError):
            while self._unsent and select.select([], [self._pipe], [], max(end - time.monotonic(), 0.0))[1]:
                self._unsent = self._unsent[os.write(self._pipe, self._unsent) :]
            if len(self._unsent) <= _MOST_BYTES:
                return
        self._unsent, self._failed = b"", True
        logger.warning("W&B: its process has ended or does not read; it gets no more points. metrics.jsonl has all.")


def _get_id(path: Path) -> str:
    """The id in the file, or a new one that is there from now on."""
    with suppress(OSError):
        return read_regular(path, 1024).decode("ascii").strip()
    name = uuid.uuid4().hex[:12]
    try:
        replace_file(path, name + "\n")
    except OSError as error:
        logger.warning("cannot write %s: %s. A resume will be another run of W&B.", path, error.strerror or error)
    return name


def _get_public(job: JobConfig, key: str) -> Any:
    value = get_value(job, key)
    return public_name(value) if isinstance(value, str) and key != "job.description" else value
