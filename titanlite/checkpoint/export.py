"""Save the sharded model as a Hugging Face folder that `from_pretrained` loads as it stands."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.keys import SIDECAR_FILE, checkpoint_tensors, is_sidecar
from titanlite.errors import CheckpointError
from titanlite.logger import logger
from titanlite.materialize import Plan
from titanlite.models.decoder import Decoder
from titanlite.models.families import family_of

_FILE_BYTES = 4 * 1024**3


def save_hf_model(model: Decoder, plan: Plan, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write weights, config.json, generation_config.json and tokenizer into `folder`, as `save_pretrained` would.

    The folder appears in one step: it is written under a temporary name, flushed, and renamed. Parameters are cast to
    `dtype`; float32 buffers stay float32. Rank 0 gathers one tensor at a time and holds at most one file.

    Raises:
        CheckpointError: on all ranks, if rank 0 could not write; nothing is left in `folder`.

    Collectives: one gather per sharded tensor and one broadcast; every rank must call.
    """
    writer = dist.get_rank() == 0
    temporary = folder.with_name(f".{folder.name}.tmp")
    failure: str | None = None
    tensors = _full_tensors(plan, dtype)
    try:
        if writer:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _write_weights(temporary, tensors, model)
            _write_config(temporary, model, tokenizer, dtype)
            _commit(temporary, folder)
    except (OSError, RuntimeError, ValueError) as error:
        failure = f"cannot save to {folder}: {error}."
        shutil.rmtree(temporary, ignore_errors=True)
    for _ in tensors:  # the other ranks, and a writer that failed, still take part in the gathers
        pass
    outcome = [failure]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise CheckpointError(f"checkpoint: {outcome[0]} Free space or change job.dump_folder.")


def _full_tensors(plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor on CPU) of everything that is saved, gathered one by one; tied tensors once."""
    for entry in plan.entries:
        if not entry.info.persistent:
            continue
        tensor = entry.tensor.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield entry.fqn, full.to("cpu", dtype if entry.info.kind == "parameter" else full.dtype)


def _write_weights(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], model: Decoder) -> None:
    family = family_of(model.config)
    sidecar: dict[str, torch.Tensor] = {}
    batches: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    files: list[Path] = []
    weight_map: dict[str, str] = {}

    def flush() -> None:
        files.append(folder / f"model-{len(files) + 1:05d}.safetensors")
        save_file(batches[-1], files[-1], metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(batches[-1], files[-1].name))
        batches[-1] = {}

    for name, tensor in tensors:
        if is_sidecar(name, family):
            if bool(tensor.count_nonzero()):
                sidecar[name] = tensor
            continue
        for key, part in checkpoint_tensors(name, tensor, family):
            if batches[-1] and sizes[-1] + part.nbytes > _FILE_BYTES:
                flush()
                sizes.append(0)
            batches[-1][key] = part.contiguous()
            sizes[-1] += part.nbytes
    flush()
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
    else:
        final = {f.name: f"{f.stem}-of-{len(files):05d}.safetensors" for f in files}
        for file in files:
            file.rename(folder / final[file.name])
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {key: final[name] for key, name in sorted(weight_map.items())},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if sidecar:
        save_file(sidecar, folder / SIDECAR_FILE, metadata={"format": "pt"})
        logger.info(
            "checkpoint: %d expert_bias tensors have no key in %s; kept in %s",
            *(len(sidecar), family.architecture, SIDECAR_FILE),
        )


def _write_config(folder: Path, model: Decoder, tokenizer: Any, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, GenerationConfig  # costs a second, and only the last step needs it

    config = AutoConfig.for_model(
        model.config.family,
        **family_of(model.config).to_hf(model.config),
        dtype=str(dtype).removeprefix("torch."),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _commit(temporary: Path, folder: Path) -> None:
    """Flush every file, then let the folder appear under its name; an older one with the name is replaced."""
    for path in [*temporary.iterdir(), temporary]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
