"""Adapters on disk, in the format of the `peft` library: adapter_model.safetensors and
adapter_config.json.

`peft` wraps the module with an adapter: a linear layer X has `base_model.model.X.lora_A.weight` (r,
in) and `lora_B` (out, r). Fused experts are parameters, and it wraps their module once per
parameter, the first one innermost (under `base_layer`). Their matrices are flat: A is (E * r, in),
and B is (out, r * E) with the experts running fastest, so that B[e][o, j] is at column j * E + e.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.base.files import render
from titanlite.base.log import logger
from titanlite.checkpoint.description import TokenIds, write_config
from titanlite.checkpoint.folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    OWN_FOLDER,
    Stored,
    read_headers,
    read_json,
)
from titanlite.checkpoint.hf_model import HFFormat, format_of
from titanlite.checkpoint.pieces import Layout, Piece, in_rows, stored_rows
from titanlite.checkpoint.reader import Placed, SafetensorsReader, place
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.config import AnyModelConfig, ModelConfig
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection, LoRASection
from titanlite.features.lora.layers import (
    LoRALinear,
    adaptable,
    adapted_modules,
    root_of,
    scaling_of,
)
from titanlite.materialize import (
    Plan,
    Read,
    ReadRequest,
    Region,
    Source,
    SourceProvider,
    TensorInfo,
    Unfit,
    local_of,
    share_out,
)
from titanlite.models.families import family_of
from titanlite.models.interface import Model, is_adapter

PREFIX = "base_model.model."
_EXPERT_ADAPTER = re.compile(r"(.*)\.(gate_up|up|down)_(lora_[AB])")
_HUB_SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/([0-9a-f]+)/?$")


def find_rows(name: str, config: AnyModelConfig) -> Iterable[tuple[int, int]]:
    """Return `stored_rows` of the base weight `name`; transformers' classes store all in order."""
    return stored_rows(name, config) if isinstance(config, ModelConfig) else ()


@dataclass(frozen=True)
class AdapterPlace:
    """Key and shape of a stored adapter, and the run-time dims in the order on disk, before some
    are joined.
    """

    key: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    rows: Sequence[tuple[int, int]] = ()  # as those of `stored_rows`

    def pieces(self, shape: tuple[int, ...]) -> Iterable[Piece]:
        """Return the parts of the run-time tensor of global `shape`, as they follow on disk."""
        region = self.stored_region(Region((0,) * len(shape), shape))
        whole = [Piece(self.key, self.shape, region)]
        return in_rows(self.key, self.shape, self.rows) if self.rows else whole

    def stored_region(self, region: Region) -> Region:
        return Region(
            tuple(region.starts[dim] for dim in self.order),
            tuple(region.lengths[dim] for dim in self.order),
        )


def layout_of(model: Any) -> Layout:
    """Return the layout of the files that `model` was read from; of transformers' class its own."""
    return getattr(format_of(model), "layout", Layout())


def adapter_place(
    name: str, shape: tuple[int, ...], names: Iterable[str], model: Any
) -> AdapterPlace:
    """Return the place of the adapter `name` of global `shape`; `names` are those of all adapters
    of the `model`.
    """
    match, key_of = _EXPERT_ADAPTER.fullmatch(name), layout_of(model).key
    if match is None:
        module, _, leaf = name.rpartition(".")
        key = f"{PREFIX}{key_of(module)}.{leaf}.weight"
        rows = list(find_rows(f"{module}.weight", model.config)) if leaf == "lora_B" else []
        return AdapterPlace(key, shape, tuple(range(len(shape))), rows)
    module, which, leaf = match.groups()
    inner = ".base_layer" if which != "down" and f"{module}.down_{leaf}" in names else ""
    key = f"{PREFIX}{key_of(module)}{inner}.{leaf}.weight"
    if leaf == "lora_A":
        return AdapterPlace(key, (shape[0] * shape[1], shape[2]), (0, 1, 2))
    return AdapterPlace(key, (shape[1], shape[2] * shape[0]), (1, 2, 0))


def _name_of_base(folder: str) -> tuple[str, str]:
    """Return name and revision of the model in `folder`: those of the hub if it is a local copy of
    one.
    """
    hub = _HUB_SNAPSHOT.search(folder)
    return (f"{hub[1]}/{hub[2]}", hub[3]) if hub else (str(Path(folder).absolute()), "")


def adapter_checkpoint(
    folder: Path, section: LoRASection, model: Model, base: str = "", *, key: str = ""
) -> "AdapterCheckpoint":
    """Return the adapters in `folder` as a source for `materialize(model)`, next to the one of the
    model in the folder `base`.

    Warns if they were trained on a model of another name. `key` is the setting that asks for them;
    without one they are of the run to resume.

    Raises:
        CheckpointError: on all ranks; there are none, they are damaged, or of another alpha or
            scaling than `section`.

    Collectives: one broadcast; every rank must call.
    """

    def read() -> Stored:
        stored, config = read_adapter(folder, f"{key}: " if key else "", exact=not key)
        if key and config.rank != section.rank:
            raise CheckpointError(
                f"{key}: the adapters in {folder} have rank {config.rank}, but lora.rank is "
                f"{section.rank}. Set it to {config.rank}, or leave {key} out."
            )
        if config.scaling != scaling_of(section) and config.rank == section.rank:
            raise CheckpointError(
                f"checkpoint {folder}: its adapters are scaled by {config.scaling:g}, but "
                f"lora.alpha = {section.alpha:g} and lora.use_rslora = "
                f"{str(section.use_rslora).lower()} scale by {scaling_of(section):g}. Set them as "
                f"they were, or {f'leave {key} out' if key else 'set another job.dump_folder'}."
            )
        if base and config.base != (name := "@".join(filter(None, _name_of_base(base)))):
            logger.warning(
                "checkpoint: the adapters in %s were trained on %s, and are put on %s; it must be "
                "the same model",
                *(folder, config.base, name),
            )
        return stored

    return AdapterCheckpoint(str(folder), on_first_rank(read), model)


@dataclass(frozen=True)
class AdapterConfig:
    """Settings that applying adapters needs; `base` is their model, a folder or
    `owner/model[@revision]` of the hub.
    """

    rank: int
    scaling: float
    base: str
    target_parameters: tuple[str, ...]


def read_adapter(
    folder: Path, prefix: str = "", *, exact: bool = False
) -> tuple[Stored, AdapterConfig]:
    """Return tensors and configuration of the adapters in `folder`; with `exact`, also those that
    only a resume reads.

    Raises:
        CheckpointError: there are none, they are damaged, or need what titanlite cannot apply. It
            begins with `prefix`.
    """
    where = f"{prefix}checkpoint {folder}"
    if not (folder / ADAPTER_FILE).exists():
        remedy = "Set lora.rank = 0" if exact else "Give a folder with adapters"
        raise CheckpointError(
            f"{where}: has no {ADAPTER_FILE}, so it is not of a run with adapters. {remedy}."
        )
    stored = read_headers([folder / ADAPTER_FILE], where)
    table = read_json(folder / ADAPTER_CONFIG, where)
    problems = [
        f"{ADAPTER_CONFIG}: {key} = {table.get(key)!r} is not plain LoRA, W + scaling * B A on an "
        "unchanged W. Merge the adapters with peft, and use the merged model."
        for key, plain in _PLAIN.items()
        if table.get(key) not in plain
    ]
    rank: Any = table.get("r")
    alpha: Any = table.get("lora_alpha")
    if (
        type(rank) is not int
        or rank < 1
        or type(alpha) not in (int, float)
        or not math.isfinite(alpha)
    ):
        problems.append(
            f"{ADAPTER_CONFIG}: r = {rank!r} and lora_alpha = {alpha!r} are not a rank and a "
            "factor."
        )
    raise_problems(CheckpointError, where, problems)
    scaling = float(alpha) / (rank**0.5 if table.get("use_rslora") else rank)
    parameters, revision = table.get("target_parameters") or [], table.get("revision")
    base = table.get("base_model_name_or_path")
    name = base if isinstance(base, str) else ""
    if name and isinstance(revision, str) and not Path(name).exists():
        name += f"@{revision}"
    return stored, AdapterConfig(rank, scaling, name, tuple(map(str, parameters)))


# Values that mean plain LoRA, of the keys of adapter_config.json that could change what the stored
# matrices compute.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # Others (pissa, olora, corda, loftq, lora_ga) change W, too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    **dict.fromkeys(
        ("use_dora", "alpha_pattern", "fan_in_fan_out", "alora_invocation_tokens", "kasa_config"),
        (None, False, [], {}),
    ),
}


class AdapterCheckpoint:
    """A `SourceProvider` of all adapters of the model; strict about them, and ignores other
    tensors.
    """

    complete = False

    def __init__(self, folder: str, stored: Stored, model: Model) -> None:
        self.name = f"checkpoint {folder}"
        self._folder, self._stored, self._model = folder, stored, model

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source | Unfit]]:
        adapters = {name: info for name, info in tensors.items() if is_adapter(name)}
        placed: dict[str, tuple[tuple[int, ...], Sequence[Placed]]] = {}
        places: dict[str, AdapterPlace] = {}
        reader = _AdapterReader(
            SafetensorsReader(self._folder, placed, self._stored.file_bytes), places
        )
        left = dict.fromkeys(self._stored.tensors)
        for name, info in adapters.items():
            stored = adapter_place(name, info.shape, adapters, self._model)
            left.pop(stored.key, None)
            tensor = self._stored.tensors.get(stored.key)
            if tensor is None:
                yield (
                    name,
                    Unfit(
                        f"missing, {self.name} does not have {stored.key}. "
                        "Was lora.targets changed?"
                    ),
                )
            elif tensor.shape != stored.shape:
                reason = (
                    f"{self.name} has {stored.key} with shape {tensor.shape}, the model expects "
                    f"{stored.shape}."
                )
                yield name, Unfit(f"{reason} Was lora.rank changed?")
            else:
                placed[name] = (
                    info.shape,
                    [
                        part
                        for piece in stored.pieces(info.shape)
                        for part in place(tensor, piece.region, {}, None, piece.row)
                    ],
                )
                places[name] = stored
                yield name, Read(reader, name, info.shape)
        for key in left:
            reason = f"unexpected, {self.name} has it and the model has no such adapter."
            yield key, Unfit(f"{reason} Was lora.targets changed?")


class _AdapterReader:
    """A `TensorReader` whose stored tensors may have their dims in another order."""

    def __init__(self, inner: SafetensorsReader, places: Mapping[str, AdapterPlace]) -> None:
        self.name, self.proves_coverage = inner.name, inner.proves_coverage
        self._inner, self._places = inner, places

    def read(self, requests: Sequence[ReadRequest]) -> None:
        inner, staged = list[ReadRequest](), list[tuple[torch.Tensor, torch.Tensor]]()
        for request in requests:
            place = self._places[request.name]
            view = request.destination.permute(place.order)
            values = view.contiguous()  # the destination itself where no dims change places
            staged += [] if values is view else [(view, values)]
            inner.append(ReadRequest(request.name, place.stored_region(request.region), values))
        self._inner.read(inner)
        for view, values in staged:
            view.copy_(values)


_LAYER = re.compile(r".*\.layers\.\d+\.")
# Names that peft takes for single experts of older transformers in models with experts, and
# renames.
_FUSED_NAMES = ("gate_proj", "up_proj", "down_proj")


class PeftFormat(HFFormat):
    """Checkpoints of the adapters alone; every run reads the pretrained model anew."""

    def __init__(self, section: CheckpointSection, model: ModelSection, lora: LoRASection) -> None:
        super().__init__(section, model)
        self._lora = lora

    def initial_sources(self, model: Model) -> list[SourceProvider]:
        sources, section = super().initial_sources(model), self._lora
        if section.init_from:
            sources.append(
                adapter_checkpoint(
                    Path(section.init_from), section, model, self.base, key="lora.init_from"
                )
            )
        return sources

    def sources(self, folder: Path, model: Model) -> list[SourceProvider]:
        base = super().initial_sources(model)
        return [*base, adapter_checkpoint(folder, self._lora, model, self.base)]

    def files(self, model: Model, plan: Plan) -> list[FileLayout]:
        return adapter_files(plan)

    def describe(
        self, model: Model, token_ids: TokenIds, end_of_turn_ids: Sequence[int]
    ) -> dict[str, bytes]:
        """Build the files next to the adapters, and check the description of the model to merge
        them into, too.
        """
        assets = Path(self.base) if (Path(self.base) / "config.json").is_file() else None
        what = "the description of the model"
        render(what, lambda folder: write_config(folder, model.config, {}, torch.float32, assets))

        def write(folder: Path) -> None:
            write_adapter_config(folder, model, self._lora, self.base)
            if isinstance(model.config, ModelConfig):
                # peft's file has no place for overrides of a run; `model_config_from_hf` reads them
                # here.
                table = {
                    **family_of(model.config).to_hf(model.config),
                    "model_type": model.config.family,
                }
                (folder / OWN_FOLDER).mkdir(exist_ok=True)
                (folder / OWN_FOLDER / "config.json").write_text(
                    json.dumps(table, indent=2) + "\n", encoding="utf-8"
                )

        return render(what, write)


def adapter_files(plan: Plan) -> list[FileLayout]:
    """Layout of adapter_model.safetensors over this rank's shards, in the adapters' own dtype. No
    collective.
    """
    entries = [entry for entry in plan.entries if is_adapter(entry.fqn)]
    names = {entry.fqn for entry in entries}
    items = []
    for entry, share in zip(
        entries, share_out((entry.tensor for entry in entries), plan.group), strict=True
    ):
        stored = adapter_place(entry.fqn, entry.info.shape, names, plan.model)
        # A copy only where dims change places: B of experts.
        local = local_of(entry.tensor).permute(stored.order).contiguous()
        region = stored.stored_region(entry.region)
        items += [
            Item.of(piece, entry.dtype, local, region, share.mine, entry.fqn)
            for piece in stored.pieces(entry.info.shape)
        ]
    # One file whatever its size: peft does not know another.
    return lay_out(items, ADAPTER_FILE.removesuffix(".safetensors"), file_bytes=2**62)


def write_adapter_config(folder: Path, model: Model, section: LoRASection, base: str) -> None:
    """Write adapter_config.json for the adapters of `model` on the model in the folder `base`. On
    one rank.
    """
    modules, parameters = _targets(model)
    name, revision = _name_of_base(base)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": section.rank,
        "lora_alpha": int(section.alpha) if section.alpha == int(section.alpha) else section.alpha,
        # peft refuses dropout next to adapters of parameters; for using the adapter it makes no
        # difference.
        "lora_dropout": 0.0 if parameters else section.dropout,
        "use_rslora": section.use_rslora,
        "target_modules": modules,
        "target_parameters": parameters,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _targets(model: Model) -> tuple[list[str], list[str]]:
    """Peft's target_modules and target_parameters for the adapters of `model`.

    In models with experts peft renames target_modules gate_proj, up_proj and down_proj; the weights
    of such linear layers (dense layers, shared experts) are given as target_parameters.
    """
    adapted: set[str] = set()
    for name, module in adapted_modules(model).items():
        adapted |= (
            {name}
            if isinstance(module, LoRALinear)
            else {f"{name}.{weight}" for weight in module.adapted}
        )
    possible = adaptable(model)
    experts = {module for module, weight in possible.values() if weight}
    modules: dict[str, bool] = {}
    parameters: dict[str, bool] = {}
    for name, (_, weight) in possible.items():
        if weight:
            parameters[name] = name in adapted
        elif experts and name.rpartition(".")[2] in _FUSED_NAMES:
            parameters[f"{name}.weight"] = name in adapted
        else:
            modules[name] = name in adapted
    # peft looks at all modules: a short name must not mean one that has no adapter here.
    others = (name for name, module in root_of(model).named_modules() if module._parameters)
    modules |= {name: False for name in others if name not in possible and name not in experts}
    key_of = layout_of(model).key
    modules = {key_of(name): is_target for name, is_target in modules.items()}
    parameters = {key_of(name): is_target for name, is_target in parameters.items()}
    leaf_of = {name: name.rpartition(".")[2] for name in modules}
    suffix_of = {name: _LAYER.sub("", name) for name in parameters}
    return _shorten(modules, leaf_of), _shorten(parameters, suffix_of)


def _shorten(targeted: Mapping[str, bool], short_of: Mapping[str, str]) -> list[str]:
    """Return the targeted names; a short one where all names that it stands for are targeted."""
    not_all = {short_of[name] for name, is_target in targeted.items() if not is_target}
    return sorted(
        {
            name if short_of[name] in not_all else short_of[name]
            for name, is_target in targeted.items()
            if is_target
        }
    )
