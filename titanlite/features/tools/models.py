"""The model given to a command: found (a run, a step, a Hugging Face folder, or a hub id), loaded,
and inspected.

`python -m titanlite inspect MODEL` shows the contents of a checkpoint, and whether it is complete.
"""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.assemble import build_model
from titanlite.base.agree import get_rank_and_size
from titanlite.base.errors import CheckpointError, ConfigError, raise_problems
from titanlite.base.text import (
    Parser,
    command,
    format_count,
    format_size,
    format_table,
    suggest,
)
from titanlite.checkpoint import Progress
from titanlite.checkpoint.commit import (
    MANIFEST_FILE,
    check_folder,
    find_newest_complete,
    list_steps,
    step_folder,
)
from titanlite.checkpoint.folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    DTYPES,
    OWN_FOLDER,
    Stored,
    StoredTensor,
    read_headers,
    read_json,
    read_model_headers,
    shown,
)
from titanlite.checkpoint.hf_model import weights_of
from titanlite.checkpoint.quantized import attach_scales
from titanlite.checkpoint.train_state import STATE_FILE
from titanlite.config import AnyModelConfig, JobConfig
from titanlite.config.assets import local_folder
from titanlite.config.parallelism import check_parallelism, resolve_degrees
from titanlite.config.schema import ParallelismSection, TrainingSection
from titanlite.distributed import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.features.lora.merge import MergedSource
from titanlite.features.lora.peft_format import read_adapter
from titanlite.materialize import SourceProvider, materialize
from titanlite.models.families import any_model_config_from_hf, part_sizes
from titanlite.models.interface import Model

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MODEL_HELP = (
    "run's folder (its newest complete checkpoint), step-N folder, Hugging Face folder, or hub id"
)


def find_model(command: str, name: str) -> Path:
    """Find the folder that `name` means; if it is a run, print the chosen step to standard error.

    Raises:
        CheckpointError: the run has no complete checkpoint.
        ConfigError: there is no such folder, and no such model on the hub.
    """
    path = Path(os.path.expanduser(name))
    near = suggest(
        path.name,
        [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else [],
    )
    try:
        folder = Path(local_folder(f"{command}: MODEL", name, weights=True))
    except ConfigError as error:
        raise ConfigError(f"{error}{near}") from None
    if not folder.is_dir():
        raise ConfigError(f"{command}: {name} is not a folder.{near or f' Give a {MODEL_HELP}.'}")
    if any((folder / file).exists() for file in ("config.json", ADAPTER_CONFIG)):
        return folder
    inner = next(
        (path for path in (folder, folder / "checkpoint", *folder.iterdir()) if list_steps(path)),
        None,
    )
    if inner is None:
        return folder  # its reader will report what is missing
    steps = list_steps(inner)
    step = find_newest_complete(inner)
    if step is None:
        problem = check_folder(step_folder(inner, steps[-1]))[0]
        raise CheckpointError(
            f"{command}: no checkpoint in {inner} is complete; of step-{steps[-1]}: {problem}"
        )
    newer = "".join(f"; step-{later} is not complete" for later in steps if later > step)
    sys.stderr.write(
        f"{command}: took {step_folder(inner, step)}, the newest complete checkpoint{newer}\n"
    )
    return step_folder(inner, step)


def find_base(command: str, adapter: Path, asked: str | None = None) -> Path:
    """Return the folder of the model to which the adapters in `adapter` belong: the folder or hub
    id `asked`, if given, otherwise the model that adapter_config.json names.

    Raises:
        CheckpointError: the adapters are damaged.
        ConfigError: there is no such model.
    """
    place = "--base"
    name = asked
    remedy = "Correct it."
    if asked is None:
        place = str(adapter / ADAPTER_CONFIG)
        name = read_adapter(adapter)[1].base
        remedy = "Give the model that the adapters were trained on with --base MODEL."
    if not name:
        raise ConfigError(f"{command}: {place} names no model. {remedy}")
    try:
        folder = Path(local_folder(place, name, weights=True))
    except ConfigError as error:
        raise ConfigError(f"{command}: {error} {remedy}") from None
    if not folder.is_dir():
        raise ConfigError(f"{command}: {place} names {name}, which is not a folder. {remedy}")
    return folder


def read_config(command: str, base: Path, adapters: Path | None) -> AnyModelConfig:
    """Return the configuration of the model in `base`. If a run saved a configuration with its
    `adapters`, as it does for native models, that one is returned: it includes the overrides of the
    run.
    """
    own = base if adapters is None else adapters / OWN_FOLDER
    return any_model_config_from_hf(own if (own / "config.json").exists() else base, command)


def load_model(
    folder: Path,
    config: AnyModelConfig,
    dtype: str,
    device: torch.device,
    *,
    tp: int = 1,
    ep: int = 1,
    adapters: Path | None = None,
) -> tuple[Model, ParallelDims | None]:
    """Load the model in `folder` for evaluation, with its meshes; without a process group the whole
    model is on this process.

    If `adapters`, a folder, is given, the adapters are merged into the weights while these are
    read.

    Raises:
        ConfigError: the degrees do not fit the number of ranks, or the model.
        CheckpointError, PlanError, VerifyError: the weights are damaged or do not fit.

    Collectives of `materialize`; every rank must call.
    """
    _, world_size = get_rank_and_size()
    # Sequences of any length are padded to a multiple of tp.
    training = TrainingSection(dtype=dtype, mixed_precision_param=dtype, seq_len=tp)  # type: ignore[arg-type]
    parallelism = ParallelismSection(tensor_parallel_degree=tp, expert_parallel_degree=ep)
    job = JobConfig(training=training, parallelism=parallelism)
    degrees = resolve_degrees(parallelism, world_size)
    raise_problems(
        ConfigError, "generate", check_parallelism(job, config, degrees, part_sizes(config))
    )
    model = build_model(config, getattr(torch, dtype))
    dims = None
    if dist.is_initialized():
        dims = ParallelDims.build(degrees, device.type)
        parallelize(model, job, dims, device.type)
    weights: SourceProvider = weights_of(folder, model)
    if adapters is not None:
        weights = MergedSource(weights, adapters, model)
    materialize(model, device, [weights])
    return model.eval(), dims


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit code 0, 1 if the checkpoint is damaged, 2 if it cannot be
    inspected.
    """
    parser = Parser(
        "inspect",
        "Show what is in a checkpoint or Hugging Face model, and check it against its manifest.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--checksums", action="store_true", help="read every byte and compare with the manifest"
    )
    parser.add_argument("--all", action="store_true", help="one line per tensor, too")
    known = parser.parse_args(argv)
    try:
        folder = find_model("inspect", known.model)
        damaged = show_folder(folder, checksums=known.checksums, every=known.all)
    except BrokenPipeError:
        raise
    # a name that no file can have, or a folder without permission
    except OSError as error:
        raise CheckpointError(f"{known.model}: {error.strerror}.") from None
    return 1 if damaged else 0


def show_folder(folder: Path, *, checksums: bool, every: bool) -> bool:
    """Print tensors, sizes and the manifest check of `folder`; return True if it is damaged."""
    has_manifest = (folder / MANIFEST_FILE).exists()
    problems = check_folder(folder, checksums=checksums) if has_manifest else []
    try:
        lines, tensors = _describe(folder)
    except CheckpointError as error:
        if not problems:
            raise
        # damage, which the manifest names
        lines = [f"  model      {error}"]
        tensors = []
    print("\n".join([str(folder), *lines]))
    if has_manifest:
        looked_at = "sizes and checksums" if checksums else "sizes"
        verdict = (
            format_count(len(problems), "problem") if problems else f"whole ({looked_at} match)"
        )
        print("\n    ".join([f"  manifest   {verdict}", *problems]))
    else:
        print(f"  manifest   none; {MANIFEST_FILE} is written by titanlite only")
    if tensors and every:
        print()
        print(format_table(_rows(folder, tensors)))
    return bool(problems)


def _describe(folder: Path) -> tuple[list[str], list[StoredTensor]]:
    own_files = sorted((folder / OWN_FOLDER).glob("*.safetensors"))
    own = read_headers(own_files, f"checkpoint {folder}")
    if (folder / ADAPTER_FILE).exists() and not list(folder.glob("model*.safetensors*")):
        model, adapter = read_adapter(folder)
        size = format_size(sum(tensor.nbytes for tensor in model.values()))
        scaled = f"scaled by {adapter.scaling:g}, {size}, of {shown(adapter.base)}"
        lines = [f"  adapter    LoRA of rank {adapter.rank}, {scaled}"]
    else:
        model = read_model_headers(folder)
        lines = [f"  model      {_describe_model(folder, model)}"]
    if (folder / STATE_FILE).exists():
        progress = Progress.read(folder)
        versions = ", ".join(
            f"{shown(name)} {shown(version)}" for name, version in progress.versions.items()
        )
        ranks = format_count(progress.world_size, "rank")
        state = f"step {progress.step}, {progress.samples} samples, {ranks}, {versions}"
        lines += [f"  training   {state}", f"  data       {shown(progress.data)}"]
    return lines, [*model.values(), *own.values()]


def _describe_model(folder: Path, model: Stored) -> str:
    try:
        config = read_json(folder / "config.json", str(folder))
    except CheckpointError:
        there = (folder / "config.json").exists()
        config = {"model_type": "config.json cannot be read" if there else "no config.json"}
    weights = attach_scales(model, None).values()
    numel = sum(math.prod(tensor.shape) for tensor in weights)
    dtypes = ", ".join(sorted({_DTYPE_NAMES[tensor.dtype] for tensor in weights}))
    size = sum(tensor.nbytes for tensor in model.values())
    name = shown(config.get("model_type", "no model_type"))
    files = format_count(len({tensor.file for tensor in model.values()}), "file")
    return f"{name}, {numel / 1e6:,.1f} M parameters, {dtypes}, {format_size(size)} in {files}"


def _rows(folder: Path, tensors: Iterable[StoredTensor]) -> list[tuple[str, ...]]:
    rows = [("tensor", "dtype", "shape", "size", "file")]
    for tensor in tensors:
        where = str(tensor.file.relative_to(folder))
        size = format_size(tensor.nbytes)
        rows.append((shown(tensor.key), _DTYPE_NAMES[tensor.dtype], str(tensor.shape), size, where))
    return rows
