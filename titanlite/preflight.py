"""Preflight: every check that needs neither torch nor ranks, in a fraction of a second.

`run_train.sh` runs it once before it starts ranks, so that a mistake is reported once and at once; every rank runs it
again, so that a launch without the script says the same.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config import AnyModelConfig, JobConfig, load_config
from titanlite.config.assets import resolve_assets
from titanlite.config.parallelism import Degrees, check_parallelism, resolve_degrees
from titanlite.errors import ConfigError, TitanliteError, raise_problems
from titanlite.models.families import resolve_model_config


@dataclass(frozen=True)
class Checked:
    """A configuration that passed, with what was derived from it."""

    job: JobConfig
    model_config: AnyModelConfig
    degrees: Degrees


def check(job: JobConfig, world_size: int) -> Checked:
    """Resolve the model and the degrees, and check them against one another. Downloads a model of the hub on first use.

    Raises:
        ConfigError: lists every contradiction.
    """
    problems: list[str] = []
    model_config, degrees = None, None
    try:
        job = resolve_assets(job)
        model_config = resolve_model_config(job.model)
    except ConfigError as error:
        problems.append(str(error))
    try:
        degrees = resolve_degrees(job.parallelism, world_size)
    except ConfigError as error:
        problems.append(str(error))
    if model_config is not None and degrees is not None:
        problems += check_parallelism(job, model_config, degrees)
    raise_problems(ConfigError, "configuration", problems)
    assert model_config is not None and degrees is not None
    return Checked(job, model_config, degrees)


def prepare(job: JobConfig) -> None:
    """Run the script `job.prepare`, if there is one, in a process of its own.

    Raises:
        ConfigError: there is no such file, or it failed; what it printed says why.
    """
    script = Path(job.job.prepare).expanduser()
    if not job.job.prepare:
        return
    if not script.is_file():
        raise ConfigError(
            f"job.prepare: there is no file {script}. Relative paths begin at the current folder, {Path.cwd()}."
        )
    code = subprocess.run([sys.executable, str(script)], check=False).returncode
    if code:
        raise ConfigError(f"job.prepare: {script} ended with exit code {code}. Correct what it says above.")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m titanlite.preflight --world-size N --config FILE ...`: exit code 0, or 2 after one clear error."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, default=1)
    known, rest = parser.parse_known_args(argv)
    try:
        job = load_config(rest)
        prepare(job)
        check(job, known.world_size)
    except TitanliteError as error:
        print(f"titanlite: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
