"""`python -m titanlite export MODEL OUT --dtype bfloat16`: convert a checkpoint to a plain Hugging
Face model in another dtype.

`--merge` merges the adapters of a LoRA run into their model. Tensors are streamed: memory is a few
MiB for any size of the model, plus the adapters of two layers.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock

import torch

from titanlite.assemble import build_model
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.base.log import setup_logger
from titanlite.base.text import Parser, command
from titanlite.checkpoint.commit import MANIFEST_FILE, check_folder, hidden_folder
from titanlite.checkpoint.description import describe_model
from titanlite.checkpoint.folder import ADAPTER_CONFIG, ADAPTER_FILE
from titanlite.checkpoint.hf_model import format_of, index_of, warn_of_sidecar, weights_of
from titanlite.checkpoint.pieces import whole
from titanlite.checkpoint.reader import read_region
from titanlite.checkpoint.writer import FileLayout, Item, create_files, write_items
from titanlite.config.settings import spell_dtype
from titanlite.features.lora.merge import MergedSource
from titanlite.features.lora.peft_format import read_adapter
from titanlite.features.passthrough import find_carried
from titanlite.features.record.publish import render_merge_card
from titanlite.features.tools.models import MODEL_HELP, find_base, find_model, read_config
from titanlite.features.transformers.checkpoint import stored_forms
from titanlite.features.transformers.conversion import Group
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import Plan, Read, Region, TensorEntry, build_plan

_WEIGHT_SUFFIXES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".ckpt",
    ".pkl",
}
_ReadRegion = Callable[[Region], torch.Tensor]
_ADAPTER_ONLY = {ADAPTER_CONFIG, "README.md"}
_TEMPLATES = "additional_chat_templates"  # where transformers stores named chat templates


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Export; exit code 0, or 2 after one clear error."""
    parser = Parser(
        "export",
        "Write a checkpoint (or any Hugging Face model; FP8 is read for native families) as a "
        "plain Hugging Face model. Parameters are cast to --dtype; buffers, and tensors that a "
        "16-bit model stores in float32, keep their dtype.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("out", type=Path, metavar="OUT", help="must not exist yet")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", type=spell_dtype, choices=dtypes, default="bfloat16")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="MODEL holds adapters (LoRA): merge them into their model",
    )
    parser.add_argument(
        "--base", help="that model; default: the one that adapter_config.json names"
    )
    known = parser.parse_args(argv)
    if known.base is not None and not known.merge:
        parser.error("--base is the model to merge adapters into; give --merge too.")
    setup_logger()
    dtype = getattr(torch, known.dtype)
    folder = find_model("export", known.model)
    if known.merge:
        export_merged(folder, known.out, dtype, known.base)
    else:
        export_checkpoint(folder, known.out, dtype)
    named = json.loads((known.out / "config.json").read_text(encoding="utf-8")).get("architectures")
    print(f"{known.out}: {(named or ['AutoModelForCausalLM'])[0]}.from_pretrained loads it")


def export_merged(adapter: Path, out: Path, dtype: torch.dtype, base: str | None = None) -> None:
    """Write the model in `base`, with the adapters in `adapter` merged, to `out`: `W + alpha / rank
    * B A`.

    The sum is computed in float64 and rounded to `dtype` once. `base` is as in `find_base`.

    Raises:
        CheckpointError: as `export_checkpoint`, or the adapters are damaged or do not fit the
            model.
        ConfigError: as `export_checkpoint`, or there is no such model.
    """
    if not (adapter / ADAPTER_CONFIG).exists() and (adapter / "config.json").exists():
        raise CheckpointError(
            f"export: {adapter} is a whole model, without adapters to merge. Leave --merge out."
        )
    _refuse_damage(adapter)
    export_checkpoint(find_base("export", adapter, base), out, dtype, adapter)


def _refuse_damage(folder: Path) -> None:
    if (folder / MANIFEST_FILE).exists():
        raise_problems(CheckpointError, f"export: {folder}", check_folder(folder))


def export_checkpoint(
    folder: Path, out: Path, dtype: torch.dtype, adapters: Path | None = None
) -> None:
    """Write the model in `folder` to `out` with parameters in `dtype`; `out` appears when it is
    complete.

    If `adapters`, a folder, is given, the adapters' corrections are added.

    Raises:
        CheckpointError: `folder` is not a whole model, `out` exists or cannot be written, or the
            adapters do not fit.
        ConfigError: config.json describes something that neither the decoder nor transformers can
            express.
    """
    try:
        occupied = os.path.lexists(out)
    except OSError as error:
        raise CheckpointError(f"export: cannot write {out}: {error.strerror}.") from None
    if occupied:
        raise CheckpointError(f"export: {out} exists already. Remove it, or give another folder.")
    _refuse_damage(folder)
    if adapters is None and (folder / ADAPTER_FILE).exists():
        raise CheckpointError(
            f"export: {folder} holds adapters without their model. Add --merge, and --base DIR."
        )
    config = read_config("export", folder, adapters)
    rest = describe_model(config, {}, dtype, folder)
    model = build_model(config)
    # Full-precision copies are read if there are any, so that values are rounded once.
    weights = weights_of(folder, model, exact=True)
    plan = build_plan(
        model, [weights if adapters is None else MergedSource(weights, adapters, model)]
    )
    entries = tuple(entry for entry in plan.entries if isinstance(entry.source, Read))
    plan = replace(plan, entries=entries)
    of_name = {entry.fqn: entry for entry in entries}
    reader_of = (
        _reader_of(plan, model)
        if isinstance(model, TransformersModel)
        else lambda item: partial(_read, of_name[item.name], item.dtype)
    )
    files = _with_read(format_of(model).files(plan, dtype), reader_of)
    if (carried := find_carried([weights], config, dtype)) is not None:
        rest |= carried.describe(rest)
        files = carried.add_to(files)
    files = _with_read(files, lambda item: partial(_read_float16, item))
    if adapters is not None:  # the card in `folder` describes a different model
        _, merged = read_adapter(adapters)
        card = render_merge_card(
            folder,
            adapters,
            family=config.family,
            dtype=str(dtype).removeprefix("torch."),
            rank=merged.rank,
            scaling=merged.scaling,
        )
        rest["README.md"] = card.encode()
    try:
        with hidden_folder(out) as temporary:
            create_files(temporary, files)
            write_items(temporary, files, f"writing {out}")
            for name, content in (rest | index_of(files)).items():
                (temporary / name).write_bytes(content)
            # the run's tokenizer may have another chat template than the model's
            if adapters is not None:
                _copy_rest(adapters, temporary, _ADAPTER_ONLY)
            _copy_rest(folder, temporary)
            temporary.rename(out)
    except OSError as error:
        raise CheckpointError(f"export: cannot write {out}: {error}.") from None
    warn_of_sidecar(config, files)


def _reader_of(plan: Plan, model: TransformersModel) -> Callable[[Item], _ReadRegion]:
    """Return a function from a stored tensor to the function that reads its regions."""
    entries, forms = stored_forms(plan, model)
    form_of = {form.piece.key: form for form in forms}
    lock = Lock()

    def read_whole(name: str) -> torch.Tensor:
        entry = entries[name]
        return _read(entry, entry.dtype, whole(entry.fqn, entry.info.shape).region)

    # The tensors of a conversion are consecutive, and each is read in parts.
    @lru_cache(maxsize=1)
    def convert(group: Group) -> dict[str, torch.Tensor]:
        return group.convert(read_whole)

    def read_converted(group: Group, key: str, dtype: torch.dtype, region: Region) -> torch.Tensor:
        with lock:
            return convert(group)[key][region.slices].to(dtype)

    def find(item: Item) -> _ReadRegion:
        form = form_of[item.key]
        if form.group is not None:
            return partial(read_converted, form.group, item.key, item.dtype)
        return partial(_read, form.entry, item.dtype)

    return find


def _read(entry: TensorEntry, dtype: torch.dtype, region: Region) -> torch.Tensor:
    assert isinstance(entry.source, Read)
    return read_region(entry.source.reader, entry.source.name, region, dtype)


def _with_read(
    files: Iterable[FileLayout], read_of: Callable[[Item], _ReadRegion]
) -> list[FileLayout]:
    """Return the `files` with a new `read` for each item."""
    return [
        file._replace(items=tuple(item._replace(read=read_of(item)) for item in file.items))
        for file in files
    ]


def _read_float16(item: Item, region: Region) -> torch.Tensor:
    assert item.read is not None
    values = item.read(region)
    if item.dtype == torch.float16 and not bool(values.isfinite().all()):
        raise CheckpointError(
            f"export: {item.key} has values that float16 cannot hold (beyond 65504). Use bfloat16."
        )
    return values


def _copy_rest(folder: Path, out: Path, but: Collection[str] = ()) -> None:
    """Copy the files that hold no weights (tokenizer, chat template, licence) unless `out` has them
    already. Links are resolved.
    """
    for path in folder.iterdir():
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if (
            path.is_file()
            and not is_weights
            and path.name not in but
            and not (out / path.name).exists()
        ):
            shutil.copyfile(path, out / path.name)
    if (folder / _TEMPLATES).is_dir() and not (out / _TEMPLATES).exists():
        shutil.copytree(folder / _TEMPLATES, out / _TEMPLATES)
