"""A checkpoint that is not at hand, such as one of the hub: what would be read of it follows from shapes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from titanlite.base.errors import CheckpointError
from titanlite.materialize import Init, ReadRequest, Region, Source, TensorInfo
from titanlite.materialize.sources import Read

_BYTES = 2  # per element: models are published in bfloat16


class AssumedCheckpoint:
    """Claims every tensor that a checkpoint must have, as stored in two bytes per element. For plans, not for reading.

    What may be absent from a checkpoint, such as adapters, is taken to be.
    """

    complete, proves_coverage = False, True

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source]]:
        for name, info in tensors.items():
            if info.persistent and not _may_be_absent(info):
                yield name, Read(self, name, info.shape)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def read(self, requests: Sequence[ReadRequest]) -> None:
        raise CheckpointError(f"checkpoint {self.name}: only assumed, for a plan. It cannot be read.")

    def plan_bytes(self, name: str, region: Region) -> dict[Path, int]:
        """Bytes of `region`, if it is stored in bfloat16."""
        return {Path(self.name): region.numel * _BYTES}


def _may_be_absent(info: TensorInfo) -> bool:
    declare = getattr(type(info.module), "declare_sources", None)
    own = declare(info.module).get(info.fqn.rpartition(".")[2]) if declare is not None else None
    return isinstance(own, Init) and own.may_be_absent
