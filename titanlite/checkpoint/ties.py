"""Tied tensors that a file stores twice: which must then be the same, for the model has one tensor for both."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from titanlite.base.errors import ConfigError
from titanlite.checkpoint.reader import SafetensorsReader
from titanlite.config import TransformersConfig
from titanlite.features.transformers.model import build_transformers
from titanlite.materialize import ReadRequest, Region
from titanlite.materialize.sources import Alias, Read

_CHUNK_ELEMENTS = 4 << 20
_FLAG = "tie_word_embeddings"


def is_equal(first: Read, second: Read) -> bool:
    """True if both hold the same values, whatever their dtypes. Streams: two chunks of 32 MiB are in memory.

    What can only be read whole, is: its reader converts it anyway.
    """
    if first.shape != second.shape:
        return False
    whole = Region((0,) * len(first.shape), first.shape)
    is_streamed = isinstance(first.reader, SafetensorsReader) and isinstance(second.reader, SafetensorsReader)
    return all(
        torch.equal(_read(first, region), _read(second, region))
        for region in (whole.slabs(_CHUNK_ELEMENTS) if is_streamed else [whole])
    )


def _read(read: Read, region: Region) -> torch.Tensor:
    values = torch.empty(region.lengths, dtype=torch.float64)  # which holds the values of all others
    request = ReadRequest(read.name, region, values)
    if isinstance(read.reader, SafetensorsReader):
        read.reader.read_quietly([request])
    else:
        read.reader.read([request])
    return values


def find_flag(config: TransformersConfig, name: str) -> str:
    """The keys of config.json with which the tensor `name` is not tied, found by building the model; or none."""
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


def explain_untied(where: str, target: str, flag: str, otherwise: str = "") -> str:
    """Why the plan has no source for a tensor that is tied to `target`, and stored with other values in `where`."""
    remedy = f"Set {flag} = false in its config.json{otherwise}" if flag else "Correct the file"
    return (
        f"{where} has it with other values than {target}, to which config.json ties it; transformers takes the values, "
        f"and one of them would be lost here. {remedy}."
    )
