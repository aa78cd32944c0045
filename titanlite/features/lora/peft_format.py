"""Adapters on disk, in the format of the `peft` library: adapter_model.safetensors and
adapter_config.json.

`peft` wraps the module that gets an adapter: a linear layer X has
`base_model.model.X.lora_A.weight` (r, in) and `lora_B` (out, r). Fused experts are parameters, so
`peft` wraps their module once per parameter; the wrapper of the first parameter is the innermost
(under `base_layer`). The matrices of experts are flat: A is (E * r, in), and B is (out, r * E) with
the expert as the fastest index, so that B[e][o, j] is at column j * E + e.
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
from titanlite.base.log import logger
from titanlite.checkpoint.description import TokenIds, describe_model
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
from titanlite.checkpoint.reader import Placed, SafetensorsReader
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.config import ModelConfig
from titanlite.config.assets import base_model_of
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection, LoRASection
from titanlite.features.lora.layers import (
    adaptable,
    adapted_modules,
    root_of,
    scaling_of,
)
from titanlite.materialize import (
    InvalidClaim,
    Plan,
    Read,
    ReadRequest,
    Region,
    Source,
    SourceProvider,
    TensorInfo,
    assign_owners,
    local_of,
)
from titanlite.models.families import family_of
from titanlite.models.interface import Model, is_adapter

PREFIX = "base_model.model."
_EXPERT_ADAPTER = re.compile(r"(.*)\.(gate_up|up|down)_(lora_[AB])")


@dataclass(frozen=True)
class AdapterPlace:
    """Key and shape of a stored adapter.

    Attributes:
        shape: shape on disk.
        order: permutation of the dims at run time that gives the order on disk; then some dims are
            flattened.
        rows: ranges of rows in their order on disk, as in `stored_rows`.
    """

    key: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    rows: Sequence[tuple[int, int]] = ()

    def pieces(self, shape: tuple[int, ...]) -> Iterable[Piece]:
        """Return the parts of the run-time tensor of global `shape`, in their order on disk."""
        region = self.stored_region(Region((0,) * len(shape), shape))
        whole = [Piece(self.key, self.shape, region)]
        return in_rows(self.key, self.shape, self.rows) if self.rows else whole

    def stored_region(self, region: Region) -> Region:
        return Region(
            tuple(region.starts[dim] for dim in self.order),
            tuple(region.lengths[dim] for dim in self.order),
        )


def layout_of(model: Any) -> Layout:
    """Return the layout of the files of `model`; a transformers class may have its own layout."""
    return getattr(format_of(model), "layout", Layout())


def adapter_place(
    name: str, shape: tuple[int, ...], names: Iterable[str], model: Any
) -> AdapterPlace:
    """Return key and shape on disk of the adapter `name` of global `shape`; `names` has all
    adapters of `model`.
    """
    match = _EXPERT_ADAPTER.fullmatch(name)
    key_of = layout_of(model).key
    if match is None:
        module, _, leaf = name.rpartition(".")
        key = f"{PREFIX}{key_of(module)}.{leaf}.weight"
        is_native = isinstance(model.config, ModelConfig)  # transformers does not reorder rows
        has_rows = leaf == "lora_B" and is_native
        rows = [*stored_rows(f"{module}.weight", model.config)] if has_rows else []
        return AdapterPlace(key, shape, tuple(range(len(shape))), rows)
    module, which, leaf = match.groups()
    inner = ".base_layer" if which != "down" and f"{module}.down_{leaf}" in names else ""
    key = f"{PREFIX}{key_of(module)}{inner}.{leaf}.weight"
    if leaf == "lora_A":
        return AdapterPlace(key, (shape[0] * shape[1], shape[2]), (0, 1, 2))
    return AdapterPlace(key, (shape[1], shape[2] * shape[0]), (1, 2, 0))


def _name_of_base(folder: str) -> tuple[str, str]:
    """Return name and revision of the model in `folder`; a local copy of a hub model has the hub's
    name and revision.
    """
    base = base_model_of(folder)
    if base is None or not base.on_hub:
        return str(Path(folder).absolute()), ""
    return base.name, base.revision


def adapter_checkpoint(
    folder: Path, section: LoRASection, model: Model, base: str = "", *, key: str = ""
) -> "AdapterCheckpoint":
    """Return the adapters in `folder` as a source for `materialize(model)`. The model in the folder
    `base` is a separate source.

    A warning is logged if the adapters were trained on a model with a different name. `key` is the
    setting that names the folder; it is empty if the adapters belong to the run that is resumed.

    Raises:
        CheckpointError, on all ranks: the adapters are missing or damaged, or have a different
            rank, alpha or scaling than `section`.

    Collectives: one broadcast; every rank must call.
    """

    def read() -> Stored:
        stored, config = read_adapter(folder, f"{key}: " if key else "")
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
                "checkpoint: the adapters in %s were trained on %s, and are applied to %s; it "
                "must be the same model",
                *(folder, config.base, name),
            )
        return stored

    return AdapterCheckpoint(str(folder), on_first_rank(read), model)


@dataclass(frozen=True)
class AdapterConfig:
    """The settings that are needed to apply adapters. `base` is their model: a folder, or
    `owner/model[@revision]` of the hub.
    """

    rank: int
    scaling: float
    base: str
    target_parameters: tuple[str, ...]


def read_adapter(folder: Path, prefix: str = "") -> tuple[Stored, AdapterConfig]:
    """Return tensors and configuration of the adapters in `folder`.

    Raises:
        CheckpointError: the adapters are missing or damaged, or titanlite cannot apply them. The
            message begins with `prefix`.
    """
    where = f"{prefix}checkpoint {folder}"
    if not (folder / ADAPTER_FILE).exists():
        raise CheckpointError(
            f"{where}: has no {ADAPTER_FILE}, so it is not of a run with adapters. Give a folder "
            "with adapters; for a resume, set lora.rank = 0."
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
            f"{ADAPTER_CONFIG}: r = {rank!r} and lora_alpha = {alpha!r} are not a positive "
            "integer and a number."
        )
    raise_problems(CheckpointError, where, problems)
    scaling = float(alpha) / (rank**0.5 if table.get("use_rslora") else rank)
    parameters = table.get("target_parameters") or []
    revision = table.get("revision")
    base = table.get("base_model_name_or_path")
    name = base if isinstance(base, str) else ""
    if name and isinstance(revision, str) and not Path(name).exists():
        name += f"@{revision}"
    return stored, AdapterConfig(rank, scaling, name, tuple(map(str, parameters)))


# Keys of adapter_config.json that can change the meaning of the stored matrices, with the values
# that mean plain LoRA.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # pissa, olora, corda, loftq and lora_ga change W, too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    **dict.fromkeys(
        ("use_dora", "alpha_pattern", "fan_in_fan_out", "alora_invocation_tokens", "kasa_config"),
        (None, False, [], {}),
    ),
}


_CHANGED = "Was the model, lora.rank or lora.targets changed?"


class AdapterCheckpoint:
    """A `SourceProvider` of all adapters of the model. It is strict about adapters, and ignores
    other tensors.
    """

    complete = False

    def __init__(self, folder: str, stored: Stored, model: Model) -> None:
        self.name = f"checkpoint {folder}"
        self._folder, self._stored, self._model = folder, stored, model

    def __call__(
        self, tensors: Mapping[str, TensorInfo]
    ) -> Iterable[tuple[str, Source | InvalidClaim]]:
        adapters = {name: info for name, info in tensors.items() if is_adapter(name)}
        placed: dict[str, Sequence[Placed]] = {}
        reader = _AdapterReader(self._folder, placed)
        left = dict.fromkeys(self._stored)
        for name, info in adapters.items():
            stored = adapter_place(name, info.shape, adapters, self._model)
            left.pop(stored.key, None)
            tensor = self._stored.get(stored.key)
            if tensor is None:
                reason = f"missing, {self.name} does not have {stored.key}."
                yield name, InvalidClaim(f"{reason} {_CHANGED}")
            elif tensor.shape != stored.shape:
                reason = (
                    f"{self.name} has {stored.key} with shape {tensor.shape}, the model expects "
                    f"{stored.shape}."
                )
                yield name, InvalidClaim(f"{reason} {_CHANGED}")
            else:
                placed[name] = [Placed(tensor, piece) for piece in stored.pieces(info.shape)]
                reader.places[name] = stored
                yield name, Read(reader, name, info.shape)
        for key in left:
            reason = f"unexpected, {self.name} has it and the model has no such adapter."
            yield key, InvalidClaim(f"{reason} {_CHANGED}")


class _AdapterReader(SafetensorsReader):
    """A reader of adapters, whose stored tensors may have a different order of dims."""

    def __init__(self, name: str, tensors: Mapping[str, Sequence[Placed]]) -> None:
        super().__init__(name, tensors)
        self.places: dict[str, AdapterPlace] = {}

    def read(self, requests: Sequence[ReadRequest]) -> None:
        inner = list[ReadRequest]()
        staged = list[tuple[torch.Tensor, torch.Tensor]]()
        for request in requests:
            place = self.places[request.name]
            view = request.destination.permute(place.order)
            values = view.contiguous()  # the destination itself if the order of dims is the same
            staged += [] if values is view else [(view, values)]
            inner.append(ReadRequest(request.name, place.stored_region(request.region), values))
        super().read(inner)
        for view, values in staged:
            view.copy_(values)


_LAYER = re.compile(r".*\.layers\.\d+\.")
# In models with experts, peft takes these names for the separate experts of older transformers, and
# renames them.
_FUSED_NAMES = ("gate_proj", "up_proj", "down_proj")


class PeftFormat(HFFormat):
    """Checkpoints with only the adapters; every run reads the pretrained model again."""

    def __init__(self, section: CheckpointSection, model: ModelSection, lora: LoRASection) -> None:
        super().__init__(section, model)
        self._lora = lora

    def initial_sources(self, model: Model) -> list[SourceProvider]:
        sources = super().initial_sources(model)
        section = self._lora
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

    def files(self, plan: Plan) -> list[FileLayout]:
        return adapter_files(plan)

    def describe(
        self, model: Model, token_ids: TokenIds, end_of_turn_ids: Sequence[int]
    ) -> dict[str, bytes]:
        """Build the files next to the adapters. Also check that the model's description can be
        written, which a later merge needs.
        """
        assets = Path(self.base) if (Path(self.base) / "config.json").is_file() else None
        describe_model(model.config, {}, torch.float32, assets)

        files = describe_adapters(model, self._lora, self.base)
        if isinstance(model.config, ModelConfig):
            # peft's file cannot hold overrides of a run; `model_config_from_hf` reads them from
            # this file.
            table = family_of(model.config).to_hf(model.config)
            table |= {"model_type": model.config.family}
            files[f"{OWN_FOLDER}/config.json"] = _to_json(table)
        return files


def adapter_files(plan: Plan) -> list[FileLayout]:
    """Return the layout of adapter_model.safetensors over this rank's shards, in the adapters' own
    dtype, without collectives.
    """
    entries = [entry for entry in plan.entries if is_adapter(entry.fqn)]
    names = {entry.fqn for entry in entries}
    items = []
    for entry, replica in zip(
        entries, assign_owners((entry.tensor for entry in entries), plan.group), strict=True
    ):
        stored = adapter_place(entry.fqn, entry.info.shape, names, plan.model)
        # This copies only if the order of dims changes, as for B of experts.
        local = local_of(entry.tensor).permute(stored.order).contiguous()
        region = stored.stored_region(entry.region)
        items += [
            Item(piece, entry.dtype, local, region, replica.is_owner, entry.fqn)
            for piece in stored.pieces(entry.info.shape)
        ]
    # One file of any size: peft does not read several files.
    return lay_out(items, ADAPTER_FILE.removesuffix(".safetensors"), file_bytes=2**62)


def describe_adapters(model: Model, section: LoRASection, base: str) -> dict[str, bytes]:
    """Return adapter_config.json for the adapters of `model`, whose base model is in the folder
    `base`.
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
        # peft refuses dropout together with adapters of parameters. Dropout makes no difference
        # when the adapter is used.
        "lora_dropout": 0.0 if parameters else section.dropout,
        "use_rslora": section.use_rslora,
        "target_modules": modules,
        "target_parameters": parameters,
        "bias": "none",
        "inference_mode": True,
    }
    return {ADAPTER_CONFIG: _to_json(config)}


def _to_json(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2) + "\n").encode()


def _targets(model: Model) -> tuple[list[str], list[str]]:
    """Return peft's target_modules and target_parameters for the adapters of `model`.

    In models with experts peft renames the target_modules gate_proj, up_proj and down_proj. So
    linear layers with these names (dense layers, shared experts) are listed as target_parameters.
    """
    adapted = adapted_modules(model)
    possible = adaptable(model)
    experts = {module for module, weight in possible.values() if weight}
    modules: dict[str, bool] = {}
    parameters: dict[str, bool] = {}
    for name, (module, weight) in possible.items():
        if weight:
            parameters[name] = module in adapted and weight in adapted[module].adapted
        elif experts and name.rpartition(".")[2] in _FUSED_NAMES:
            parameters[f"{name}.weight"] = name in adapted
        else:
            modules[name] = name in adapted
    # peft searches all modules: a short name must not match a module without an adapter.
    others = (name for name, module in root_of(model).named_modules() if module._parameters)
    modules |= {name: False for name in others if name not in possible and name not in experts}
    key_of = layout_of(model).key
    modules = {key_of(name): is_target for name, is_target in modules.items()}
    parameters = {key_of(name): is_target for name, is_target in parameters.items()}
    leaf_of = {name: name.rpartition(".")[2] for name in modules}
    suffix_of = {name: _LAYER.sub("", name) for name in parameters}
    return _shorten(modules, leaf_of), _shorten(parameters, suffix_of)


def _shorten(targeted: Mapping[str, bool], short_of: Mapping[str, str]) -> list[str]:
    """Return the targeted names, shortened if all names with the same short form are targeted."""
    not_all = {short_of[name] for name, is_target in targeted.items() if not is_target}
    return sorted(
        {
            name if short_of[name] in not_all else short_of[name]
            for name, is_target in targeted.items()
            if is_target
        }
    )
