"""titanlite: a compact trainer for large language models, meta-device first.

A model is described and sharded on the meta device; then every tensor is written exactly once, into
its final shard, from one declared source. Start reading at `titanlite/assemble.py`.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.base.errors import TitanliteError

__all__ = ["TitanliteError", "TrainResult", "train"]
__version__ = "0.1.0"


class TrainResult(NamedTuple):
    """Result of a run: `loss` is the loss of its last step, or None if no steps were left to
    train.
    """

    step: int
    loss: float | None
    checkpoint: Path | None
    dump_folder: Path
    stopped: bool


def train(config: Any, overrides: Sequence[str] = (), **sections: Mapping[str, Any]) -> TrainResult:
    """Train in this process, alone or as a rank; docs/extending.md has examples.

    `config` is a TOML file, a dictionary of sections, or a parsed configuration. `sections`
    (training={"steps": 5}) override it, and `overrides` ("--training.steps=5") override both.
    Collective: every rank of a launcher must call.

    Raises:
        TitanliteError: on all ranks; its text is the problem and its remedy.
    """
    # torch is imported here
    return import_module("titanlite.features.api").train(config, overrides, sections)
