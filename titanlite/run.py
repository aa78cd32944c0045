"""What a resumed run has in common with its checkpoint."""

from dataclasses import replace

from titanlite.base.agree import get_rank, on_first_rank
from titanlite.base.errors import ConfigError
from titanlite.base.log import logger
from titanlite.checkpoint.folder import OWN_FOLDER
from titanlite.checkpoint.start import Start
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.config.data import get_sources
from titanlite.config.defaults import wants_held_out
from titanlite.data.loader import TrainLoader
from titanlite.models.families import describe_differences, model_config_from_hf


def resolve_held_out(job: JobConfig, start: Start | None) -> JobConfig:
    """Return `job` with the held-out share of the run that is resumed, or of a new one; 0 if
    nothing is to be held out.

    Raises ConfigError: the run was trained on all rows, and now some are to be held out.
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
            f"data: the run in {job.job.dump_folder} was trained on all rows, and now some are to "
            "be held out. Set data.validation_path to others, or another job.dump_folder to start "
            "a new run."
        )
    return replace(job, data=data)


def check_resumed_model(model_config: AnyModelConfig, start: Start) -> None:
    """Check that the model of the checkpoint computes the same as the configured one.

    Raises ConfigError: it does not. The same on all ranks. Collective: every rank must call.
    """

    def find() -> str:
        # the latter beside adapters
        files = [start.folder / "config.json", start.folder / OWN_FOLDER / "config.json"]
        path = next((path for path in files if path.is_file()), None)
        if not isinstance(model_config, ModelConfig) or path is None:
            return ""
        return describe_differences(model_config, model_config_from_hf(path, "checkpoint"))

    if text := on_first_rank(find):
        raise ConfigError(
            f"model: this run is to resume from {start.folder}, whose model is another one: "
            f"{text}. Undo the change, or begin a new run: another job.dump_folder, and model.path "
            f"= {start.folder}."
        )


def warn_of_other_data(start: Start | None, loader: TrainLoader) -> None:
    """Warn on rank 0 if the data or their order differ from those of the resumed run."""
    if start is None or start.progress.data == loader.fingerprint or get_rank() != 0:
        return
    taken = loader.get_taken(start.progress.step)
    places = ", ".join(f"{name} at {count}" for name, count in taken.items())
    logger.warning(
        "data: the checkpoint was trained on %s, this run has %s; it goes on at sample %d of the "
        "new order%s.",
        start.progress.data,
        loader.fingerprint,
        start.progress.samples,
        f", of the sources {places}" if places else "",
    )
