"""Save a model as a Hugging Face folder without a run; gather a tensor."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titanlite.base.agree import on_first_rank
from titanlite.checkpoint.commit import commit_folder
from titanlite.checkpoint.description import describe_model
from titanlite.checkpoint.hf_model import format_of, index_of, warn_of_sidecar
from titanlite.checkpoint.writer import FileLayout
from titanlite.data.tokenizer import describe_tokenizer, find_token_ids
from titanlite.materialize import Plan
from titanlite.models.interface import Model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a parameter or gradient, which on one rank may be no DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def model_files(
    plan: Plan, config: Any, dtype: torch.dtype, *, exact: bool = False
) -> list[FileLayout]:
    """Lay out the files of the model of `config` in `plan`."""
    return format_of(plan.model).files(plan, dtype, exact=exact)


def save_hf_model(
    model: Model,
    plan: Plan,
    tokenizer: Any,
    folder: Path,
    dtype: torch.dtype,
    assets: Path | None = None,
) -> None:
    """Write weights, config.json, generation_config.json and tokenizer into `folder`, as
    `save_pretrained` would.

    `folder` appears, or is replaced, in one step. Parameters are cast to `dtype`; buffers keep
    theirs. `tokenizer` is of transformers, or None to leave it out. What config.json and
    generation_config.json in `assets` say beyond the architecture is kept.

    Raises CheckpointError on all ranks: transformers refuses the configuration, or a rank could not
    write.

    Collectives: five small ones; every rank must call, and all ranks must see the same file system.
    """
    rest: dict[str, bytes] = {}

    def build() -> None:
        rest.update(describe_model(model.config, find_token_ids(tokenizer), dtype, assets))
        rest.update(describe_tokenizer(tokenizer))

    on_first_rank(build)
    files = model_files(plan, model.config, dtype)
    commit_folder(folder, files, rest | index_of(files))
    warn_of_sidecar(model.config, files)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files of a tokenizer as checkpoints have them into `folder`."""
    for name, content in describe_tokenizer(tokenizer).items():
        (folder / name).write_bytes(content)
