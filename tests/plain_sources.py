"""Sources of tensors that need no file: full tensors in memory, and PyTorch's own distributions."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from titanlite.materialize import Init, Normal, Ones, ReadRequest, Source, TensorInfo, Uniform, Zeros
from titanlite.materialize.layout import write_rows
from titanlite.materialize.sources import Read


class Checkpoint:
    """Claims every tensor that `reader` has. Strict: missing and unexpected names are errors."""

    def __init__(self, reader: "StateDictReader") -> None:
        self.name, self.complete, self._reader = f"checkpoint {reader.name}", True, reader

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source]]:
        return [(name, Read(self._reader, name, tuple(x.shape))) for name, x in self._reader.state_dict.items()]


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
                write_rows(request.encoding, values.to(request.destination.device), request.destination)


class TorchDefaults:
    """PyTorch's distributions for weight and bias of Linear, Embedding (`padding_idx` row zero), LayerNorm, RMSNorm."""

    name, complete = "torch defaults", False

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source]]:
        for fqn, info in tensors.items():
            leaf, module = fqn.rpartition(".")[2], info.module
            if leaf not in ("weight", "bias") or not getattr(module, leaf).is_meta:
                continue
            if isinstance(module, nn.Linear):
                bound = 1.0 / math.sqrt(module.in_features)
                yield fqn, Init(Uniform(low=-bound, high=bound))
            elif isinstance(module, nn.Embedding):
                yield fqn, Init(Normal(zero_row=module.padding_idx))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                yield fqn, Init(Zeros() if leaf == "bias" else Ones())
