"""A folder of safetensors files: what is in it, found from the headers alone."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint.header import StoredTensor, read_header, shown
from titanlite.errors import CheckpointError, raise_problems

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# What titanlite adds to a Hugging Face model lies in a folder of its own: vLLM reads every *.safetensors that lies
# beside a model without an index, and people copy folders with a glob.
OWN_FOLDER = "titanlite"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Stored:
    """The tensors of some files.

    Attributes:
        tensors: by key.
        file_bytes: size of every file when its header was read.
    """

    tensors: dict[str, StoredTensor]
    file_bytes: dict[Path, int]


def read_model_headers(folder: Path) -> Stored:
    """The tensors of the Hugging Face model in `folder`: of model.safetensors, or of the files that the index names.

    Raises:
        CheckpointError: there is no model, only pickle files, a file is missing or damaged, two files have the same
            key, or index and files contradict each other. Lists all problems.
    """
    where = f"checkpoint {folder}"
    if not folder.is_dir():
        raise CheckpointError(f"{where}: is no folder. Give a folder with {SINGLE_FILE} or {INDEX_FILE}.")
    if (folder / SINGLE_FILE).exists():
        return read_headers([folder / SINGLE_FILE], where)
    if (folder / INDEX_FILE).exists():
        weight_map = _read_index(folder / INDEX_FILE)
        stored = read_headers([folder / name for name in sorted(set(weight_map.values()))], where)
        _check_index(where, weight_map, stored)
        return stored
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{where}: has {pickles[0]}, but no safetensors file. Pickle files can run code when they are read, so "
            "they never are; convert the model with transformers' save_pretrained."
        )
    raise CheckpointError(f"{where}: has neither {SINGLE_FILE} nor {INDEX_FILE}.")


def read_headers(files: Iterable[Path], where: str) -> Stored:
    """The tensors of `files` together.

    Raises:
        CheckpointError: a file is missing or damaged, or two files have the same key. Lists all problems.
    """
    found = Stored({}, {})
    problems: list[str] = []
    for file in files:
        try:
            tensors = read_header(file)
            found.file_bytes[file] = file.stat().st_size
        except CheckpointError as error:
            problems.append(str(error).removeprefix("checkpoint "))
            continue
        for key, tensor in tensors.items():
            if key in found.tensors:
                problems.append(f"{shown(key)}: is in {found.tensors[key].file.name} and in {file.name}.")
            found.tensors[key] = tensor
    raise_problems(CheckpointError, where, problems)
    return found


def read_json(path: Path, where: str) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{where}: there is no {path.name}.") from None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot read {path.name}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {path.name} is not valid JSON: {shown(error)}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {path.name} is not a JSON object.")
    return value


def _read_index(path: Path) -> dict[str, str]:
    where = f"checkpoint {path.parent}"
    weight_map = read_json(path, where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: {path.name} has no weight_map.")
    bad = [
        f"{path.name}: {shown(key)} is said to be in {shown(repr(file))}, which is not the name of a safetensors file "
        "in this folder."
        for key, file in weight_map.items()
        # A path could lead out of the folder.
        if not isinstance(file, str)
        or not file.endswith(".safetensors")
        or file != Path(file).name
        or not file.isprintable()
        or "\\" in file
    ]
    raise_problems(CheckpointError, where, bad)
    return weight_map


def _check_index(where: str, weight_map: dict[str, str], stored: Stored) -> None:
    problems = []
    for key, file in weight_map.items():
        tensor = stored.tensors.get(key)
        if tensor is None:
            problems.append(f"{shown(key)}: {INDEX_FILE} says that it is in {file}, but it is not.")
        elif tensor.file.name != file:
            problems.append(f"{shown(key)}: {INDEX_FILE} says that it is in {file}, but it is in {tensor.file.name}.")
    problems += [
        f"{shown(key)}: is in {tensor.file.name}, but not in {INDEX_FILE}."
        for key, tensor in stored.tensors.items()
        if key not in weight_map
    ]
    raise_problems(CheckpointError, where, problems)
