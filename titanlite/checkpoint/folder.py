"""A folder of safetensors files: what is in it, found from the headers alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.base import files
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.checkpoint.header import StoredTensor, read_header, shown

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# What titanlite adds to a Hugging Face model lies in a folder of its own: vLLM reads every *.safetensors that lies
# beside a model without an index, and people copy folders with a glob.
OWN_FOLDER = "titanlite"
# In that folder: all weights under their run-time names, where they could not be saved in the model's own form.
UNFINISHED_FILES = "model*.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Stored:
    """The tensors of some files, by key, and the size of every file when its header was read."""

    tensors: dict[str, StoredTensor]
    file_bytes: dict[Path, int]
    block: tuple[int, int] | None = (128, 128)  # rows and columns of an FP8 weight with a common factor
    in_float32: frozenset[str] = frozenset()  # keys that stay so, if most bytes of the model are in fewer bits


def read_model_headers(folder: Path) -> Stored:
    """Read the headers of the Hugging Face model in `folder`: model.safetensors, or the files that the index names.

    Raises CheckpointError: there is no model, only pickle files, a file is missing or damaged, or two files have the
    same key. Lists all problems.
    """
    where = f"checkpoint {folder}"
    try:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be listed: {error.strerror}.") from None
    if names is None:
        raise CheckpointError(f"{where}: is no folder. Give a folder with {SINGLE_FILE} or {INDEX_FILE}.")
    if SINGLE_FILE in names:
        return read_headers([folder / SINGLE_FILE], where)
    if INDEX_FILE in names:
        names = set(_read_index(folder / INDEX_FILE).values())
        return read_headers([folder / name for name in sorted(names)], where)
    if ADAPTER_FILE in names:
        raise CheckpointError(
            f"{where}: has {ADAPTER_FILE}, adapters without their model. Set lora.rank to train them on, or merge "
            f"them: python -m titanlite export {folder} OUT --merge."
        )
    if how := how_to_finish(folder):
        raise CheckpointError(
            f"{where}: its weights are in {OWN_FOLDER} alone, since they could not be saved in their own form. {how}"
        )
    pickles = sorted(name for name in names if name.endswith(_PICKLE_SUFFIXES))
    if pickles:
        raise CheckpointError(
            f"{where}: has {shown(pickles[0])}, but no safetensors file. Pickle files can run code when they are "
            "read, so they never are; convert the model with transformers' save_pretrained."
        )
    raise CheckpointError(f"{where}: has neither {SINGLE_FILE} nor {INDEX_FILE}.")


def how_to_finish(folder: Path) -> str:
    """Return what to do with a checkpoint whose weights could not be saved in their own form; empty if they were."""
    if not any((folder / OWN_FOLDER).glob(UNFINISHED_FILES)):
        return ""
    if (folder / ADAPTER_CONFIG).exists():
        return "Finish it: run the command that trained it once more; it goes on from there and saves them anew."
    return f"Finish it: python -m titanlite export {folder} OUT."


def read_headers(paths: Iterable[Path], where: str) -> Stored:
    """Read the headers of the files at `paths` together.

    Raises CheckpointError: a file is missing or damaged, or two files have the same key. Lists all problems.
    """
    found = Stored({}, {})
    problems: list[str] = []
    for file in paths:
        try:
            tensors = read_header(file)
        except CheckpointError as error:
            problems.append(str(error).removeprefix("checkpoint "))
            continue
        found.file_bytes[file] = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
        for key, tensor in tensors.items():
            if key in found.tensors:
                problems.append(f"{shown(key)}: is in {found.tensors[key].file.name} and in {file.name}.")
            found.tensors[key] = tensor
    raise_problems(CheckpointError, where, problems)
    return found


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises CheckpointError: it cannot be read, because of the OSError that is its cause, or is no JSON object.
    """
    try:
        value = files.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{where}: there is no {path.name}.") from None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot read {path.name}: {error.strerror}.") from error
    except ValueError as error:
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
