"""`python -m titanlite check --config FILE --world-size N`: what would be trained, or what is wrong with that."""

import sys
from collections.abc import Sequence

from titanlite.base.errors import TitanliteError
from titanlite.config import TransformersConfig
from titanlite.config.assets import base_model_of
from titanlite.config.data import get_sources
from titanlite.config.parallelism import resolve_global_batch_size
from titanlite.preflight import Checked, check_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Print what would be trained; exit code 2 after one clear error. Downloads descriptions of models, no weights."""
    try:
        print(_format(check_arguments(argv, weights=False)))
    except TitanliteError as error:
        print(f"titanlite: error: {error}", file=sys.stderr)
        return 2
    return 0


def _format(checked: Checked) -> str:
    job, config, degrees = checked.job, checked.model_config, checked.degrees
    training, optimizer, path = job.training, job.optimizer, job.checkpoint.initial_load_path
    base = base_model_of(path)
    weights = f"weights of {base.name if base.on_hub else path}" if base else "random weights"
    family = f"{config.family} ({config.architecture})" if isinstance(config, TransformersConfig) else config.family
    paths = [source.path for source in get_sources(job.data).values() if source.path]
    length = f"{training.epochs:g} epochs" if training.epochs else f"{training.steps:,} steps"
    batch = resolve_global_batch_size(training, degrees.dp)
    warmup = job.lr_scheduler.warmup_steps
    return "\n".join(
        [
            f"OK on {degrees.world_size} ranks: {degrees}",
            f"  model      {family}, {weights}" + (f", adapters of rank {job.lora.rank}" if job.lora.rank else ""),
            f"  data       {', '.join([job.data.dataset, *paths])}",
            f"  training   {training.objective}, {length} of {batch} sequences of {training.seq_len:,} tokens",
            f"  optimizer  {optimizer.name}, lr {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, beta2 "
            f"{optimizer.beta2:g}, warm-up {f'of {warmup} steps' if warmup >= 0 else '3% of the steps, at most 200'}",
            f"  folder     {job.job.dump_folder}",
            "Not looked at: rows (`titanlite data`), memory and time (`titanlite plan`), weights.",
        ]
    )
