"""Describe a model of transformers on the meta device."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from titanlite.base.errors import ConfigError
from titanlite.base.hf_objects import build_from_config
from titanlite.config.model import TransformersConfig
from titanlite.features.transformers.experts import find_experts, replace_unaligned_experts
from titanlite.features.transformers.model import TransformersModel
from titanlite.features.transformers.recording import Recording
from titanlite.features.transformers.sources import find_sources
from titanlite.materialize.sources import Alias
from titanlite.models.families.hf_config import load_config_and_class
from titanlite.models.families.keys import MOST_PARAMETERS

_FLAG = "tie_word_embeddings"


def build_transformers(config: TransformersConfig, dtype: torch.dtype = torch.float32) -> TransformersModel:
    """Describe the model on the meta device; parameters in `dtype`, buffers in the dtypes of `from_pretrained`.

    Raises ConfigError: transformers refuses the configuration.
    """
    from transformers.initialization import no_tie_weights

    hf_config, cls = load_config_and_class(config.hf, config.family)
    recording = Recording()
    try:
        with torch.device("meta"), _quiet(), recording.active(), no_tie_weights():
            model: Any = build_from_config(cls, hf_config, dtype)
            _move_to_meta(model)
            _keep_in_float32(model, dtype)
    except Exception as error:  # noqa: BLE001 - its classes divide by sizes, and multiply them
        text = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"model: transformers cannot build {config.architecture}: {type(error).__name__}: {text}"
        ) from None
    if (total := sum(param.numel() for param in model.parameters())) > MOST_PARAMETERS:
        raise ConfigError(
            f"model: {config.architecture} would have {total:.3g} parameters, more than {MOST_PARAMETERS:.3g}. Correct "
            "the sizes in its config.json."
        )
    sources = find_sources(model, recording)
    for target, source in model.all_tied_weights_keys.items():
        _tie(model, target, source)
    replace_unaligned_experts(model, find_experts(model).values())
    return TransformersModel(model, config, sources)


def find_flag(config: TransformersConfig, name: str) -> str:
    """Return the keys of config.json with which the tensor `name` is not tied, found by building the model; or none."""
    for places in (("",), ("text_config",), ("", "text_config")):  # of some classes either of both ties
        hf = dict(config.hf)
        if "text_config" in places and not isinstance(hf.get("text_config"), Mapping):
            continue
        for place in places:
            hf |= {place: {**hf[place], _FLAG: False}} if place else {_FLAG: False}
        try:
            model = build_transformers(replace(config, hf=hf), torch.float32)
        except ConfigError:
            continue
        if not isinstance(model.declare_sources().get(name), Alias):
            return " and ".join(f"{place}.{_FLAG}" if place else _FLAG for place in places)
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which logs what it thinks of generation settings each time a model is built."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Give tensors that `from_pretrained` keeps in float32 that dtype; `_from_config` does not."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    kept = re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in plan))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32)


@torch.no_grad()
def _move_to_meta(model: Any) -> None:
    """Move what constructors made elsewhere: legacy ones, such as `torch.FloatTensor`, know no device context."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for held in (held for module in model.modules() for held in (module._parameters, module._buffers)):
        for name, tensor in held.items():
            if tensor is not None and not tensor.is_meta:
                new, is_param = tensor.to("meta"), isinstance(tensor, torch.nn.Parameter)
                moved.setdefault(tensor, torch.nn.Parameter(new, tensor.requires_grad) if is_param else new)
                held[name] = moved[tensor]


def _tie(model: Any, target: str, source: str) -> None:
    """Tie by assignment: one object under both names."""
    prefix, _, leaf = target.rpartition(".")
    tensor = model.get_parameter_or_buffer(source)
    if model.get_parameter_or_buffer(target) is not tensor:
        setattr(model.get_submodule(prefix), leaf, tensor)
