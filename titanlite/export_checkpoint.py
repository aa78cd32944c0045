"""`python -m titanlite export DIR OUT --dtype bfloat16`: a checkpoint as a plain Hugging Face model in another dtype.

`--merge` does so with a model and the adapters of a LoRA run. Streams: memory is a few MiB, whatever the size of the
model, and the adapters of two layers.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from titanlite.checkpoint import hf_checkpoint
from titanlite.checkpoint.adapter import ADAPTER_CONFIG
from titanlite.checkpoint.commit import MANIFEST_FILE, check_folder
from titanlite.checkpoint.folder import ADAPTER_FILE, OWN_FOLDER
from titanlite.checkpoint.hf_model import warn_of_sidecar, write_hf_files
from titanlite.checkpoint.keys import SIDECAR_FILE, checkpoint_pieces, is_sidecar, whole
from titanlite.checkpoint.merge import MergedAdapters
from titanlite.checkpoint.reader import SafetensorsReader
from titanlite.checkpoint.runs import bytes_of
from titanlite.checkpoint.transfer import Transfer
from titanlite.checkpoint.writer import FileLayout, Item, create_files, lay_out
from titanlite.config import ModelConfig
from titanlite.config.assets import local_folder
from titanlite.errors import CheckpointError, TitanliteError, raise_problems
from titanlite.logger import setup_logger
from titanlite.materialize import Plan, ReadRequest, Region, build_plan
from titanlite.materialize.sources import Read
from titanlite.models.decoder import build_decoder
from titanlite.models.families import family_of, model_config_from_hf

_CHUNK_ELEMENTS = 4 << 20
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".pkl"}
_ADAPTER_ONLY = {ADAPTER_CONFIG, "README.md"}
_TEMPLATES = "additional_chat_templates"  # where transformers keeps chat templates that have names


def main(argv: Sequence[str] | None = None) -> int:
    """Export, and return the exit code: 0, or 2 after one clear error."""
    parser = argparse.ArgumentParser(
        prog="python -m titanlite export",
        description="Write a checkpoint (or any Hugging Face model of a native family, FP8 included) as a plain "
        "Hugging Face model. Parameters are cast to --dtype, buffers keep theirs.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("out", type=Path, metavar="OUT", help="must not exist yet")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--merge", action="store_true", help="DIR holds adapters (LoRA): merge them into their model")
    parser.add_argument("--base", type=Path, help="that model; default: the one that adapter_config.json names")
    known = parser.parse_args(argv)
    if known.base is not None and not known.merge:
        parser.error("--base is the model to merge adapters into; give --merge too.")
    setup_logger()
    try:
        dtype = getattr(torch, known.dtype)
        if known.merge:
            export_merged(known.folder, known.out, dtype, known.base)
        else:
            export_checkpoint(known.folder, known.out, dtype)
    except TitanliteError as error:
        print(f"titanlite: error: {error}", file=sys.stderr)
        return 2
    print(f"{known.out}: AutoModelForCausalLM.from_pretrained loads it")
    return 0


def export_merged(adapter: Path, out: Path, dtype: torch.dtype, base: Path | None = None) -> None:
    """Write the model in `base` with the adapters in `adapter` merged to `out`: `W + alpha / rank * B A`.

    Computed in float64 and rounded to `dtype` once. `base` may also be a repository of the hub; None is the model that
    adapter_config.json names.

    Raises:
        CheckpointError: as `export_checkpoint`, or the adapters are damaged or do not fit the model.
        ConfigError: as `export_checkpoint`, or there is no such model.
    """
    if (adapter / MANIFEST_FILE).exists():
        raise_problems(CheckpointError, f"export: {adapter}", check_folder(adapter))
    adapters = MergedAdapters(adapter)
    name = str(base) if base is not None else adapters.base
    if not name:
        raise CheckpointError(f"export: {adapter} does not name its model. Give it with --base DIR.")
    folder = Path(local_folder("--base" if base is not None else f"export: {adapter}", name, weights=True))
    export_checkpoint(folder, out, dtype, adapters)


def export_checkpoint(folder: Path, out: Path, dtype: torch.dtype, adapters: MergedAdapters | None = None) -> None:
    """Write the model in `folder` to `out` with parameters in `dtype`; `out` appears when it is complete.

    With `adapters`, their corrections are added to the weights on the way.

    Raises:
        CheckpointError: `folder` is not a whole model of a native family, `out` exists or cannot be written, or the
            adapters do not fit.
        ConfigError: its config.json describes something that the decoder cannot express.
    """
    try:
        occupied = os.path.lexists(out)
    except OSError as error:
        raise CheckpointError(f"export: cannot write {out}: {error.strerror}.") from None
    if occupied:
        raise CheckpointError(f"export: {out} exists already. Remove it, or give another folder.")
    if (folder / MANIFEST_FILE).exists():
        raise_problems(CheckpointError, f"export: {folder}", check_folder(folder))
    if adapters is None and (folder / ADAPTER_FILE).exists():
        raise CheckpointError(f"export: {folder} holds adapters without their model. Add --merge, and --base DIR.")
    config = model_config_from_hf(folder, "export")
    source = hf_checkpoint(folder, config, exact=True)  # where the run had more bits than its files, round once
    plan = build_plan(build_decoder(config), [source])
    assert source.reader is not None
    if adapters is not None:
        adapters.fit({entry.fqn: entry.info.shape for entry in plan.entries if entry.info.kind == "parameter"})
    files, names = _lay_out(plan, config, dtype)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        create_files(temporary, files)
        with Transfer(f"writing {out}", sum(file.nbytes for file in files)) as transfer:
            _copy_weights(source.reader, files, names, temporary, transfer, adapters)
        write_hf_files(temporary, files, config, None, dtype, folder)
        if adapters is not None:  # the run's tokenizer may have another chat template than the model's
            _copy_rest(adapters.folder, temporary, _ADAPTER_ONLY)
        _copy_rest(folder, temporary)
        temporary.rename(out)
    except OSError as error:
        raise CheckpointError(f"export: cannot write {out}: {error}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    warn_of_sidecar(config, files)


def _lay_out(plan: Plan, config: ModelConfig, dtype: torch.dtype) -> tuple[list[FileLayout], dict[str, str]]:
    """The files, and the run-time name that each key is part of."""
    family = family_of(config)
    model: list[Item] = []
    sidecar: list[Item] = []
    names: dict[str, str] = {}
    for entry in plan.entries:
        if not isinstance(entry.source, Read):
            continue
        beside = is_sidecar(entry.fqn, family)
        stored = dtype if entry.info.kind == "parameter" else entry.dtype
        pieces = (
            [whole(entry.fqn, entry.info.shape)] if beside else checkpoint_pieces(entry.fqn, entry.info.shape, family)
        )
        for piece in pieces:
            item = Item(piece.key, stored, piece.region, piece.shape, entry.tensor, entry.region, mine=True)
            (sidecar if beside else model).append(item)
            names[piece.key] = entry.source.name
    stem = f"{OWN_FOLDER}/{SIDECAR_FILE.removesuffix('.safetensors')}"
    return [*lay_out(model, "model"), *(lay_out(sidecar, stem) if sidecar else [])], names


def _copy_weights(
    reader: SafetensorsReader,
    files: Sequence[FileLayout],
    names: dict[str, str],
    out: Path,
    transfer: Transfer,
    adapters: MergedAdapters | None,
) -> None:
    for file in files:
        with open(out / file.name, "r+b") as handle:
            for item, offset in file.items:
                handle.seek(offset)
                for region in _chunks(item.region):
                    name = names[item.key]
                    merge = adapters is not None and adapters.has(name)
                    # Merging adds in float64, so the weight must not be rounded before.
                    chunk = torch.empty(region.lengths, dtype=torch.float64 if merge else item.dtype)
                    reader.read_quietly([ReadRequest(name, region, chunk)])
                    if adapters is not None and merge:
                        chunk = adapters.add(name, region, chunk).to(item.dtype)
                    if item.dtype == torch.float16 and not bool(chunk.isfinite().all()):
                        raise CheckpointError(
                            f"export: {item.key} has values that float16 cannot hold (beyond 65504). Use bfloat16."
                        )
                    transfer.add(handle.write(bytes_of(chunk.view(-1))))
            handle.flush()
            os.fsync(handle.fileno())


def _chunks(region: Region) -> Iterator[Region]:
    """`region` in slabs along its longest dim, of about 4 Mi elements."""
    if not region.lengths:
        yield region
        return
    dim = next((i for i, length in enumerate(region.lengths) if length > 1), len(region.lengths) - 1)
    length = region.lengths[dim]
    step = max(_CHUNK_ELEMENTS * length // max(region.numel, 1), 1)
    for start in range(0, length, step):
        starts, lengths = list(region.starts), list(region.lengths)
        starts[dim] += start
        lengths[dim] = min(step, length - start)
        yield Region(tuple(starts), tuple(lengths))


def _copy_rest(folder: Path, out: Path, but: Collection[str] = ()) -> None:
    """Tokenizer, chat template, licence: everything beside the weights that is not there yet, links resolved."""
    for path in folder.iterdir():
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name not in but and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)
    if (folder / _TEMPLATES).is_dir() and not (out / _TEMPLATES).exists():
        shutil.copytree(folder / _TEMPLATES, out / _TEMPLATES)
