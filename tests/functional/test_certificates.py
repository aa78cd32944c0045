"""Certificates of one run are the same on any mesh and after a resume, and the saved checkpoints
are valid.
"""

import re
import shutil

import pytest
import torch

from tests.functional.conftest import MESHES, NO_PRESET
from titanlite.config.parallelism import Degrees
from titanlite.features.tools.export import export_merged
from titanlite.features.tools.verify import main
from titanlite.features.verify import read_certificate

# Ranks add in different orders, so weights that are trained on different meshes differ in their
# last bits.
STILL = "--optimizer.lr=1e-30"
CHOSEN = ("1", "TP2xEP2", "PP2")
FSDP2 = Degrees(dp_shard=2)
FIXED = [
    "--lr_scheduler.warmup_steps=0",
    "--moe.expert_bias_update_rate=none",
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest_k=0",
]


@pytest.fixture
def train(train_into):
    def run(degrees, folder, *overrides):
        train_into(folder, degrees, *FIXED, *overrides)
        return folder / "checkpoint"

    return run


def certificate_of(folder):
    """Return the certificate without its description of the mesh."""
    found = read_certificate(folder)
    assert found.pop("mesh")["ranks"] > 0
    return found


def test_any_mesh_and_resumes_have_the_same(train, tmp_path):
    found = {}
    for name in CHOSEN:
        folder = train(MESHES[name], tmp_path / name, STILL, "--training.steps=2")
        found[name] = certificate_of(folder / "step-2")
    one = found.pop("1")
    assert re.fullmatch(r"loss \d\.\d+, gradient norm \d+\.\d+", one["first_step"])
    rows = one["tensors"]
    assert rows["model.layers.1.mlp.experts.3.down_proj.weight"]["source"].startswith("init normal")
    assert all(row["gradient"] for row in rows.values() if row["state"] == "trained")
    for name, other in found.items():
        assert other == one, name
    # These weights are really trained, and resumed on each mesh.
    start = train(MESHES["1"], tmp_path / "start", "--training.steps=2", "--optimizer.lr=1e-2")
    trained = certificate_of(start / "step-2")["tensors"]
    assert trained.keys() == rows.keys() and all(
        trained[key]["digest"] != row["digest"] for key, row in rows.items()
    )
    resumed = {}
    for name in CHOSEN:
        shutil.copytree(start.parent, tmp_path / f"resumed-{name}")
        folder = train(MESHES[name], tmp_path / f"resumed-{name}", STILL, "--training.steps=4")
        resumed[name] = certificate_of(folder / "step-4")
        assert main([str(folder.parent)]) == 0
    for name, other in resumed.items():
        assert other == resumed["1"], name
    assert resumed["1"]["tensors"] == trained, "the rows of the start, with their sources"


def test_a_resumed_run_has_the_certificate_of_the_uninterrupted_one(train, pretrained, tmp_path):
    base = pretrained("resumed", 0.1)
    more = [*NO_PRESET, f"--model.path={base}", "--training.steps=4"]
    whole = train(FSDP2, tmp_path / "whole", *more)
    half = tmp_path / "half/checkpoint"
    shutil.copytree(whole.parent, tmp_path / "half", ignore=shutil.ignore_patterns("step-4"))
    train(FSDP2, tmp_path / "half", *more)
    one, other = (read_certificate(folder / "step-4") for folder in (whole, half))
    assert one == other and one["trained_from"]["name"] == "resumed"
    rows = one["tensors"]
    assert {row["source"] for row in rows.values()} == {"base"}
    assert one["base"].keys() == rows.keys()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--model.implementation=transformers",),
        ("--optimizer.freeze=*.experts.*",),
        ("--lora.rank=4",),
        ("--lora.rank=4", "--lora.base_dtype=nf4"),
    ],
    ids=["native", "class", "frozen", "LoRA", "QLoRA"],
)
def test_what_runs_save_is_sound(overrides, train, pretrained, tmp_path, capsys):
    base = pretrained("sound", 0.1)
    more = [*NO_PRESET, f"--model.path={base}", *overrides]
    folder = train(MESHES["1"], tmp_path / "run", *more, "--training.steps=2")
    for arguments in ([], ["--base", str(base)]):
        code = main([str(tmp_path / "run"), *arguments])
        assert code == 0, capsys.readouterr().out
    if "--lora.rank=4" in overrides:
        export_merged(folder / "step-2", tmp_path / "merged", torch.float32, str(base))
        code = main([str(tmp_path / "merged"), "--base", str(base)])
        shown = capsys.readouterr().out
        assert code == 0 and "attention" in shown, shown
