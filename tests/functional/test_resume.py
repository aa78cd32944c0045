"""A resumed run equals the uninterrupted run: bit for bit on the same mesh, to float32's rounding
on another mesh.
"""

import shutil
from pathlib import Path

import pytest
import torch
from files import folder_digests
from safetensors.torch import load_file

from tests.functional.conftest import NO_PRESET, values_of, weekly
from tests.saving import whole as all_values
from titanlite.assemble import assemble
from titanlite.checkpoint.commit import check_folder
from titanlite.config.parallelism import Degrees
from titanlite.features.record.run_files import count_bytes

# After an even number of steps the expert biases may be zero again, and zero biases are not saved.
HALF, ALL = 1, 3
TWO = Degrees(dp_shard=2)  # for tests that do not depend on the mesh
DOTS1 = ["--model.name=dots1"]
MUON = ["--optimizer.name=Muon"]
QWEN3_5 = ["--model.name=qwen3_5_moe_text", "--checkpoint.export_dtype=bfloat16"]
QWEN3_5 += ["--training.deterministic=true"]
# Shards have unequal sizes, and some are empty.
UNEVEN = ["--model.overrides.num_experts=6", "--model.overrides.hidden_size=66"]
NEXT = ["--model.name=qwen3_next", "--moe.aux_loss_coeff=0.01"]
SCHEDULE = [
    f"--training.steps={ALL}",
    "--lr_scheduler.warmup_steps=4",
    f"--checkpoint.interval={HALF}",
]


@pytest.fixture
def train(train_into):
    """`train(degrees, folder, *overrides)`: a whole `Trainer.train` on the ranks of this file; it
    resumes from `folder`. test_end_to_end.py resumes with a new launch.
    """

    def run(degrees, folder, *overrides):
        whole_batch = f"--training.local_batch_size={8 // degrees.dp}"
        train_into(folder, degrees, *SCHEDULE, whole_batch, *overrides)

    return run


@pytest.fixture
def halfway(train, once, tmp_path_factory, tmp_path):
    """`halfway(degrees, *overrides)` -> (folder of the uninterrupted run, folder with its
    checkpoint of the middle).
    """

    def run(degrees, *overrides):
        def make():
            folder = tmp_path_factory.mktemp("whole")
            train(degrees, folder, *overrides)
            return folder

        whole, resumed = once((degrees, overrides), make), tmp_path / "resumed"
        shutil.copytree(whole / f"checkpoint/step-{HALF}", resumed / f"checkpoint/step-{HALF}")
        return whole, resumed

    return run


def losses(folder, first):
    return [loss for step, loss in values_of(folder, "loss/train").items() if step >= first]


def contents(folder, step):
    return folder_digests(folder / f"checkpoint/step-{step}")


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ("FSDP4", []),
        (
            "TP2xFSDP2",
            ["--checkpoint.export_dtype=bfloat16", "--optimizer.state_dtype=bfloat16"],
        ),
        ("FSDP2", ["--training.dtype=bfloat16", "--optimizer.implementation=foreach"]),
        ("HSDP2xTP2xEP2", MUON),
        weekly("CP2xTP2xEP4", []),
        ("PP2xTP2xEP2", []),
        ("PP2xFSDP2", ["--checkpoint.async_mode=async", "--training.local_batch_size=1", *DOTS1]),
        weekly("EP2xFSDP2", [*NEXT, *MUON]),
        weekly("TP2xEP2", ["--model.name=gpt_oss", *MUON]),
        ("EP2", ["--model.implementation=transformers", "--moe.expert_bias_update_rate=0"]),
        ("TP2xEP2 only", QWEN3_5),
    ],
)
def test_resumed_run_is_the_uninterrupted_run_bit_for_bit(train, halfway, meshes, mesh, overrides):
    """Weights, optimizer states, expert biases and data order: the last checkpoints have the same
    bytes.
    """
    whole, resumed = halfway(meshes[mesh], *overrides)
    train(meshes[mesh], resumed, *overrides)
    expected, got = contents(whole, ALL), contents(resumed, ALL)
    assert expected.keys() == got.keys() and "titanlite/optimizer.safetensors" in got
    assert [name for name in expected if expected[name] != got[name]] == []
    assert losses(resumed, 1) == losses(whole, HALF + 1) and len(losses(resumed, 1)) == ALL - HALF
    assert check_folder(resumed / f"checkpoint/step-{ALL}", checksums=True) == []


def test_the_middle_is_not_the_end(halfway, meshes):
    """The comparison above can fail: two steps change every file that holds numbers."""
    whole, _ = halfway(meshes["FSDP4"])
    middle, end = contents(whole, HALF), contents(whole, ALL)
    for name in (
        "model.safetensors",
        "titanlite/optimizer.safetensors",
        "titanlite/expert_bias.safetensors",
    ):
        assert middle[name] != end[name], name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (*MUON, r"exp_avg\.\S+: the optimizer trains no .* state\. Set optimizer\.name"),
        (
            "--model.overrides.rope_theta=5e4",
            r"step-\d+, whose model is different: rope_theta is 50000\.0, there 1000000\.0",
        ),
    ],
)
def test_resumed_with_another_optimizer_or_model_it_is_refused(train, halfway, override, message):
    """The resume is refused even if the tensors would fit."""
    _, resumed = halfway(TWO)
    with pytest.raises(AssertionError, match=message):
        train(TWO, resumed, override)


@pytest.mark.parametrize(
    ("before", "after", "overrides"),
    [
        weekly("FSDP4", "TP2xEP2", []),
        weekly("HSDP2xTP2xEP2", "EP4", []),
        ("FSDP4", "1", UNEVEN),
        weekly("CP2xTP2xEP4", "TP2xFSDP2", []),
        ("PP2xTP2xEP2", "EP2xFSDP2", []),
        weekly("PP2xFSDP2", "1", []),
        ("HSDP2xTP2xEP2", "EP2xFSDP2", MUON),
    ],
    ids=str,
)
def test_resumed_on_another_mesh_or_world_size_the_loss_is_the_same(
    train, halfway, meshes, before, after, overrides
):
    whole, resumed = halfway(meshes[before], *overrides)
    train(meshes[after], resumed, *overrides)
    # Ranks add float32 numbers in another order; see test_parity_ladder.py.
    assert losses(resumed, 1) == pytest.approx(losses(whole, HALF + 1), rel=1e-5)
    assert len(losses(resumed, 1)) == ALL - HALF


def test_another_global_batch_size_goes_on_behind_the_samples_that_were_seen(
    run_ranks, halfway, checked
):
    _, resumed = halfway(Degrees())

    def rank_main():
        job = checked(
            Degrees(), *SCHEDULE, f"--job.dump_folder={resumed}", "--training.global_batch_size=4"
        )
        trainer = assemble(job)
        assert trainer.step == HALF
        seen = HALF * 8  # at the batch size before the change
        dataset = trainer.parts.loader.dataset
        expected = dataset.batch(
            dataset.get_train_indices(job.job.training.seed, seen, seen + 4)[:2]
        )
        assert torch.equal(
            trainer.parts.loader.micro_batches(trainer.step)[0].tokens, expected.tokens
        )

    run_ranks(1, rank_main)


def test_optimizer_states_are_those_of_the_run(halfway, meshes):
    """The files hold AdamW's moments under the names of the parameters, experts fused, and no
    moment is zero.
    """
    whole, _ = halfway(meshes["FSDP4"])
    states = load_file(whole / f"checkpoint/step-{ALL}/titanlite/optimizer.safetensors")
    kinds = {}
    for key, tensor in states.items():
        kind, _, name = key.partition(".")
        kinds.setdefault(kind, set()).add(name)
        assert tensor.dtype == torch.float32
        if kind == "step":
            assert tensor.item() == ALL
        else:
            assert tensor.count_nonzero() > 0.5 * tensor.numel() or "embed_tokens" in name, key
    assert kinds.keys() == {"exp_avg", "exp_avg_sq", "step"}
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == kinds["step"]
    assert "model.layers.1.mlp.experts.gate_up_proj" in kinds["step"]


def test_a_finished_run_says_so_and_saves_nothing(train, halfway, text_folder, tmp_path):
    whole, _ = halfway(TWO)
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    train(TWO, copy)
    with pytest.raises(AssertionError, match=rf"are 2 steps, but .* is at step {ALL}"):
        train(TWO, copy, "--training.steps=2", "--lr_scheduler.warmup_steps=2")
    with pytest.raises(AssertionError, match=rf"holds another run, at step {ALL}: data\.path"):
        train(TWO, copy, f"--data.path={shutil.copytree(text_folder, tmp_path / 'other')}")
    assert contents(copy, ALL) == contents(whole, ALL)
    assert sorted(path.name for path in (copy / "checkpoint").iterdir()) == [
        f"step-{step}" for step in range(HALF, ALL + 1)
    ]


def test_initial_load_path_begins_at_step_0_with_those_weights(
    run_ranks, halfway, checked, meshes, tmp_path
):
    """The run takes weights and expert biases of another run, and a fresh optimizer."""
    whole, _ = halfway(meshes["FSDP4"])
    source = whole / f"checkpoint/step-{ALL}"
    job = checked(
        meshes["TP2xEP2"],
        *NO_PRESET,
        f"--job.dump_folder={tmp_path / 'new'}",
        f"--checkpoint.initial_load_path={source}",
    )
    bias = load_file(source / "titanlite/expert_bias.safetensors")

    def rank_main():
        trainer = assemble(job)
        assert trainer.step == 0 and not trainer.parts.stepper.optimizer.state
        for name, expected in bias.items():
            assert torch.equal(trainer.model.get_buffer(name), expected)
        norm = trainer.model.model.norm.weight
        assert torch.equal(
            all_values(norm), load_file(source / "model.safetensors")["model.norm.weight"]
        )

    run_ranks(4, rank_main)


@pytest.mark.parametrize(
    "overrides",
    [
        ["--checkpoint.export_dtype=bfloat16", "--optimizer.freeze=*experts*"],
        ["--optimizer.state_dtype=bfloat16"],
        MUON,
    ],
)
def test_checkpoints_are_as_large_as_was_said(run_ranks, checked, overrides):
    job = checked(
        Degrees(dp_shard=2), *overrides, "--training.steps=1", "--lr_scheduler.warmup_steps=1"
    )

    def rank_main():
        trainer = assemble(job)
        parts = trainer.parts
        said = count_bytes(parts.plan, parts.run.job, parts.stepper.optimizer)
        trainer.train()
        return said

    said = run_ranks(2, rank_main)
    folder = Path(job.job.job.dump_folder, "checkpoint/step-1")
    files = list(folder.rglob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    # The sizes differ by a few bytes, because AdamW counts its steps for each parameter.
    assert (
        said[0]
        == said[1]
        == pytest.approx(sum(file.stat().st_size for file in files) - headers, rel=1e-3)
    )
