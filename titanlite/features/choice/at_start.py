"""The choice at the start of a run: open settings, which the configuration does not set, are chosen
for its GPUs. The mesh comes first, and the others follow when the data have determined the batch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from titanlite.base.agree import on_first_rank
from titanlite.base.log import logger
from titanlite.base.text import format_count
from titanlite.checkpoint.start import Start
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.data.loader import TrainLoader
from titanlite.features.choice.choose import (
    Choice,
    choose,
    describe,
    find_hardware,
    keep_choice,
    take,
)
from titanlite.features.choice.formula import Sizes, measure
from titanlite.features.choice.hardware import Hardware
from titanlite.models.interface import Model
from titanlite.preflight import Checked
from titanlite.run import Run

# (job, sizes, type of device) -> the model on meta
Build = Callable[[JobConfig, AnyModelConfig, str], Model]
_latest: dict[str, Any] = {}


def choose_mesh(
    checked: Checked, start: Start | None, device: torch.device, build: Build
) -> Checked:
    """Return `checked` with the open degrees chosen for the GPUs. A run that resumes on the same
    number of ranks keeps its choice. Collective.
    """
    hardware = find_hardware(device)
    is_native = isinstance(checked.model_config, ModelConfig)
    if hardware is None or not checked.unwritten or not is_native:
        return replace(checked, unwritten=())
    kept = keep_choice(checked, start.progress) if start is not None else None
    if kept is not None:
        logger.info("settings: of the run that is resumed: %s", kept)
        return take(checked, kept)
    return take(checked, on_first_rank(lambda: choose_for(checked, hardware, build)).of_mesh())


def choose_rest(run: Run, loader: TrainLoader, build: Build) -> tuple[Run, TrainLoader]:
    """Return `run` and `loader` with the remaining open settings chosen for the GPUs and the batch.
    Collective.
    """
    hardware = find_hardware(run.device)
    if hardware is None or not run.unwritten:
        return run, loader
    checked = Checked(run.job, run.model_config, run.dims.degrees, run.unwritten)
    batch = loader.global_batch_size
    choice = on_first_rank(lambda: choose_for(checked, hardware, build, batch))
    again = "" if run.start is None else f", of {run.start.progress.world_size} ranks before"
    logger.info(
        "settings: chosen for %s%s: %s, %s",
        format_count(run.dims.degrees.world_size, hardware.name),
        again,
        run.dims.degrees,
        describe(choice, hardware),
    )
    job = take(checked, choice).job
    loader = replace(loader, local_batch_size=job.training.local_batch_size)
    return replace(run, job=job, unwritten=()), loader


def choose_for(
    checked: Checked, hardware: Hardware, build: Build, batch: int | None = None
) -> Choice:
    """Choose the open settings, see `choose`. Call in one process."""
    return choose(checked, describe_model(checked, build), hardware, batch)


def describe_model(checked: Checked, build: Build) -> Sizes:
    """Return the sizes of the model on GPUs. It is built only if it differs from the model of the
    latest call: a run chooses twice, and a plan for each proposal.
    """
    job = checked.job
    config = checked.model_config
    training = job.training
    dtypes = training.dtype, training.mixed_precision_param
    facts = config, training.seq_len, dtypes, job.lora, job.optimizer.freeze
    if _latest.get("facts") != facts:
        _latest.update(facts=facts, sizes=measure(build(job, config, "cuda"), job))
    return _latest["sizes"]
