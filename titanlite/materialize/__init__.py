"""Materialization: from a model on the meta device to real tensors, each written once from one
declared source.

    plan -> allocate -> fill -> verify

Works for any `nn.Module`, sharded (DTensor, FSDP2) or not, outside the trainer too:

    with torch.device("meta"):
        model = MyModel()
    materialize(model, "cpu", [{"*.weight": Init(Normal(std=0.02)), "*.bias": Init(Zeros())}],
    seed=7)

A module declares the sources of its own tensors in a method `declare_sources(self) -> dict[str,
Source]`, with names relative to itself. The argument `sources` adds claims by name or pattern, or
from a checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from titanlite.materialize.execute import allocate, fill, verify
from titanlite.materialize.layout import Region, local_of, region_of
from titanlite.materialize.plan import Plan, TensorEntry, build_plan
from titanlite.materialize.replicas import assign_owners
from titanlite.materialize.sources import (
    Alias,
    Compute,
    Constant,
    Init,
    InvalidClaim,
    Keep,
    Normal,
    Ones,
    Read,
    ReadRequest,
    Recipe,
    Source,
    SourceProvider,
    TensorInfo,
    TensorReader,
    Uniform,
    Zeros,
)


def materialize(
    model: nn.Module,
    device: torch.device | str,
    sources: Sequence[SourceProvider | Mapping[str, Source]] = (),
    *,
    seed: int = 0,
    buffer_device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    waiting: dist.ProcessGroup | None = None,
) -> Plan:
    """Give every meta tensor of `model` its value on `device`, in place, and return the plan that
    was executed.

    Parameter and buffer objects stay the same objects, with their attributes. Tensors that were
    never on meta keep their values bit for bit. The same `seed` gives bit-identical weights for
    every sharding of the model.

    Args:
        model: any module; parameters may be DTensors and the module may be under FSDP2.
        device: device of the local tensors.
        sources: claims that take precedence over the modules' own declarations; see
            `titanlite.materialize.sources`.
        seed: seed of the `Init` sources.
        buffer_device: device of the buffers, by default `device`; with CPU offload buffers stay on
            the accelerator.
        group, waiting: see `Plan`.

    Raises PlanError: a tensor has no source, two sources, or a source that does not fit; nothing
    was allocated. Raises VerifyError: `verify` found a problem. All ranks raise both.

    Collectives: `verify` gathers one small object over all ranks; every rank must call.
    """
    plan = replace(build_plan(model, sources), group=group, waiting=waiting)
    allocate(plan, torch.device(device), torch.device(buffer_device or device))
    fill(plan, seed)
    verify(plan)
    return plan
