"""Preflight: every check that needs only one process. It takes a fraction of a second, or some
seconds if a config.json is read, because that imports transformers.

`run_train.sh` runs it once before it starts ranks, so that a mistake is reported once and early.
Every rank runs it again, so that a launch without the script reports the same mistakes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.process import begin_process
from titanlite.base.text import Parser, command
from titanlite.config import AnyModelConfig, JobConfig, load_config
from titanlite.config.assets import assets_key, find_missing_files, resolve_assets, weights_key
from titanlite.config.parallelism import (
    Degrees,
    check_parallelism,
    close_settings,
    resolve_degrees,
    resolve_seq_len,
)
from titanlite.config.settings import find_extension_problems
from titanlite.models.families import find_other_model, part_sizes, resolve_model_config


@dataclass(frozen=True)
class Checked:
    """A checked configuration, and the values derived from it."""

    job: JobConfig
    model_config: AnyModelConfig
    degrees: Degrees
    unwritten: tuple[str, ...] = ()  # settings in `job` that may be chosen for the GPUs


def check(job: JobConfig, world_size: int, *, weights: bool = True) -> Checked:
    """Resolve the model and the degrees, and check them against each other.

    Downloads a model of the hub on first use; without `weights`, only its description and
    tokenizer.

    Raises ConfigError: settings contradict each other; lists all problems.
    """
    job, unwritten = close_settings(job)
    problems = find_extension_problems(job)
    model_config = None
    degrees = None
    try:
        job = resolve_assets(job, weights=weights)
        model_config = resolve_model_config(job.model, assets_key(job))
        problems += find_other_model(
            job.model, model_config, job.checkpoint.initial_load_path, weights_key(job)
        )
        job = resolve_seq_len(job, model_config)
    except ConfigError as error:
        problems.append(str(error))
    try:
        degrees = resolve_degrees(job.parallelism, world_size)
    except ConfigError as error:
        problems.append(str(error))
    if model_config is not None and degrees is not None:
        problems += check_parallelism(job, model_config, degrees, part_sizes(model_config))
    raise_problems(ConfigError, "configuration", problems)
    assert model_config is not None and degrees is not None
    return Checked(job, model_config, degrees, unwritten)


def _world_sizes(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def check_all(job: JobConfig, world_sizes: tuple[int, ...], *, weights: bool) -> Checked:
    """Check that files exist, then `check` each of these world sizes: see `check_arguments`."""
    # before anything large is downloaded
    raise_problems(ConfigError, "configuration", find_missing_files(job))
    checked = []
    for world_size in world_sizes:
        try:
            checked.append(check(job, world_size, weights=weights))
        except ConfigError as error:
            if world_size in (world_sizes[0], world_sizes[-1]):
                raise ConfigError(
                    f"with {world_size} ranks: {error}" if world_sizes[1:] else str(error)
                ) from None
            print(
                f"titanlite: warning: with {world_size} ranks this run would end: {error}",
                file=sys.stderr,
            )
    return checked[0]


def check_arguments(argv: Sequence[str] | None, *, weights: bool) -> Checked:
    """Parse and check `--world-size N --config FILE ...`.

    `--world-size 16,8,4` is for runs that may lose machines: the first and the last size must be
    valid, for the others there is only a warning. With `weights` a model of the hub is downloaded.

    Raises ConfigError: settings contradict each other; lists all problems.
    """
    parser = Parser("check", add_help=False)  # load_config has help
    parser.add_argument("--world-size", type=_world_sizes, default=(1,))
    known, rest = parser.parse_known_args(argv)
    job = load_config(rest)
    return check_all(job, known.world_size, weights=weights)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run `python -m titanlite.preflight --world-size N --config FILE ...`: exit code 0, or 2 after
    one clear error.

    A model of the hub is downloaded here, once for all ranks of this machine.
    """
    check_arguments(argv, weights=True)


if __name__ == "__main__":
    begin_process(lossy=True)
    sys.exit(main())
