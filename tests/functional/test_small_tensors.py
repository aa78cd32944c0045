"""Tensors without elements, and shards that are empty on some ranks, are saved and then read on
another mesh.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import titanlite.assemble
from tests.functional.conftest import train_to_the_end
from titanlite.config.parallelism import Degrees
from titanlite.materialize import Init, Normal
from titanlite.models.decoder import build_decoder


class Extra(nn.Module):
    """A parameter and a buffer without elements, and a parameter that leaves ranks of FSDP
    empty.
    """

    def __init__(self):
        super().__init__()
        self.nothing, self.three = nn.Parameter(torch.empty(5, 0)), nn.Parameter(torch.empty(3, 8))
        self.register_buffer("none", torch.empty(0, 2))

    def declare_sources(self):
        return dict.fromkeys(("nothing", "three", "none"), Init(Normal()))


def build_with_extra(*args):
    model = build_decoder(*args)
    with torch.device("meta"):
        model.extra = Extra()
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output + model.extra.nothing.sum() + model.extra.three.mean()
    )
    return model


@pytest.mark.slow
def test_a_run_with_such_tensors_resumes_on_another_mesh(
    run_ranks,
    checked,
    monkeypatch,
    tmp_path,
):
    monkeypatch.setattr(titanlite.assemble, "build_decoder", build_with_extra)
    shared = ["--training.steps=4", "--checkpoint.interval=2", "--training.local_batch_size=2"]
    whole = checked(Degrees(dp_shard=4), *shared, f"--job.dump_folder={tmp_path / 'whole'}")
    run_ranks(4, lambda: train_to_the_end(whole))
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "resumed/checkpoint/step-2")
    resumed = checked(Degrees(dp_shard=2), *shared, f"--job.dump_folder={tmp_path / 'resumed'}")
    run_ranks(2, lambda: train_to_the_end(resumed))
    first, second = (
        load_file(tmp_path / run / "checkpoint/step-4/model.safetensors")
        for run in ("whole", "resumed")
    )
    assert first["extra.nothing"].shape == (5, 0) and first["extra.none"].shape == (0, 2)
    assert not torch.equal(first["extra.three"], torch.zeros(3, 8))
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=1e-4, atol=1e-5)
