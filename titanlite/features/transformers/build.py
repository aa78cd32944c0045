"""Build a model of transformers on the meta device, with a source for each of its tensors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from titanlite.base.errors import ConfigError
from titanlite.base.hf_objects import build_from_config
from titanlite.base.text import describe_error
from titanlite.config.model import TransformersConfig
from titanlite.features.transformers.initial import Notes, find_sources
from titanlite.features.transformers.model import TransformersModel
from titanlite.models.families.config_json import MOST_PARAMETERS, load_config_and_class


def build_transformers(
    config: TransformersConfig, dtype: torch.dtype = torch.float32
) -> TransformersModel:
    """Build the model on the meta device; parameters are in `dtype`, buffers in the dtypes of
    `from_pretrained`.

    Raises ConfigError: transformers rejects the configuration.
    """
    hf_config, cls = load_config_and_class(config.hf, config.family)

    def build(dtype: torch.dtype = torch.float32) -> tuple[Any, Notes]:
        notes = Notes()
        with _quiet(), notes.active():
            model: Any = build_from_config(cls, deepcopy(hf_config), dtype)
        notes.take_values(model)
        return model, notes

    try:
        model, notes = build(dtype)
        _keep_in_float32(model, dtype)
    except Exception as error:  # noqa: BLE001 - its classes divide by sizes, and multiply them
        raise ConfigError(
            f"model: transformers cannot build {config.architecture}: {describe_error(error)}."
        ) from None
    if (total := sum(param.numel() for param in model.parameters())) > MOST_PARAMETERS:
        raise ConfigError(
            f"model: {config.architecture} would have {total:.3g} parameters, more than "
            f"{MOST_PARAMETERS:.3g}. Correct the sizes in its config.json."
        )
    sources = find_sources(model, notes, build)
    model.tie_weights(recompute_mapping=False)
    return TransformersModel(model, config, sources)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which logs remarks about generation settings each time a model is
    built.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Convert to float32 the tensors that `from_pretrained` keeps in float32, because
    `_from_config` does not.
    """
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    kept = re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in plan))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32)
