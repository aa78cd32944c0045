"""Passengers: tensors of a model's folder that the model does not compute, copied into every
checkpoint and exported folder.

Examples: layers for multi-token prediction and, in a run on text, the vision tower
(`find_passengers` has the rule). They stay in their files, and saving copies their bytes, 1 MiB at
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
import torch.distributed as dist

from titanlite.base.agree import get_rank
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.base.files import render
from titanlite.base.hf_objects import build_config
from titanlite.base.log import logger
from titanlite.base.text import format_size, list_names
from titanlite.checkpoint.description import describe_larger
from titanlite.checkpoint.folder import FP8, StoredTensor, companions, find_scale, shown
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.pieces import (
    BASE,
    MASTER_PREFIX,
    PREDICTION_KEY,
    bytes_of,
    part_of,
    whole,
)
from titanlite.checkpoint.reader import (
    SafetensorsReader,
    opened,
    place,
    read_bytes,
    read_region,
)
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig, TransformersConfig
from titanlite.materialize import Region, SourceProvider
from titanlite.models.families import family_of
from titanlite.models.families.config_json import save_config

_COPIES = ("embed_tokens.weight", "head.weight")


def carry_passengers(
    job: JobConfig,
    config: AnyModelConfig,
    sources: Iterable[SourceProvider],
    checkpointer: Checkpointer,
) -> None:
    """Add the passengers to the checkpoints of a run whose weights came from `sources`; not to
    checkpoints of adapters.

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
    """Return the passengers of the folder that `sources` read, after a plan was built from them,
    and log what they are.

    Dequantized tensors are converted to `dtype`.

    Raises:
        CheckpointError: FP8 without its scales. The same on all ranks.
    """
    source: Any = next((source for source in sources if getattr(source, "passengers", ())), None)
    if source is None:
        return None
    carried = CarriedTensors(source, config, dtype)
    if get_rank() == 0:
        logger.warning("%s", carried.explain())
    return carried


class CarriedTensors:
    """The passengers of one folder, with their present location: the folder, or a later
    checkpoint.
    """

    def __init__(self, source: Any, config: AnyModelConfig, dtype: torch.dtype) -> None:
        self._name, self._config, self._dtype, self._block = (
            source.name,
            config,
            dtype,
            source.stored.block,
        )
        tensors: Mapping[str, StoredTensor] = source.stored.tensors
        is_part = isinstance(config, ModelConfig) and source.layout.prefix != BASE
        self._larger = Path(source.folder) if is_part else None  # folder of the larger model
        self._file_bytes: dict[Path, int] = dict(source.stored.file_bytes)
        self._stored = {key: tensors[key] for key in source.passengers}
        self._scales = self._take_scales()
        # For each copy, the stored tensors that it may be a copy of, the likeliest first.
        self._copies = self._find_copies(tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that passengers add to a checkpoint."""
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
        """Return config.json with the passengers' counts and parts. On one rank.

        Raises:
            CheckpointError: transformers rejects it.
        """
        if "config.json" not in description:
            return {}
        table = json.loads(description["config.json"])
        if isinstance(self._config, TransformersConfig):
            if (hf := self._config.hf).get("model_type") == table.get("model_type"):
                return {}
            # The class computes the text part of a larger model, whose other parts are passengers.
            larger = build_config({key: value for key, value in hf.items() if key != "auto_map"})
            larger.architectures, larger.dtype = hf.get("architectures"), self._dtype
            return render(
                "the description of the model", lambda folder: save_config(larger, folder)
            )
        if self._larger is not None and (
            files := describe_larger(table, self._config, self._larger, self._dtype)
        ):
            return files
        if (key := family_of(self._config).mtp_key) is None:
            return {}
        table[key] = sum(part_of(name) + PREDICTION_KEY == name for name in self._stored)
        return {"config.json": (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()}

    def add_to(self, files: Sequence[FileLayout]) -> list[FileLayout]:
        """Lay out the model's `files` again, with the passengers after its own tensors. The same on
        all ranks.
        """
        items = [item for file in files if file.is_of_model for item, _ in file.items]
        carried = self._items({item.key: item for item in items})
        return [
            *lay_out([*items, *carried], "model"),
            *(file for file in files if not file.is_of_model),
        ]

    def originals(self, keys: Iterable[str]) -> dict[str, str]:
        """Return for each copy the saved tensor, one of `keys`, that it is written from."""
        saved = set(keys)  # the first and likeliest one is written last, and counts
        return {
            copy: key for copy, same in self._copies.items() for key in same[::-1] if key in saved
        }

    def follow(self, folder: Path, files: Sequence[FileLayout]) -> None:
        """Read the passengers from the checkpoint in `folder`, which has `files`, from now on."""
        places = {
            item.key: StoredTensor(
                item.key, item.dtype, item.shape, folder / file.name, start, item.nbytes
            )
            for file in files
            for item, start in file.items
            if item.key in self._stored
        }
        self._file_bytes = {folder / file.name: file.nbytes for file in files}
        self._stored = places

    def _take_scales(self) -> dict[str, StoredTensor]:
        """Remove the scales of FP8 weights from the passengers, and return them."""
        scales, problems = dict[str, StoredTensor](), list[str]()
        for key, tensor in self._stored.items():
            if tensor.dtype in FP8:
                scales |= {
                    name: self._stored[name] for name in companions(key) if name in self._stored
                }
                try:
                    find_scale(tensor, scales, self._block)
                except ValueError as error:
                    problems.append(f"{error}. Dequantize the checkpoint with transformers first.")
        raise_problems(CheckpointError, self._name, problems)
        self._stored = {key: tensor for key, tensor in self._stored.items() if key not in scales}
        return scales

    def _find_copies(self, tensors: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
        """Find the passengers whose names are those of token tables: layers for multi-token
        prediction have copies of them.
        """
        rows = self._config.vocab_size
        tables = [
            t for key, t in tensors.items() if key not in self._stored and t.shape[:1] == (rows,)
        ]
        found = {}
        for key, tensor in self._stored.items():
            like = [t for t in tables if (t.shape, t.dtype) == (tensor.shape, tensor.dtype)]
            same = [t.key.removeprefix(MASTER_PREFIX) for t in like if len(t.shape) == 2]
            if same and key.endswith(_COPIES):
                found[key] = sorted(
                    same, key=lambda name, of_head="head" in key: ("head" in name) != of_head
                )
        return found

    def _items(self, saved: Mapping[str, Item]) -> list[Item]:
        """Return the items to save, split over the ranks by bytes; a copy is written from the
        `saved` tensor.
        """
        rank, world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        loads, originals, items = [0] * world_size, self.originals(saved), list[Item]()
        for key, tensor in self._stored.items():
            if key in originals:
                items.append(replace(saved[originals[key]], key=key))
                continue
            turn = loads.index(min(loads))
            loads[turn] += tensor.nbytes
            if tensor.dtype in FP8:
                dtype, region = self._dtype, whole(key, tensor.shape).region
                placed = {key: (tensor.shape, place(tensor, region, self._scales, self._block))}
                reader = SafetensorsReader(self._name, placed, self._file_bytes, threads=1)
                read = partial(read_region, reader, key, dtype=dtype)
            else:  # as one contiguous dim
                dtype, region = (
                    tensor.dtype,
                    whole(key, (tensor.nbytes // tensor.dtype.itemsize,)).region,
                )
                read = partial(_read_elements, tensor, self._file_bytes)
            items.append(
                Item(key, dtype, region, tensor.shape, torch.empty(0), region, turn == rank, read)
            )
        return items


def _read_bytes(
    tensor: StoredTensor, file_bytes: Mapping[Path, int], start: int, nbytes: int
) -> torch.Tensor:
    """Read `nbytes` (uint8) from the byte `start` of a stored tensor."""
    found = torch.empty(nbytes, dtype=torch.uint8)
    try:
        with opened(file_bytes, [tensor.file]) as files:
            read_bytes(files, tensor.file, bytes_of(found), tensor.offset + start)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} It has tensors that every save copies. Put it back as it was."
        ) from None
    return found


def _read_elements(
    tensor: StoredTensor, file_bytes: Mapping[Path, int], region: Region
) -> torch.Tensor:
    """Read a region of a stored tensor as if it had one dim."""
    size = tensor.dtype.itemsize
    return _read_bytes(tensor, file_bytes, region.starts[0] * size, region.lengths[0] * size).view(
        tensor.dtype
    )
