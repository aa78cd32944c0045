"""Tied tensors that a file stores twice: which must then be the same, for the model has one tensor for both."""

import torch

from titanlite.checkpoint.reader import SafetensorsReader
from titanlite.materialize import ReadRequest, Region
from titanlite.materialize.sources import Read

_CHUNK_ELEMENTS = 4 << 20


def is_equal(first: Read, second: Read) -> bool:
    """Return True if both hold the same values, whatever their dtypes. Streams: two chunks of 32 MiB are in memory.

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


def explain_untied(where: str, target: str, flag: str, otherwise: str = "") -> str:
    """Why the plan has no source for a tensor that is tied to `target`, and stored with other values in `where`."""
    remedy = f"Set {flag} = false in its config.json{otherwise}" if flag else "Correct the file"
    return (
        f"{where} has it with other values than {target}, to which config.json ties it; transformers takes the values, "
        f"and one of them would be lost here. {remedy}."
    )
