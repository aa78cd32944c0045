"""Passthrough tensors: tensors of a model's folder that the model does not compute, copied into
every checkpoint and exported folder.

Examples: layers for multi-token prediction and, in a run on text, the vision tower
(`find_passthrough` has the rule). They stay in their files, and saving copies their bytes, 1 MiB at
a time. Two kinds change:

- Copies of the embedding or of the output head, recognized by their names, are written from the
  trained tensor.
- Block FP8 is dequantized, as the trained weights are: the saved config.json declares no scales, so
  readers would treat the codes as weights. MXFP4 is unchanged: no reader treats tensors under its
  keys as weights.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import get_rank, get_rank_and_size
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.base.files import render, saving_as
from titanlite.base.hf_objects import build_config, get_config_class
from titanlite.base.log import logger
from titanlite.base.text import format_size, list_names
from titanlite.checkpoint.description import copy_processor, without_replaced
from titanlite.checkpoint.folder import Stored, StoredTensor, read_json, shown
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.pieces import (
    BASE,
    MASTER_PREFIX,
    PREDICTION_KEY,
    part_of,
    whole,
)
from titanlite.checkpoint.quantized import FP8, describe_misfit, detach_scales
from titanlite.checkpoint.reader import SafetensorsReader, read_region
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig, TransformersConfig
from titanlite.materialize import Region, SourceProvider
from titanlite.models.families import family_of
from titanlite.models.families.config_json import save_config
from titanlite.models.families.family import TEXT_CONFIG

_COPIES = ("embed_tokens.weight", "head.weight")


def carry_passthrough(
    job: JobConfig,
    config: AnyModelConfig,
    sources: Iterable[SourceProvider],
    checkpointer: Checkpointer,
) -> None:
    """Add the passthrough tensors to the checkpoints of a run whose weights came from `sources`.
    Checkpoints of adapters get no passthrough tensors.

    Raises:
        CheckpointError: as `find_carried`. Collective: every rank must call.
    """
    dtype = getattr(torch, job.checkpoint.export_dtype)
    if (
        job.checkpoint.enable
        and not job.lora.rank
        and (carried := find_carried(sources, config, dtype)) is not None
    ):
        checkpointer.carry(carried)


def find_carried(
    sources: Iterable[SourceProvider], config: AnyModelConfig, dtype: torch.dtype
) -> "CarriedTensors | None":
    """Return the passthrough tensors of the folder that `sources` read, after a plan was built from
    them, and log what they are.

    Dequantized tensors are converted to `dtype`.

    Raises:
        CheckpointError: FP8 without its scales. The same on all ranks.
    """
    source: Any = next((source for source in sources if getattr(source, "passthrough", ())), None)
    if source is None:
        return None
    carried = CarriedTensors(source, config, dtype)
    if get_rank() == 0:
        logger.warning("%s", carried.explain())
    return carried


class CarriedTensors:
    """The passthrough tensors of one folder, and where they are now: in that folder, or in a later
    checkpoint.
    """

    def __init__(self, source: Any, config: AnyModelConfig, dtype: torch.dtype) -> None:
        self._name = source.name
        self._config = config
        self._dtype = dtype
        tensors: Stored = source.stored
        is_part = isinstance(config, ModelConfig) and source.layout.prefix != BASE
        self._larger = Path(source.folder) if is_part else None  # folder of the larger model
        carried = [part for key in source.passthrough for part in detach_scales(tensors[key])]
        self._stored = {tensor.key: tensor for tensor in carried}
        raise_problems(
            CheckpointError,
            self._name,
            [
                f"{problem}. Dequantize the checkpoint with transformers first."
                for tensor in carried
                if (problem := describe_misfit(tensor))
            ],
        )
        # For each copy, the stored tensors that it may be a copy of, the likeliest first.
        self._copies = self._find_copies(tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that these tensors add to a checkpoint."""
        return sum(item.nbytes for item in self._items({}))

    def explain(self) -> str:
        """Describe in one line what is carried, by part, and how it is stored."""
        by_part = Counter(
            part_of(key).removesuffix(".") or key.rpartition(".")[0] for key in sorted(self._stored)
        )
        parts = list_names(f"{shown(part)} ({count})" for part, count in by_part.items())
        size = format_size(sum(tensor.nbytes for tensor in self._stored.values()))
        copies = "".join(
            f" {shown(key)} follows {shown(keys[0])}." for key, keys in self._copies.items()
        )
        count = sum(tensor.dtype in FP8 for tensor in self._stored.values())
        dequantized = f" {count} in FP8 are saved as {self._dtype}." if count else ""
        return (
            f"{self._name}: {len(self._stored)} tensors ({size}) are not computed, so not trained, "
            f"and are carried into what is saved: {parts}.{copies}{dequantized}"
        )

    def describe(self, description: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return config.json with the counts and parts of these tensors. Call on one rank.

        Raises:
            CheckpointError: transformers rejects it.
        """
        if "config.json" not in description:
            return {}
        table = json.loads(description["config.json"])
        if isinstance(self._config, TransformersConfig):
            if (hf := self._config.hf).get("model_type") == table.get("model_type"):
                return {}
            # The class computes the text part of a larger model, whose other parts pass through.
            larger = build_config({key: value for key, value in hf.items() if key != "auto_map"})
            larger.architectures = hf.get("architectures")
            larger.dtype = self._dtype
            return render(
                "the description of the model", lambda folder: save_config(larger, folder)
            )
        if self._larger is not None and (
            files := _describe_larger(table, self._config, self._larger, self._dtype)
        ):
            return files
        if (key := family_of(self._config).mtp_key) is None:
            return {}
        table[key] = sum(part_of(name) + PREDICTION_KEY == name for name in self._stored)
        return {"config.json": (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()}

    def add_to(self, files: Sequence[FileLayout]) -> list[FileLayout]:
        """Lay out the model's `files` again, with the passthrough tensors after its own. The same
        on all ranks.
        """
        items = [item for file in files if file.is_of_model for item in file.items]
        carried = self._items({item.key: item for item in items})
        return [
            *lay_out([*items, *carried], "model"),
            *(file for file in files if not file.is_of_model),
        ]

    def originals(self, keys: Iterable[str]) -> dict[str, str]:
        """Return, for each copy, which of the saved tensors `keys` it is written from."""
        saved = set(keys)  # the first and likeliest one is written last, and counts
        return {
            copy: key for copy, same in self._copies.items() for key in same[::-1] if key in saved
        }

    def follow(self, folder: Path, files: Sequence[FileLayout]) -> None:
        """Read the tensors from the checkpoint in `folder`, which has `files`, from now on."""
        self._stored = {
            item.key: StoredTensor(
                item.key,
                item.dtype,
                item.piece.shape,
                folder / file.name,
                len(file.header) + item.offset,
                item.nbytes,
                file.nbytes,
            )
            for file in files
            for item in file.items
            if item.key in self._stored
        }

    def _find_copies(self, tensors: Stored) -> dict[str, list[str]]:
        """Find the tensors with names of token tables (embedding or head): layers for multi-token
        prediction have copies of these tables.
        """
        found = {}
        for key, tensor in self._stored.items():
            is_table = len(tensor.shape) == 2 and tensor.shape[0] == self._config.vocab_size
            if not is_table or not key.endswith(_COPIES):
                continue
            same = [
                other.removeprefix(MASTER_PREFIX)
                for other, t in tensors.items()
                if other not in self._stored and (t.shape, t.dtype) == (tensor.shape, tensor.dtype)
            ]
            if same:
                found[key] = sorted(
                    same, key=lambda name, of_head="head" in key: ("head" in name) != of_head
                )
        return found

    def _items(self, saved: Mapping[str, Item]) -> list[Item]:
        """Return the items to save. The ranks divide them so that each writes about the same number
        of bytes; a copy of a table is written from the table's item in `saved`.
        """
        rank, world_size = get_rank_and_size()
        loads = [0] * world_size
        originals = self.originals(saved)
        items = list[Item]()
        reader = SafetensorsReader.of_tensors(self._name, self._stored.values(), threads=1)
        for key, tensor in self._stored.items():
            if key in originals:
                original = saved[originals[key]]
                items.append(original._replace(piece=replace(original.piece, key=key)))
                continue
            turn = loads.index(min(loads))
            loads[turn] += tensor.nbytes
            dtype = self._dtype if tensor.dtype in FP8 else tensor.dtype
            piece = whole(key, tensor.shape)
            read = partial(_read, reader, key, dtype)
            nothing = torch.empty(0, device="meta")
            items.append(
                Item(piece, dtype, nothing, piece.region, is_owner=turn == rank, read=read)
            )
        return items


def _describe_larger(
    text: Mapping[str, Any], config: ModelConfig, folder: Path, dtype: torch.dtype
) -> dict[str, bytes]:
    """Return the files that describe a larger model (image and text) instead of its text model
    alone, whose config.json is `text`.

    `folder` has the weights of both. The result is empty if the config.json in `folder` does not
    describe a larger model.
    """
    larger = family_of(config).larger
    original = read_json(folder / "config.json", str(folder))
    if larger is None or original.get("model_type") != larger.name:
        return {}
    values = {
        **without_replaced(original),
        TEXT_CONFIG: {**text, "architectures": None},
        "tie_word_embeddings": config.tie_word_embeddings,
        "architectures": [larger.architecture],
        "dtype": str(dtype).removeprefix("torch."),
    }

    def write(out: Path) -> None:
        with saving_as(f"config.json (from {folder})"):
            save_config(get_config_class(larger.name)(**values), out)
        copy_processor(folder, out)

    return render("the description of the model", write)


def _read(reader: SafetensorsReader, key: str, dtype: torch.dtype, region: Region) -> torch.Tensor:
    try:
        return read_region(reader, key, region, dtype)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} It has tensors that every save copies. Put it back as it was."
        ) from None
