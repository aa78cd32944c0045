"""Removal of ties between weights: config.json declares them, but the tied tensors are stored with
different values.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlite.base.agree import get_rank, on_first_rank
from titanlite.base.errors import CheckpointError
from titanlite.base.log import logger
from titanlite.checkpoint.folder import read_model_headers
from titanlite.checkpoint.hf_model import TIE_FLAG, weights_of
from titanlite.checkpoint.pieces import HEAD
from titanlite.config.model import AnyModelConfig, ModelConfig
from titanlite.materialize import Alias
from titanlite.models.interface import Model


def untie(
    config: AnyModelConfig, folder: Path, build: Callable[[AnyModelConfig], Model]
) -> AnyModelConfig:
    """Return `config`, without ties if `folder` stores each tied tensor with different values.
    `from_pretrained` removes the ties in the same case.

    If only some of several ties are contradicted, no configuration can express that, and the plan
    refuses them. `build` makes the model on meta.

    Raises CheckpointError: as `weights_of`. Collectives of `weights_of`; every rank must call.
    """
    if not config.tie_word_embeddings:
        return config
    if not on_first_rank(lambda: _has_head(folder)):
        return config
    model = build(config)
    problems = weights_of(folder, model).untied
    if not problems or problems.keys() != _ties_of(model):
        return config
    if isinstance(config, ModelConfig):
        untied: AnyModelConfig = replace(config, tie_word_embeddings=False)
    else:
        untied = replace(
            config, hf=_without_ties({TIE_FLAG: True, **config.hf}), tie_word_embeddings=False
        )
    if _ties_of(build(untied)):
        return config
    if get_rank() == 0:
        logger.warning(
            "checkpoint: %s has %s with different values than the tensor that config.json ties it "
            "to. Both are kept, as in transformers, and saved checkpoints have %s = false",
            folder,
            ", ".join(problems),
            TIE_FLAG,
        )
    return untied


def _has_head(folder: Path) -> bool:
    try:
        return any(key.endswith(HEAD) for key in read_model_headers(folder))
    except CheckpointError:
        return False  # the later read of the weights reports it


def _ties_of(model: Any) -> set[str]:
    return {name for name, source in model.declare_sources().items() if isinstance(source, Alias)}


def _without_ties(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without ties, in its sections too."""
    parts = {key: _without_ties(value) for key, value in table.items() if isinstance(value, dict)}
    return {**table, **parts, **({TIE_FLAG: False} if TIE_FLAG in table else {})}
