"""How long a run is on its data, and whether a resumed one goes on with the same."""

import math
from dataclasses import replace
from typing import Any

from titanlite.base.agree import get_rank
from titanlite.base.errors import ConfigError
from titanlite.base.log import logger
from titanlite.base.tables import format_count
from titanlite.config import JobConfig
from titanlite.config.parallelism import BATCHES
from titanlite.data.dataset import get_sources
from titanlite.data.loader import TrainLoader

_MANY_EPOCHS = 10  # of a pretrained model's new data


def resolve_steps(job: JobConfig, loader: TrainLoader, before: Any = None) -> JobConfig:
    """Return `job` with its batch, and the steps that its epochs are, counted on from `before`, a `Progress`."""
    size, num_sequences = loader.global_batch_size, loader.dataset.num_train_sequences
    if job.training.global_batch_size is None:
        kept, guide = before is None or before.batch_size in (-1, size), BATCHES[job.training.objective == "dpo"]
        how = "for {} {}: {}; at most 1/32 of all".format(*guide) if before is None else f"before: {before.batch_size}"
        log, text = logger.info if kept or get_rank() else logger.warning, format_count(size, "sequence")
        log("training: training.global_batch_size is not set, so a step has %s (%s)", text, how)
        job = replace(job, training=replace(job.training, global_batch_size=size))
    steps, taken, done = job.training.steps, 0, 0
    if before is not None and not job.data.skip_to_sample:  # otherwise what was left out would count
        taken, done = before.samples, before.step
    if job.training.epochs and num_sequences is not None:
        steps = done + math.ceil((job.training.epochs * num_sequences - taken) / size)
        job = replace(job, training=replace(job.training, steps=steps))
    taken += (steps - done) * size
    tokens = f"{taken * job.training.seq_len:,} tokens with padding"
    epochs = 0.0 if num_sequences is None else float(f"{taken / num_sequences:.3g}")
    shown = "" if num_sequences is None else f", {format_count(epochs, 'epoch')}"
    logger.info("training: %s of %s, %s%s", format_count(steps, "step"), format_count(size, "sequence"), tokens, shown)
    _warn_of_many_epochs(job, epochs, "", "training.epochs")
    return job


def check_form(job: JobConfig, form: str) -> None:
    """Refuse rows of a `form` for trained models where random weights were not asked for: a ConfigError."""
    if form == "text" or job.checkpoint.initial_load_path or job.model.init == "random":
        return
    raise ConfigError(
        f"model: the run would begin with random weights, and its data are rows of form '{form}', for "
        'fine-tuning. Set model.path to the model to fine-tune; or model.init = "random", if random weights are meant.'
    )


def describe_sources(job: JobConfig, loader: TrainLoader, step: int = 0) -> None:
    """Log how much of each source of a mixture a run takes to its end, with what it took before it began at `step`."""
    sizes = {source.name: source.dataset.num_train_sequences for source in get_sources(loader.dataset)}
    for name, count in loader.get_taken(max(step, job.training.steps)).items():
        size = sizes[name]
        epochs = "" if size is None else f", {count / size:.3g} epochs"
        logger.info("training: of %s %s sequences%s", name, f"{count:,}", epochs)
        if size is not None and loader.dataset.num_train_sequences is None:  # else all have the same epochs
            _warn_of_many_epochs(job, count / size, f" of {name}", f"data.sources.{name}.weight to less")


def _warn_of_many_epochs(job: JobConfig, epochs: float, source: str, remedy: str) -> None:
    if job.checkpoint.initial_load_path and epochs > _MANY_EPOCHS and get_rank() == 0:
        text = "training: a pretrained model sees the data%s %.0f times, which it learns by heart. Set %s, or lower "
        logger.warning(text + "training.steps, if that is not meant.", source, epochs, remedy)
