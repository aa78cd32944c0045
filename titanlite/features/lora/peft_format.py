"""The checkpoints of a run with adapters: what `peft` loads, without the model that they are on."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import get_rank
from titanlite.base.log import logger
from titanlite.checkpoint.description import render, save_tokenizer, write_config
from titanlite.checkpoint.folder import ADAPTER_CONFIG, ADAPTER_FILE, OWN_FOLDER
from titanlite.checkpoint.hf_model import ADAPTERS, HFFormat
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.config.assets import weights_key
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection, LoRASection
from titanlite.features.lora.adapter import HUB_SNAPSHOT, adapter_checkpoint, adapter_place, name_of_base
from titanlite.features.lora.layers import (
    LoRALinear,
    adaptable_experts,
    adaptable_names,
    adapted_modules,
    other_modules,
)
from titanlite.materialize import Plan, Region, SourceProvider, local_of, share_out
from titanlite.models.families import describe_differences, family_of, model_config_from_hf
from titanlite.models.interface import Model, is_adapter

_LAYER = re.compile(r".*\.layers\.\d+\.")
# What peft takes for single experts of an older transformers where a model has experts, and renames.
_FUSED_NAMES = ("gate_proj", "up_proj", "down_proj")


class PeftFormat(HFFormat):
    """Checkpoints of the adapters alone; every run reads the pretrained model anew."""

    part = ADAPTERS

    def __init__(self, section: CheckpointSection, model: ModelSection, lora: LoRASection) -> None:
        super().__init__(section, model)
        self._lora = lora

    def initial_sources(self, model: Model) -> list[SourceProvider]:
        sources, section = super().initial_sources(model), self._lora
        if section.init_from:
            sources.append(adapter_checkpoint(Path(section.init_from), section, self.base, key="lora.init_from"))
        return sources

    def sources(self, folder: Path, model: Model) -> list[SourceProvider]:
        return [*super().initial_sources(model), adapter_checkpoint(folder, self._lora, self.base)]

    def files(self, model: Model, plan: Plan) -> list[FileLayout]:
        return adapter_files(plan)

    def describe(self, model: Model, tokenizer: Any, end_of_turn_ids: Sequence[int]) -> dict[str, bytes]:
        """Build the files next to the adapters, and check the description of the model to merge them into, too."""
        assets = Path(self.base) if (Path(self.base) / "config.json").is_file() else None
        render(lambda folder: write_config(folder, model.config, None, torch.float32, assets))

        def write(folder: Path) -> None:
            write_adapter_config(folder, model, self._lora, self.base)
            if isinstance(model.config, ModelConfig):
                write_model_config(folder, model.config)
            save_tokenizer(tokenizer, folder)

        return render(write)


def adapter_files(plan: Plan) -> list[FileLayout]:
    """Layout of adapter_model.safetensors over this rank's shards, in the adapters' own dtype. No collective."""
    entries = [entry for entry in plan.entries if is_adapter(entry.fqn)]
    names = {entry.fqn for entry in entries}
    items = []
    for entry, share in zip(entries, share_out((entry.tensor for entry in entries), plan.group), strict=True):
        place = adapter_place(entry.fqn, entry.info.shape, names)
        whole = Region((0,) * len(entry.info.shape), entry.info.shape)
        # A copy only where dims change places: B of experts.
        local = local_of(entry.tensor).permute(place.order).contiguous()
        items.append(
            Item(
                *(place.key, entry.dtype, place.stored_region(whole), place.shape, local),
                *(place.stored_region(entry.region), share.mine),
            )
        )
    # One file whatever its size: peft does not know another.
    return lay_out(items, ADAPTER_FILE.removesuffix(".safetensors"), file_bytes=2**62)


def write_adapter_config(folder: Path, model: Model, section: LoRASection, base: str) -> None:
    """Write adapter_config.json for the adapters of `model` on the model in the folder `base`. On one rank."""
    modules, parameters = _targets(model)
    name, _, revision = name_of_base(base).partition("@") if HUB_SNAPSHOT.search(base) else (name_of_base(base), "", "")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": section.rank,
        "lora_alpha": int(section.alpha) if section.alpha == int(section.alpha) else section.alpha,
        # peft refuses dropout next to adapters of parameters; for using the adapter it makes no difference.
        "lora_dropout": 0.0 if parameters else section.dropout,
        "use_rslora": section.use_rslora,
        "target_modules": modules,
        "target_parameters": parameters,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model_config(folder: Path, config: ModelConfig) -> None:
    """Write the configuration of the base model next to its adapters, on one rank: peft's file has no place for what a
    run overrides. `families.model_config_from_hf(folder / OWN_FOLDER)` reads it.
    """
    table = {**family_of(config).to_hf(config), "model_type": config.family}
    (folder / OWN_FOLDER).mkdir(exist_ok=True)
    (folder / OWN_FOLDER / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _targets(model: Model) -> tuple[list[str], list[str]]:
    """Peft's target_modules and target_parameters for the adapters of `model`.

    In models with experts peft renames target_modules gate_proj, up_proj and down_proj; the weights of such linear
    layers (dense layers, shared experts) are given as target_parameters.
    """
    adapted: set[str] = set()
    for name, module in adapted_modules(model).items():
        adapted |= {name} if isinstance(module, LoRALinear) else {f"{name}.{weight}" for weight in module.adapted}
    experts = {f"{name}.{weight}" for name, weights in adaptable_experts(model).items() for weight in weights}
    modules: dict[str, bool] = {}
    parameters: dict[str, bool] = {}
    for name in adaptable_names(model):
        if name in experts:
            parameters[name] = name in adapted
        elif experts and name.rpartition(".")[2] in _FUSED_NAMES:
            parameters[f"{name}.weight"] = name in adapted
        else:
            modules[name] = name in adapted
    # peft looks at all modules: a short name must not mean one that has no adapter here.
    modules |= {name: False for name in other_modules(model) if name not in modules}
    leaf_of = {name: name.rpartition(".")[2] for name in modules}
    suffix_of = {name: _LAYER.sub("", name) for name in parameters}
    return _shorten(modules, leaf_of), _shorten(parameters, suffix_of)


def _shorten(targeted: Mapping[str, bool], short_of: Mapping[str, str]) -> list[str]:
    """Return the targeted names; a short one where all names that it stands for are targeted."""
    not_all = {short_of[name] for name, is_target in targeted.items() if not is_target}
    return sorted(
        {name if short_of[name] in not_all else short_of[name] for name, is_target in targeted.items() if is_target}
    )


def warn_of_changed_base(job: JobConfig, model_config: AnyModelConfig) -> None:
    """Warn on rank 0 if adapters are trained on another model than the one that peft would load them onto."""
    folder = Path(job.checkpoint.initial_load_path)
    is_native = isinstance(model_config, ModelConfig)
    if not job.lora.rank or not is_native or get_rank() != 0 or not (folder / "config.json").is_file():
        return
    if text := describe_differences(model_config, model_config_from_hf(folder, weights_key(job))):
        logger.warning(
            "lora: the adapters are for another model than %s describes: %s. Merge them (python -m titanlite export "
            "--merge), or change its config.json before they are loaded onto it.",
            *(folder, text),
        )
