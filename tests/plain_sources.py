"""A checkpoint that needs no file: full tensors in memory."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from titanlite.materialize import ReadRequest, Source, TensorInfo
from titanlite.materialize.layout import write_rows
from titanlite.materialize.sources import Read


class Checkpoint:
    """Claims every tensor that `reader` has. Strict: missing and unexpected names are errors."""

    def __init__(self, reader: "StateDictReader") -> None:
        self.name, self.complete, self._reader = f"checkpoint {reader.name}", True, reader

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source]]:
        return [
            (name, Read(self._reader, name, tuple(x.shape)))
            for name, x in self._reader.state_dict.items()
        ]


class StateDictReader:
    """Reads from full tensors in memory, a state dict of the unsharded model."""

    def __init__(self, state_dict: Mapping[str, torch.Tensor], name: str = "state dict") -> None:
        self.name, self.state_dict, self.proves_coverage = name, state_dict, False

    def read(self, requests: Sequence[ReadRequest]) -> None:
        for request in requests:
            values = self.state_dict[request.name][request.region.slices]
            if request.encoding is None:
                request.destination.copy_(values)
            else:
                write_rows(
                    request.encoding, values.to(request.destination.device), request.destination
                )
