"""The model that a command is given: a run, a step, a Hugging Face folder, or a hub id; and the one of adapters."""

import os
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

from titanlite.base.errors import CheckpointError, ConfigError
from titanlite.base.log import logger
from titanlite.base.text import suggest
from titanlite.checkpoint.commit import check_folder, find_complete_before, list_steps, step_folder
from titanlite.checkpoint.folder import ADAPTER_CONFIG
from titanlite.config.assets import local_folder
from titanlite.features.lora.peft_format import read_adapter

MODEL_HELP = "run's folder (its newest complete checkpoint), step-N folder, Hugging Face folder, or hub id"


def find_model(command: str, name: str) -> Path:
    """Find the folder that `name` means, and say on standard error which step of a run it is.

    Raises:
        CheckpointError: the run has no complete checkpoint.
        ConfigError: there is no such folder, and no such model on the hub.
    """
    path = Path(os.path.expanduser(name))
    near = suggest(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else [])
    try:
        folder = Path(local_folder(f"{command}: MODEL", name, weights=True))
    except ConfigError as error:
        raise ConfigError(f"{error}{near}") from None
    if not folder.is_dir():
        raise ConfigError(f"{command}: {name} is no folder.{near or f' Give a {MODEL_HELP}.'}")
    if any((folder / file).exists() for file in ("config.json", ADAPTER_CONFIG)):
        return folder
    inner = next((path for path in (folder, folder / "checkpoint", *folder.iterdir()) if list_steps(path)), None)
    if inner is None:
        return folder  # who reads it says what is missing
    steps = list_steps(inner)
    step = find_complete_before(inner, steps[-1] + 1)
    if step is None:
        problem = check_folder(step_folder(inner, steps[-1]))[0]
        raise CheckpointError(f"{command}: no checkpoint in {inner} is complete; of step-{steps[-1]}: {problem}")
    newer = "".join(f"; step-{later} is not complete" for later in steps if later > step)
    sys.stderr.write(f"{command}: took {step_folder(inner, step)}, the newest complete checkpoint{newer}\n")
    return step_folder(inner, step)


def find_base(command: str, adapter: Path, asked: str | None = None) -> Path:
    """Return the folder of the model that the adapters in the folder `adapter` are for.

    `asked`, a folder or hub id, if given; or else the one that adapter_config.json names; or, if that is gone, the one
    that the configuration of their run names.

    Raises:
        CheckpointError: the adapters are damaged.
        ConfigError: there is no such model, and under which names it was looked for.
    """
    places = {"--base": asked} if asked is not None else _names_of_base(adapter)
    problems = []
    for place, name in places.items():
        try:
            folder = Path(local_folder(place, name, weights=True)) if name else None
        except ConfigError as error:
            problems.append(str(error))
            continue
        if folder is not None and folder.is_dir():
            if problems:
                logger.warning("%s: %s It is %s by %s.", command, problems[0], name, place)
            return folder
        problems.append(f"{place} names {f'{name}, which is no folder' if name else 'no model'}.")
    if asked is None:
        problems.append("Give the model that the adapters were trained on with --base MODEL.")
    raise ConfigError(f"{command}: {' '.join(problems)}")


def _names_of_base(adapter: Path) -> dict[str, str]:
    """Return what adapter_config.json and the configuration of the run call the model, by the file that says so."""
    names = {str(adapter / ADAPTER_CONFIG): read_adapter(adapter)[1].base}
    for parent in adapter.absolute().parents[:3]:
        with suppress(OSError, ValueError):
            table = tomllib.loads((parent / "config.toml").read_text(encoding="utf-8"))
            name = table.get("model", {}).get("path") or table.get("checkpoint", {}).get("initial_load_path")
            return names | {str(parent / "config.toml"): str(name or "")}
    return names
