"""Tensors with nothing in them, and shards that are empty on some ranks, are saved and read on another mesh."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import titanlite.assemble
from tests.functional.conftest import train_to_the_end
from titanlite.checkpoint.commit import commit_folder
from titanlite.checkpoint.folder import OWN_FOLDER, read_headers
from titanlite.checkpoint.pieces import whole
from titanlite.checkpoint.reader import Placed, SafetensorsReader
from titanlite.checkpoint.train_state import load_state, state_files
from titanlite.checkpoint.writer import Item, lay_out
from titanlite.config.parallelism import Degrees
from titanlite.config.schema import OptimizerSection
from titanlite.materialize import Init, Normal, Plan, TensorInfo, local_of, materialize, region_of, share_out
from titanlite.materialize.plan import build_plan, named_tensors
from titanlite.materialize.sources import Read
from titanlite.models.decoder import build_decoder
from titanlite.optim.optimizer import build_optimizer
from titanlite.preflight import Checked

EMPTY = {"rows": (0, 8), "columns": (5, 0), "vector": (0,)}


class Small(nn.Module):
    """Shard(0) of (3, 8) leaves one of four ranks empty, of (1, 8) three; the others have no elements anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.row = nn.Parameter(torch.empty(3, 8)), nn.Parameter(torch.empty(1, 8))
        for name, shape in EMPTY.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            self.register_buffer(f"{name}_buffer", torch.empty(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.T).square().sum() + (x @ self.row.T).sum()

    def declare_sources(self) -> dict[str, Any]:
        return {name: Init(Normal()) for name, _, _ in named_tensors(self)}


class Stored:
    """Claims every tensor from the files of a folder."""

    name, complete = "folder", True

    def __init__(self, folder: Path) -> None:
        stored = read_headers([folder / "model.safetensors"], "folder")
        placed = {key: (t.shape, [Placed(t, whole(key, t.shape).region)]) for key, t in stored.tensors.items()}
        self.reader, self.shapes = SafetensorsReader("folder", placed, stored.file_bytes), placed

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> list[tuple[str, Any]]:
        return [(name, Read(self.reader, name, shape)) for name, (shape, _) in self.shapes.items()]


def sharded(world_size: int) -> Any:
    with torch.device("meta"):
        model = Small()
    return fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t, _ in named_tensors(model)}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def save(plan: Plan, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    entries = plan.entries
    items = [
        Item.of(whole(e.fqn, e.info.shape), e.dtype, local_of(e.tensor), region_of(e.tensor), share.mine)
        for e, share in zip(entries, share_out(e.tensor for e in entries), strict=True)
    ]
    commit_folder(folder, [*lay_out(items, "model"), *state_files(plan, optimizer)], {})


@pytest.mark.parametrize("name", ["AdamW", "foreach"])
def test_four_ranks_save_and_two_resume(run_ranks: Callable[..., list[Any]], tmp_path: Path, name: str) -> None:
    folder = tmp_path / "saved"
    section = OptimizerSection(lr=0.1, implementation="foreach" if name == "foreach" else "fused")

    def on_four() -> tuple[list[int], dict[str, torch.Tensor]]:
        model = sharded(4)
        plan = materialize(model, "cpu")
        optimizer = build_optimizer(model, section)
        step(model, optimizer, 1)
        save(plan, optimizer, folder)
        sizes = [local_of(model.weight).numel(), local_of(model.row).numel()]
        step(model, optimizer, 2)
        return sizes, values(model)

    def on_two() -> dict[str, torch.Tensor]:
        model = sharded(2)
        source = Stored(folder)
        plan = materialize(model, "cpu", [source])
        optimizer = build_optimizer(model, section)
        load_state(folder, plan, optimizer)
        step(model, optimizer, 2)
        return values(model)

    four = run_ranks(4, on_four)
    assert [sizes for sizes, _ in four] == [[8, 8], [8, 0], [8, 0], [0, 0]]
    expected = four[0][1]
    assert {key: tuple(value.shape) for key, value in expected.items() if not value.numel()} == {
        f"{key}{end}": shape for key, shape in EMPTY.items() for end in ("", "_buffer")
    }
    states = read_headers([*(folder / OWN_FOLDER).glob("optimizer*.safetensors")], "states").tensors
    assert states["exp_avg.weight"].shape == (3, 8)
    assert {f"unstepped.{name}" for name in EMPTY} < states.keys()
    for found in run_ranks(2, on_two):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)


class Extra(nn.Module):
    """A parameter and a buffer without elements, and a parameter that leaves ranks of FSDP empty."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.three = nn.Parameter(torch.empty(5, 0)), nn.Parameter(torch.empty(3, 8))
        self.register_buffer("none", torch.empty(0, 2))

    def declare_sources(self) -> dict[str, Any]:
        return dict.fromkeys(("nothing", "three", "none"), Init(Normal()))


def build_with_extra(*args: Any) -> Any:
    model: Any = build_decoder(*args)
    with torch.device("meta"):
        model.extra = Extra()
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output + model.extra.nothing.sum() + model.extra.three.mean()
    )
    return model


@pytest.mark.slow
def test_a_run_with_such_tensors_resumes_on_another_mesh(
    run_ranks: Callable[..., list[Any]],
    checked: Callable[..., Checked],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(titanlite.assemble, "build_decoder", build_with_extra)
    shared = ["--training.steps=4", "--checkpoint.interval=2", "--training.local_batch_size=2"]
    whole = checked(Degrees(dp_shard=4), *shared, f"--job.dump_folder={tmp_path / 'whole'}")
    run_ranks(4, lambda: train_to_the_end(whole))
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "resumed/checkpoint/step-2")
    resumed = checked(Degrees(dp_shard=2), *shared, f"--job.dump_folder={tmp_path / 'resumed'}")
    run_ranks(2, lambda: train_to_the_end(resumed))
    first, second = (load_file(tmp_path / run / "checkpoint/step-4/model.safetensors") for run in ("whole", "resumed"))
    assert first["extra.nothing"].shape == (5, 0) and first["extra.none"].shape == (0, 2)
    assert not torch.equal(first["extra.three"], torch.zeros(3, 8))
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=1e-4, atol=1e-5)


def test_the_plan_of_empty_tensors_reads_nothing() -> None:
    with torch.device("meta"):
        model = Small()
    assert {e.fqn: e.local_bytes for e in build_plan(model).entries if not e.local_bytes}.keys() == {
        f"{key}{end}" for key in EMPTY for end in ("", "_buffer")
    }
