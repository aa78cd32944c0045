"""Resolution of the configured models (paths and hub repositories) to local folders, and back."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite.base.errors import ConfigError
from titanlite.base.files import check_regular
from titanlite.base.text import first_line
from titanlite.config.data import get_source_key, get_sources, holds_rows
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection, JobConfig

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# Name of a repository's folder in the cache of huggingface_hub.
_HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]+)")
_DESCRIPTION = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "README.md"]
_WEIGHTS = ["*.safetensors"]
# Files that are not downloaded: copies of the weights in other layouts, and all subfolders.
_IGNORED = ["consolidated*", "*/*"]


@dataclass(frozen=True)
class BaseModel:
    """The model that training began with: a hub id and its commit, or the last part of a local
    path.
    """

    name: str
    revision: str = ""
    on_hub: bool = False


def base_model_of(path: str) -> BaseModel | None:
    """Return the model that `checkpoint.initial_load_path` named before it became a local folder;
    None for random weights.
    """
    if not path:
        return None
    if match := _HUB_CACHE.search(Path(path).as_posix()):
        return BaseModel(f"{match[1]}/{match[2]}", match[3], on_hub=True)
    return BaseModel(Path(path).name)


def is_hub_id(name: str) -> bool:
    """Return True if `name` has the form `owner/name[@revision]` of a hub id; a local path may have
    it too.
    """
    return _HUB_ID.fullmatch(name) is not None


def resolve_assets(job: JobConfig, *, weights: bool = True) -> JobConfig:
    """Return `job` with `model.hf_assets_path`, `checkpoint.initial_load_path` and `lora.init_from`
    as local folders.

    A run that begins with a pretrained model takes sizes and tokenizer from that model's folder,
    unless they are set. Repositories of the hub are downloaded on first use, weights only if
    `weights`, and never as pickle files.

    Raises ConfigError: a repository is not in the local cache, and cannot be downloaded.
    """
    model = job.model
    checkpoint = job.checkpoint
    data = job.data
    if job.lora.init_from:
        path = local_folder("lora.init_from", job.lora.init_from, weights=weights)
        job = replace(job, lora=replace(job.lora, init_from=path))
    if model.hf_assets_path:
        needed = weights and model.hf_assets_path == checkpoint.initial_load_path
        path = local_folder(assets_key(job), model.hf_assets_path, weights=needed)
        model = replace(model, hf_assets_path=path)
    if checkpoint.initial_load_path:
        path = local_folder(weights_key(job), checkpoint.initial_load_path, weights=weights)
        checkpoint = replace(checkpoint, initial_load_path=path)
        if not model.flavor and not model.hf_assets_path:
            model = replace(model, hf_assets_path=path)
        elif (
            not (model.hf_assets_path or data.tokenizer_path)
            and (Path(path) / "tokenizer.json").is_file()
        ):
            data = replace(data, tokenizer_path=path)
    if model.path:
        model = replace(model, path=checkpoint.initial_load_path or model.hf_assets_path)
    return replace(job, model=model, checkpoint=checkpoint, data=data)


def weights_key(job: JobConfig) -> str:
    """Return the setting that names the weights a run begins with, as the user wrote it."""
    return "model.path" if job.model.path else "checkpoint.initial_load_path"


def assets_key(job: JobConfig) -> str:
    """Return the setting that names the folder with config.json and tokenizer, as the user wrote
    it.
    """
    if job.model.path:
        return "model.path"
    same = job.model.hf_assets_path == job.checkpoint.initial_load_path
    return "checkpoint.initial_load_path" if same else "model.hf_assets_path"


def list_model_paths(job: JobConfig) -> dict[str, str]:
    """Return the paths that a run's model, adapters and tokenizer are read from, by the settings
    that name them.
    """
    paths = [
        (weights_key(job), job.checkpoint.initial_load_path),
        (
            assets_key(job),
            job.model.hf_assets_path,
        ),  # the same key twice: with a flavor, one of the two is empty
        ("lora.init_from", job.lora.init_from),
        ("data.tokenizer_path", job.data.tokenizer_path),
        ("data.chat_template", job.data.chat_template),
    ]
    return {key: path for key, path in paths if path}


def assets_folder(model: ModelSection, checkpoint: CheckpointSection) -> Path | None:
    """Return the folder that describes the run's first model, if there is one. Call
    `resolve_assets` first.
    """
    # With a flavor, only the tokenizer is from there.
    described = "" if model.flavor else model.hf_assets_path
    for name in (described, checkpoint.initial_load_path):
        if name and (Path(name) / "config.json").is_file():
            return Path(name)
    return None


def find_missing_files(job: JobConfig) -> list[str]:
    """Return a problem for each path of a model, of data or of a run that does not exist and is not
    a hub id.
    """
    data = job.data
    paths = list_model_paths(job) | {"evaluation.path": job.evaluation.path}
    local = {"data.tokenizer_path", "data.chat_template"}
    for name, source in get_sources(data).items():
        for setting in ("path", "validation_path"):
            key = get_source_key(data, name, setting)
            paths[key] = getattr(source, setting)
            if data.dataset != "examples":
                local.add(key)
    problems = []
    for key, name in paths.items():
        try:
            if name:
                check_regular(os.path.expanduser(name))
        except IsADirectoryError:
            pass  # if a file is expected, its reader reports it
        except FileNotFoundError:
            if key in local or not is_hub_id(name) or holds_rows(name):
                problems.append(f"{key}: {name} does not exist. {suggest_path(key)}")
        except OSError as error:
            problems.append(
                f"{key}: cannot read {name}: {error.strerror}. Give a file or a folder of files."
            )
    return problems


def suggest_path(key: str) -> str:
    """Suggest what to write if the path of setting `key` does not exist."""
    what = (
        " or an id of the Hugging Face hub (owner/name)"
        if key.startswith(("model.", "checkpoint."))
        else ""
    )
    return (
        f"Give a path that exists{what}. Wildcards are for data.pattern only. Relative paths begin "
        f"at the current folder, {Path.cwd()}."
    )


def local_folder(key: str, name: str, *, weights: bool) -> str:
    """Return the folder of setting `key` = `name`: a path, or the local copy of the hub's
    `owner/model[@revision]`.

    Raises ConfigError: the repository is not in the local cache, and cannot be downloaded.
    """
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
    if path.exists() or not is_hub_id(name):
        return str(path)
    # Takes half a second, and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = name.partition("@")

    def fetch(local_files_only: bool) -> str:
        return snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=_DESCRIPTION + (_WEIGHTS if weights else []),
            ignore_patterns=_IGNORED,
            local_files_only=local_files_only,
        )

    try:
        with suppress(LocalEntryNotFoundError):
            # All ranks reach this line. Files that the check before the launch has downloaded need
            # no further requests.
            folder = fetch(local_files_only=True)
            if not weights or any(Path(folder).glob("*.safetensors")):
                return folder
        return fetch(local_files_only=False)
    except Exception as error:  # noqa: BLE001 - of the hub's library, or of the one that it reads HTTP with
        raise ConfigError(
            f"{key}: '{name}' is not a folder here, not in the cache of the Hugging Face hub, "
            f"and cannot be downloaded: {first_line(error)}. Correct the name, give a local "
            "folder, or set HF_HOME to a cache that has it; for a gated or private model, accept "
            "the license on the hub and log in with `hf auth login`, or set HF_TOKEN."
        ) from None
