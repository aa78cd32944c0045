"""Figures that follow from shapes alone: every tensor of a rank, and what it reads of a checkpoint, at hand or not."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from titanlite.assemble import build_model, build_on_meta
from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.model_source import weights_of
from titanlite.distributed import ParallelDims
from titanlite.distributed.process_group import fake_ranks
from titanlite.features.muon.muon import muon_matrices
from titanlite.features.record.plan_file import RunPlan, build_run_plan
from titanlite.materialize import Init, ReadRequest, Region, Source, SourceProvider, TensorInfo, build_plan
from titanlite.materialize.sources import Read
from titanlite.preflight import Checked

_BYTES = 2  # per element: models are published in bfloat16


class AssumedCheckpoint:
    """A checkpoint that is not at hand: every tensor that it must have, in two bytes per element. It cannot be read.

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


def planned_sources(checked: Checked, weights: str) -> list[SourceProvider]:
    """Where weights are read from: the folder if it is there, or what the model named `weights` is assumed to hold."""
    folder = checked.job.checkpoint.initial_load_path
    if not weights:
        return []
    if not folder:
        return [AssumedCheckpoint(weights)]
    with fake_ranks(checked.degrees.world_size):  # as rank 0, the one that reads headers
        return [weights_of(Path(folder), build_model(checked.model_config))]


def exact_plan(
    checked: Checked,
    sources: list[SourceProvider],
    rank: int,
    *,
    fold: bool,
    device: torch.device = torch.device("cuda"),  # noqa: B008 - immutable
) -> RunPlan:
    """Every tensor of `rank`; the model is described and sharded as in a run on devices like `device`."""
    with fake_ranks(checked.degrees.world_size, rank):
        dims = ParallelDims.build(checked.degrees, "cpu")
        model = build_on_meta(checked.job, checked.model_config, dims, device)
        return build_run_plan(build_plan(model, sources), muon_matrices(model, checked.job.optimizer), fold=fold)
