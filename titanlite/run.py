"""`Run`: the facts that all parts of a run are built from, and the comparison with its
checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.base.agree import get_rank
from titanlite.base.errors import ConfigError
from titanlite.base.files import FolderLock
from titanlite.base.log import logger
from titanlite.checkpoint.folder import OWN_FOLDER
from titanlite.checkpoint.start import Start
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.config.data import get_sources
from titanlite.config.defaults import wants_held_out
from titanlite.data.loader import TrainLoader
from titanlite.distributed import ParallelDims
from titanlite.models.families import describe_differences, model_config_from_hf


@dataclass(frozen=True)
class Run:
    """Facts of a run, complete before its first part is built.

    Attributes:
        job: the configuration, with number of steps, batch size, chat date and held-out share
            resolved.
        device: this rank's device.
        start: the checkpoint that the run resumes from, or None.
        file_group: process group of all ranks on the host; its timeout allows for reading and
            writing files.
        locks: locks of the run's folders, which are held as long as this object lives.
        unwritten: settings to be chosen for the GPUs when the batch is known; empty afterwards.
    """

    job: JobConfig
    model_config: AnyModelConfig
    dims: ParallelDims
    device: torch.device
    start: Start | None = None
    file_group: dist.ProcessGroup | None = None
    locks: Sequence[FolderLock | None] = ()
    unwritten: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.job.job.dump_folder)

    @property
    def first_step(self) -> int:
        """Number of optimizer steps that were completed before this start."""
        return 0 if self.start is None else self.start.progress.step


def resolve_held_out(job: JobConfig, start: Start | None) -> JobConfig:
    """Return `job` with the held-out share resolved: for a resumed run, the share that its
    checkpoint records; 0 if no rows are held out.

    Raises ConfigError: the run was trained on all rows, and now rows are to be held out.
    """
    if job.data.validation_share is not None:
        return job
    is_wanted = wants_held_out(job)
    share = None if is_wanted else 0.0
    if start is not None:
        text = start.progress.identity["data.validation_share"]
        share = float(text) if text else None
    data = replace(job.data, validation_share=share)
    has_any = any(
        source.validation_path or source.validation_share != 0
        for source in get_sources(data).values()
    )
    if is_wanted and not has_any:
        raise ConfigError(
            f"data: the run in {job.job.dump_folder} was trained on all rows, and now some of them "
            "would be held out. Set data.validation_path to other rows, or another "
            "job.dump_folder to start a new run."
        )
    return replace(job, data=data)


def check_resumed_model(model_config: AnyModelConfig, start: Start) -> list[str]:
    """Return the problem of a checkpoint whose model computes a different function than the
    configured one. Call on one rank.
    """
    # with adapters, the model's config.json is in titanlite's own folder
    files = [start.folder / "config.json", start.folder / OWN_FOLDER / "config.json"]
    path = next((path for path in files if path.is_file()), None)
    if not isinstance(model_config, ModelConfig) or path is None:
        return []
    text = describe_differences(model_config, model_config_from_hf(path, "checkpoint"))
    if not text:
        return []
    return [
        f"model: this run would resume from {start.folder}, whose model is different: {text}. Undo "
        f"the change, or start a new run: another job.dump_folder, and model.path = {start.folder}."
    ]


def warn_of_other_data(start: Start | None, loader: TrainLoader) -> None:
    """Warn on rank 0 if the data or their order differ from those of the resumed run."""
    if start is None or start.progress.data == loader.fingerprint or get_rank() != 0:
        return
    taken = loader.get_taken(start.progress.step)
    places = ", ".join(f"{name} at {count}" for name, count in taken.items())
    logger.warning(
        "data: the checkpoint was trained on %s, this run has %s; it continues at sample %d of "
        "the new order%s.",
        start.progress.data,
        loader.fingerprint,
        start.progress.samples,
        f", of the sources {places}" if places else "",
    )
