"""Adapters on disk, in the format of the `peft` library: adapter_model.safetensors and adapter_config.json.

`peft` wraps the module with an adapter: a linear layer X has `base_model.model.X.lora_A.weight` (r, in) and `lora_B`
(out, r). Fused experts are parameters, and it wraps their module once per parameter, the first one innermost (under
`base_layer`). Their matrices are flat: A is (E * r, in), and B is (out, r * E) with the experts running fastest, so
that B[e][o, j] is at column j * E + e.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.base.log import logger
from titanlite.checkpoint.folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    OWN_FOLDER,
    UNFINISHED_FILES,
    Stored,
    how_to_finish,
    read_headers,
    read_json,
)
from titanlite.checkpoint.pieces import MASTER_PREFIX
from titanlite.checkpoint.reader import Placed, SafetensorsReader
from titanlite.config.schema import LoRASection
from titanlite.features.lora.layers import scaling_of
from titanlite.materialize import Read, ReadRequest, Region, Source, TensorInfo, Unfit
from titanlite.models.interface import is_adapter

PREFIX = "base_model.model."
_EXPERT_ADAPTER = re.compile(r"(.*)\.(gate_up|up|down)_(lora_[AB])")
HUB_SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/([0-9a-f]+)/?$")


@dataclass(frozen=True)
class AdapterPlace:
    """Key and shape of a stored adapter, and the dims of the run-time tensor in the order on disk, before some are
    joined.
    """

    key: str
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def stored_region(self, region: Region) -> Region:
        return Region(tuple(region.starts[dim] for dim in self.order), tuple(region.lengths[dim] for dim in self.order))


def adapter_place(name: str, shape: tuple[int, ...], names: Iterable[str]) -> AdapterPlace:
    """Return the place of the adapter `name` of global `shape`; `names` are those of all adapters of the model."""
    match = _EXPERT_ADAPTER.fullmatch(name)
    if match is None:
        module, _, leaf = name.rpartition(".")
        return AdapterPlace(f"{PREFIX}{module}.{leaf}.weight", shape, tuple(range(len(shape))))
    module, which, leaf = match.groups()
    inner = ".base_layer" if which != "down" and f"{module}.down_{leaf}" in names else ""
    key = f"{PREFIX}{module}{inner}.{leaf}.weight"
    if leaf == "lora_A":
        return AdapterPlace(key, (shape[0] * shape[1], shape[2]), (0, 1, 2))
    return AdapterPlace(key, (shape[1], shape[2] * shape[0]), (1, 2, 0))


def name_of_base(folder: str) -> str:
    """Return the name of the model in `folder` for adapters: `owner/model@revision` if it is a local copy of one."""
    hub = HUB_SNAPSHOT.search(folder)
    return f"{hub[1]}/{hub[2]}@{hub[3]}" if hub else str(Path(folder).absolute())


def adapter_checkpoint(folder: Path, section: LoRASection, base: str = "", *, key: str = "") -> "AdapterCheckpoint":
    """Return the adapters in `folder` as a source for `materialize`, next to the one of the model in the folder `base`.

    Warns if they were trained on a model of another name. `key` is the setting that asks for them; without one they are
    of the run to resume.

    Raises:
        CheckpointError: on all ranks; there are none, they are damaged, or of another alpha or scaling than `section`.

    Collectives: one broadcast; every rank must call.
    """

    def read() -> Stored:
        if key and not (folder / ADAPTER_FILE).exists():
            raise CheckpointError(f"{key}: {folder} has no {ADAPTER_FILE}. Give a folder of adapters, or leave it out.")
        stored, config = read_adapter(folder, exact=not key)
        if key and config.rank != section.rank:
            raise CheckpointError(
                f"{key}: the adapters in {folder} have rank {config.rank}, but lora.rank is {section.rank}. Set it to "
                f"{config.rank}, or leave {key} out."
            )
        if config.scaling != scaling_of(section) and config.rank == section.rank:
            raise CheckpointError(
                f"checkpoint {folder}: its adapters are scaled by {config.scaling:g}, but lora.alpha = "
                f"{section.alpha:g} and lora.use_rslora = {str(section.use_rslora).lower()} scale by "
                f"{scaling_of(section):g}. Set them as they were, or "
                f"{f'leave {key} out' if key else 'set another job.dump_folder'}."
            )
        if base and config.base != name_of_base(base):
            logger.warning(
                "checkpoint: the adapters in %s were trained on %s, this run puts them on %s; it must be the "
                "same model.",
                *(folder, config.base, name_of_base(base)),
            )
        return stored

    return AdapterCheckpoint(str(folder), on_first_rank(read))


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of an adapter_config.json that applying the adapters needs; `base` as in `MergedAdapters`."""

    rank: int
    scaling: float
    base: str
    target_parameters: tuple[str, ...]


def read_adapter(folder: Path, *, exact: bool = False) -> tuple[Stored, AdapterConfig]:
    """Tensors and configuration of the adapters in `folder`; with `exact` also where only a resume can read them.

    Raises:
        CheckpointError: there are none, they are damaged, or need what titanlite cannot apply.
    """
    where = f"checkpoint {folder}"
    files = [folder / ADAPTER_FILE]
    if not files[0].exists():
        how = how_to_finish(folder)
        if not how or not (folder / ADAPTER_CONFIG).exists():
            remedy = "Set lora.rank = 0" if exact else "Give a folder with adapters"
            raise CheckpointError(f"{where}: has no {ADAPTER_FILE}, so it is not of a run with adapters. {remedy}.")
        if not exact:
            raise CheckpointError(f"{where}: has no {ADAPTER_FILE}, which could not be saved. {how}")
        files = sorted((folder / OWN_FOLDER).glob(UNFINISHED_FILES))
    stored = read_headers(files, where)
    table = read_json(folder / ADAPTER_CONFIG, where)
    problems = [
        f"{ADAPTER_CONFIG}: {key} = {value!r} is not supported."
        for key, value in sorted({"peft_type": None, **table}.items())
        if key not in _HARMLESS and value not in _PLAIN.get(key, _OFF)
    ]
    if problems:
        problems[-1] += (
            " titanlite has plain LoRA only, W + scaling * B A on an unchanged W. If peft can merge this kind, let it: "
            f"PeftModel.from_pretrained(model, {str(folder)!r}).merge_and_unload().save_pretrained(OUT), and use OUT. "
            "Where init_lora_weights is the problem, merge in the process that trained them: loading may begin anew."
        )
    rank: Any = table.get("r")
    alpha: Any = table.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        problems.append(f"{ADAPTER_CONFIG}: r = {rank!r} and lora_alpha = {alpha!r} are not a rank and a factor.")
    raise_problems(CheckpointError, where, problems)
    scaling = float(alpha) / (rank**0.5 if table.get("use_rslora") else rank)
    parameters, revision = table.get("target_parameters") or [], table.get("revision")
    base = table.get("base_model_name_or_path")
    name = base if isinstance(base, str) else ""
    if name and isinstance(revision, str) and not Path(name).exists():
        name += f"@{revision}"
    return stored, AdapterConfig(rank, scaling, name, tuple(map(str, parameters)))


# Keys of adapter_config.json, as peft 0.21 writes it, that do not change what the stored matrices compute: where they
# come from, which layers have some, and settings of what other keys switch on.
_HARMLESS = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("r", "lora_alpha", "lora_dropout", "runtime_config", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    )
)
# The values of other keys with which adapters are plain LoRA; of keys that are not known, those that switch off.
_OFF: tuple[Any, ...] = (None, False, [], {})
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (True, *_OFF),
    # These begin with other A and B. Any other one (pissa, olora, corda, loftq, lora_ga) begins with another W, too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}


class AdapterCheckpoint:
    """A `SourceProvider` that reads every adapter of the model; strict, but silent about all that is no adapter."""

    complete = False

    def __init__(self, folder: str, stored: Stored) -> None:
        self.name = f"checkpoint {folder}"
        self._folder, self._stored = folder, stored

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source | Unfit]]:
        adapters = {name: info for name, info in tensors.items() if is_adapter(name)}
        placed: dict[str, tuple[tuple[int, ...], Sequence[Placed]]] = {}
        places: dict[str, AdapterPlace] = {}
        reader = _AdapterReader(SafetensorsReader(self._folder, placed, self._stored.file_bytes), places)
        claims: list[tuple[str, Source | Unfit]] = []
        used: set[str] = set()
        for name, info in adapters.items():
            place = adapter_place(name, info.shape, adapters)
            if MASTER_PREFIX + name in self._stored.tensors:
                place = AdapterPlace(MASTER_PREFIX + name, info.shape, tuple(range(len(info.shape))))
            used.add(place.key)
            tensor = self._stored.tensors.get(place.key)
            if tensor is None:
                reason = f"missing, {self.name} does not have {place.key}. Was lora.targets changed?"
                claims.append((name, Unfit(reason)))
            elif tensor.shape != place.shape:
                reason = f"{self.name} has {place.key} with shape {tensor.shape}, the model expects {place.shape}."
                claims.append((name, Unfit(f"{reason} Was lora.rank changed?")))
            else:
                whole = Region((0,) * len(info.shape), info.shape)
                placed[name] = (info.shape, [Placed(tensor, place.stored_region(whole))])
                places[name] = place
                claims.append((name, Read(reader, name, info.shape)))
        claims += [
            (key, Unfit(f"unexpected, {self.name} has it and the model has no such adapter. Was lora.targets changed?"))
            for key in self._stored.tensors
            if key not in used
        ]
        return claims


class _AdapterReader:
    """A `TensorReader` whose stored tensors may have their dims in another order."""

    def __init__(self, inner: SafetensorsReader, places: Mapping[str, AdapterPlace]) -> None:
        self.name, self.proves_coverage = inner.name, inner.proves_coverage
        self._inner, self._places = inner, places

    def read(self, requests: Sequence[ReadRequest]) -> None:
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        inner: list[ReadRequest] = []
        for request in requests:
            place, destination = self._places[request.name], request.destination
            region = place.stored_region(request.region)
            if list(place.order) != sorted(place.order):
                destination = torch.empty(region.lengths, dtype=destination.dtype, device=destination.device)
                back = [place.order.index(dim) for dim in range(len(place.order))]
                moved.append((request.destination, destination.permute(back)))
            inner.append(ReadRequest(request.name, region, destination))
        self._inner.read(inner)
        for destination, staged in moved:
            destination.copy_(staged)
