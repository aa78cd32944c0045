"""The model that a command is given: found (a run, a step, a Hugging Face folder, or a hub id), loaded, and inspected.

`python -m titanlite inspect MODEL` shows the contents of a checkpoint, whether it is complete, and what each rank of a
run would read of it.
"""

import os
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.assemble import build_model, build_on_meta
from titanlite.base.errors import CheckpointError, ConfigError, raise_problems
from titanlite.base.log import logger
from titanlite.base.text import (
    Parser,
    command,
    fold_key,
    fold_names,
    format_count,
    format_size,
    format_table,
    suggest,
)
from titanlite.checkpoint import Progress
from titanlite.checkpoint.commit import MANIFEST_FILE, check_folder, find_complete_before, list_steps, step_folder
from titanlite.checkpoint.folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    DTYPES,
    FP8,
    OWN_FOLDER,
    Stored,
    StoredTensor,
    companions,
    read_headers,
    read_json,
    read_model_headers,
    shown,
)
from titanlite.checkpoint.hf_model import weights_of
from titanlite.checkpoint.pieces import find_passengers
from titanlite.checkpoint.train_state import STATE_FILE
from titanlite.config import AnyModelConfig, JobConfig, load_config
from titanlite.config.assets import local_folder
from titanlite.config.parallelism import check_parallelism, resolve_degrees
from titanlite.config.schema import ParallelismSection, TrainingSection
from titanlite.distributed import ParallelDims
from titanlite.distributed.parallel_dims import fake_ranks
from titanlite.distributed.parallelize import parallelize
from titanlite.features.lora.merge import MergedSource
from titanlite.features.lora.peft_format import read_adapter
from titanlite.features.record.run_files import RankReads, count_reads
from titanlite.features.transformers.conversion import find_packed
from titanlite.materialize import SourceProvider, build_plan, materialize
from titanlite.materialize.plan import named_tensors
from titanlite.models.families import any_model_config_from_hf
from titanlite.models.interface import Model
from titanlite.preflight import check

_MOST_RANKS = 16  # with a line of their own
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
        return folder  # reading it will report what is missing
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

    The folder or hub id `asked`, if given; otherwise the model that adapter_config.json names; if that is gone, the one
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
    """Load the model in `folder` for evaluation, with its meshes; without a process group it is whole, on this process.

    With the folder of `adapters`, they are merged into the weights while these are read.

    Raises:
        ConfigError: the degrees fit neither the number of ranks nor the model.
        CheckpointError, PlanError, VerifyError: the weights are damaged or do not fit.

    Collectives: those of `materialize`; every rank must call.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    # A sequence is padded to a multiple of tp, whatever its length.
    training = TrainingSection(dtype=dtype, mixed_precision_param=dtype, seq_len=tp)  # type: ignore[arg-type]
    parallelism = ParallelismSection(tensor_parallel_degree=tp, expert_parallel_degree=ep)
    job = JobConfig(training=training, parallelism=parallelism)
    degrees = resolve_degrees(parallelism, world_size)
    raise_problems(ConfigError, "generate", check_parallelism(job, config, degrees))
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
    """Print the report; exit code 0, 1 if the checkpoint is damaged, 2 if it cannot be inspected."""
    parser = Parser(
        "inspect",
        "Show what is in a checkpoint or Hugging Face model, and check it against its manifest. With --config and "
        "--world-size (and overrides), also what each rank of such a run would read.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--checksums", action="store_true", help="read every byte and compare with the manifest")
    parser.add_argument("--all", action="store_true", help="one line per tensor, layers and experts not summed up")
    parser.add_argument("--config", action="append", default=[], help="configuration of the run to show")
    parser.add_argument("--world-size", type=int, help="ranks of the run to show (default: 1)")
    known, rest = parser.parse_known_args(argv)
    try:
        folder = find_model("inspect", known.model)
        damaged = show_folder(folder, checksums=known.checksums, every=known.all)
        if known.config or known.world_size is not None or rest:
            settings = [*(f"--config={file}" for file in known.config), *rest]
            show_reads(folder, settings, 1 if known.world_size is None else known.world_size)
    except BrokenPipeError:
        raise
    except OSError as error:  # a name that no file can have, or a folder that may not be looked into
        raise CheckpointError(f"{known.model}: {error.strerror}.") from None
    return 1 if damaged else 0


def show_folder(folder: Path, *, checksums: bool, every: bool) -> bool:
    """Print tensors, sizes and the manifest check of `folder`; return True if it is damaged, or ties other values."""
    has_manifest = (folder / MANIFEST_FILE).exists()
    problems = check_folder(folder, checksums=checksums) if has_manifest else []
    untied, carried = list[str](), set[str]()
    try:
        lines, tensors = _describe(folder)
        try:
            untied, carried = _compare_with_class(folder, {tensor.key for tensor in tensors})
        except ConfigError as error:  # tensors are shown whatever the model is
            lines.append(f"  ties       not looked at: {error}")
    except CheckpointError as error:
        if not problems:
            raise
        lines, tensors = [f"  model      {error}"], []  # damage, which the manifest names
    if carried:
        size = format_size(sum(tensor.nbytes for tensor in tensors if tensor.key in carried))
        lines.append(f"  carried    {format_count(len(carried), 'tensor')} ({size}) with *, not computed or trained")
    print("\n".join([str(folder), *lines]))
    if has_manifest:
        looked_at = "sizes and checksums" if checksums else "sizes"
        verdict = format_count(len(problems), "problem") if problems else f"whole ({looked_at} match)"
        print("\n    ".join([f"  manifest   {verdict}", *problems]))
    else:
        print(f"  manifest   none; {MANIFEST_FILE} is written by titanlite only")
    if untied:
        print("\n    ".join(["  ties       broken", *untied]))
    if tensors:
        print()
        print(format_table(_rows(folder, tensors, every, carried)))
    return bool(problems or untied)


def _compare_with_class(folder: Path, keys: Collection[str]) -> tuple[list[str], set[str]]:
    """Return a problem for each tied tensor that is stored with other values, and the keys that are not computed."""
    of_parts = find_passengers(keys, ())  # the class tells which of them are computed
    if not (of_parts or "lm_head.weight" in keys) or not (folder / "config.json").is_file():
        return [], set()
    config = any_model_config_from_hf(folder, "inspect")
    if not (of_parts or config.tie_word_embeddings):
        return [], set()
    source = weights_of(folder, model := build_model(config))
    list(source({name: info for name, _, info in named_tensors(model)}))  # then it knows its passengers
    return [f"{name}: {text}" for name, text in source.untied.items()], set(source.passengers)


def _describe(folder: Path) -> tuple[list[str], list[StoredTensor]]:
    own_files = sorted((folder / OWN_FOLDER).glob("*.safetensors"))
    own = read_headers(own_files, f"checkpoint {folder}") if own_files else Stored({}, {})
    if (folder / ADAPTER_FILE).exists() and not list(folder.glob("model*.safetensors*")):
        model, adapter = read_adapter(folder)
        size = format_size(sum(tensor.nbytes for tensor in model.tensors.values()))
        scaled = f"scaled by {adapter.scaling:g}, {size}, of {shown(adapter.base)}"
        lines = [f"  adapter    LoRA of rank {adapter.rank}, {scaled}"]
    else:
        model = read_model_headers(folder)
        lines = [f"  model      {_describe_model(folder, model)}"]
    if (folder / STATE_FILE).exists():
        progress = Progress.read(folder)
        versions = ", ".join(f"{shown(name)} {shown(version)}" for name, version in progress.versions.items())
        ranks = format_count(progress.world_size, "rank")
        state = f"step {progress.step}, {progress.samples} samples, {ranks}, {versions}"
        lines += [f"  training   {state}", f"  data       {shown(progress.data)}"]
    return lines, [*model.tensors.values(), *own.tensors.values()]


def _describe_model(folder: Path, model: Stored) -> str:
    try:
        config = read_json(folder / "config.json", str(folder))
    except CheckpointError:
        there = (folder / "config.json").exists()
        config = {"model_type": "config.json cannot be read" if there else "no config.json"}
    packed = find_packed(model.tensors)
    factors = {scales.key for _, scales in packed.values()}
    factors.update(*(companions(key) for key, tensor in model.tensors.items() if tensor.dtype in FP8))
    weights = [tensor for key, tensor in model.tensors.items() if key not in factors]
    numel = sum(tensor.nbytes // tensor.dtype.itemsize for tensor in weights)
    numel += sum(blocks.nbytes for blocks, _ in packed.values())  # two in a byte
    dtypes = ", ".join(sorted({_DTYPE_NAMES[tensor.dtype] for tensor in weights}))
    size = sum(tensor.nbytes for tensor in model.tensors.values())
    name = shown(config.get("model_type", "no model_type"))
    files = format_count(len(model.file_bytes), "file")
    return f"{name}, {numel / 1e6:,.1f} M parameters, {dtypes}, {format_size(size)} in {files}"


def _rows(folder: Path, tensors: Iterable[StoredTensor], every: bool, starred: set[str]) -> list[tuple[str, ...]]:
    """Return one row per tensor, or per name, dtype and shape that differ only in the numbers of layers and experts."""
    groups: defaultdict[tuple[tuple[str, ...], str, tuple[int, ...]], list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        between = (tensor.key,) if every else fold_key(tensor.key)
        star = " *" if tensor.key in starred else ""
        groups[(*between, star), _DTYPE_NAMES[tensor.dtype], tensor.shape].append(tensor)
    rows = [("tensor", "count", "dtype", "shape", "size", "file")]
    for ((*_, star), dtype, shape), held in groups.items():
        files = sorted({str(tensor.file.relative_to(folder)) for tensor in held})
        where = files[0] if len(files) == 1 else f"{len(files)} files"
        size = format_size(sum(tensor.nbytes for tensor in held))
        name = shown(fold_names([tensor.key for tensor in held])) + star
        rows.append((name, str(len(held)), dtype, str(shape), size, where))
    return rows


def show_reads(folder: Path, settings: Sequence[str], world_size: int) -> None:
    """Print how many bytes of the checkpoint in `folder` each rank of a run with `settings` would hold and read.

    Raises:
        TitanliteError: the configuration is wrong, or the checkpoint does not fit its model; all problems at once.
    """
    checked = check(load_config(list(settings)), world_size, weights=False)
    degrees, found = checked.degrees, list[RankReads]()
    kinds = dict[str, str]()  # of source, by tensor
    with fake_ranks(world_size):  # as rank 0, the one that reads headers
        sources = [weights_of(folder, build_model(checked.model_config))]
    for first in range(0, world_size, degrees.stage_size):  # each pipeline stage has tensors of its own
        with fake_ranks(world_size, first):
            dims, cpu = ParallelDims.build(degrees, "cpu"), torch.device("cpu")
            plan = build_plan(build_on_meta(checked.job, checked.model_config, dims, cpu), sources)
            found += count_reads(plan, range(first, first + degrees.stage_size))
        here = (entry for entry in plan.entries if not entry.is_elsewhere)
        kinds |= {entry.fqn: type(entry.source).__name__.lower() for entry in here}
    rows = [("rank", "holds", "reads", "receives", "files")]
    for rank, (held, read, files) in enumerate(found[:_MOST_RANKS]):
        rows.append((str(rank), format_size(held), format_size(read), format_size(held - read), str(len(files))))
    print(f"\n{degrees}, {format_count(world_size, 'rank')}; bytes as they are on disk:\n")
    print(format_table(rows))
    if world_size > _MOST_RANKS:
        print(f"  ... and {world_size - _MOST_RANKS} ranks more")
    others = [kind for kind in kinds.values() if kind != "read"]
    total = format_size(sum(reads.read for reads in found))
    print(f"\n  all ranks together read {total}; {len(kinds) - len(others)} tensors come from the checkpoint,")
    print(f"  {len(others)} do not ({', '.join(sorted(set(others))) or 'none'})")
