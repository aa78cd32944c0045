"""`training.deterministic`: two runs, and a resumed one, have the same bits; on another number of
ranks nearly.
"""

import shutil

import pytest
import torch
from files import read_lines
from safetensors.torch import load_file

from titanlite.assemble import assemble
from titanlite.config.parallelism import Degrees

STEPS, HALF = 4, 2


def test_two_runs_and_a_resumed_one_are_the_same_to_the_bit(run_ranks, checked, meshes, tmp_path):
    overrides = [
        "--training.deterministic=true",
        f"--training.steps={STEPS}",
        f"--checkpoint.interval={HALF}",
    ]
    overrides += ["--training.local_batch_size=4"]

    def train(name, degrees):
        job = checked(degrees, *overrides, f"--job.dump_folder={tmp_path / name}")

        def rank_main():
            assemble(job).train()
            return torch.are_deterministic_algorithms_enabled()

        assert run_ranks(degrees.world_size, rank_main) == [True] * degrees.world_size
        points = read_lines(tmp_path / name / "metrics.jsonl")
        return {point["step"]: point["loss/train"] for point in points}

    def resume(name, degrees):
        shutil.copytree(
            tmp_path / f"one/checkpoint/step-{HALF}", tmp_path / name / f"checkpoint/step-{HALF}"
        )
        return train(name, degrees)

    mesh = meshes["TP2xEP2"]
    one = train("one", mesh)
    assert sorted(one) == list(range(1, STEPS + 1))
    assert train("two", mesh) == one
    again = {step: loss for step, loss in one.items() if step > HALF}
    assert resume("resumed", mesh) == again
    folders = [tmp_path / name / f"checkpoint/step-{STEPS}" for name in ("one", "two", "resumed")]
    for name in (
        "model.safetensors",
        "titanlite/optimizer.safetensors",
        "titanlite/expert_bias.safetensors",
    ):
        first, *others = [load_file(folder / name) for folder in folders]
        assert all(
            torch.equal(tensor, other[key]) for other in others for key, tensor in first.items()
        ), name

    fewer = resume("fewer", Degrees(dp_shard=2))
    assert fewer.keys() == again.keys()
    assert [fewer[step] for step in again] == pytest.approx(list(again.values()), abs=1e-5)
