"""LoRA through real trainers: every mesh trains the same adapters, resuming is exact, the base model never moves."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from files import file_digest
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from tests.functional.conftest import train_to_the_end
from tests.saving import whole
from titanlite.assemble import assemble
from titanlite.base.errors import CheckpointError, ConfigError, PlanError
from titanlite.checkpoint.folder import ADAPTER_FILE
from titanlite.config.parallelism import Degrees
from titanlite.features.tools.export import export_merged
from titanlite.models.interface import is_adapter
from titanlite.preflight import Checked
from titanlite.trainer import Trainer

STEPS = 4
RELATIVE_TOLERANCE = 1e-5  # as in test_parity_ladder.py
WEIGHT_TOLERANCE = 1.25e-5
STRONG = "--lora.alpha=32"  # so that four steps learn something
LORA = ["--lora.rank=4", "--lora.alpha=8", "--moe.expert_bias_update_rate=none", "--training.local_batch_size=2"]
FAMILIES = {
    "qwen3_moe": [],
    "qwen3": ["--model.name=qwen3"],
    "dots1": ["--model.name=dots1"],
    "few_experts": ["--model.overrides.num_experts=2", "--model.overrides.top_k=1"],
}
FULL_AC = "--activation_checkpoint.mode=full"


@pytest.fixture
def base_of(pretrained) -> Callable[[str], Path]:
    """`base_of(family)`: a pretrained model, wide enough that experts differ and the loss has something to unlearn."""
    return lambda family: pretrained(family, 0.1, *FAMILIES[family])


@pytest.fixture
def overrides_of(base_of) -> Callable[..., list[str]]:
    def get(family: str, *overrides: str) -> list[str]:
        cleared = ["--model.flavor=", "--model.overrides.vocab_size=none", "--model.overrides.num_layers=none"]
        return [*cleared, *LORA, f"--checkpoint.initial_load_path={base_of(family)}", *overrides]

    return get


@pytest.fixture(scope="module")
def reference_runs() -> dict[str, Any]:
    return {}


@pytest.fixture
def compare(warm_run, overrides_of, meshes, reference_runs):
    def run(mesh: str, family: str, *overrides: str) -> Any:
        if family not in reference_runs:
            reference_runs[family] = warm_run(Degrees(), *overrides_of(family, STRONG), steps=STEPS)[0]
        one = reference_runs[family]
        degrees = meshes[mesh]
        local = f"--training.local_batch_size={8 // degrees.dp // 2}"
        ranks = warm_run(degrees, *overrides_of(family, STRONG, local, *overrides), steps=STEPS)
        for many in ranks:
            assert many.digests == one.digests, "initial weights are not bit-identical"
            assert many.losses == pytest.approx(one.losses, rel=RELATIVE_TOLERANCE)
            assert many.grad_norms == pytest.approx(one.grad_norms, rel=RELATIVE_TOLERANCE)
        for name, expected in one.weights.items():
            if not name.endswith(".tokens_per_expert"):
                tolerance = WEIGHT_TOLERANCE if is_adapter(name) else 0.0
                torch.testing.assert_close(ranks[0].weights[name], expected, rtol=0, atol=tolerance)
        return one

    return run


@pytest.mark.parametrize(
    ("mesh", "family", "overrides"),
    [
        ("FSDP4", "qwen3_moe", []),
        ("TP2xEP4", "qwen3_moe", ["--activation_checkpoint.mode=selective"]),
        ("HSDP2x2", "few_experts", []),
        ("TP2xFSDP2", "few_experts", []),
        ("TP2xFSDP2", "qwen3", [FULL_AC]),
        ("TP2xEP2", "dots1", []),
        ("CP2xTP2", "qwen3_moe", ["--activation_checkpoint.mode=selective"]),
        ("PP2xTP2xEP2", "qwen3_moe", []),
        ("PP2xFSDP2", "dots1", [FULL_AC]),
    ],
)
def test_mesh_trains_the_adapters_of_one_process(compare, base_of, mesh, family, overrides):
    one = compare(mesh, family, *overrides)
    stored = load_file(base_of(family) / "model.safetensors")
    moved = [name for name, weight in one.weights.items() if is_adapter(name) and name.endswith("B") and weight.any()]
    assert len(moved) == sum(is_adapter(name) and name.endswith("B") for name in one.weights) > 0
    assert one.losses[-1] < one.losses[0] - 0.02, f"nothing was learned: {one.losses}"
    for name in stored.keys() & one.weights.keys():
        assert torch.equal(one.weights[name], stored[name]), f"{name}: the base model moved"


@pytest.mark.parametrize(("mesh", "family"), [("EP2xFSDP2", "qwen3_moe"), ("FSDP4", "qwen3")])
def test_transformers_own_class_trains_the_same_adapters(warm_run, overrides_of, meshes, reference_runs, mesh, family):
    """As the native decoder does in one process: another implementation of the model."""
    if family not in reference_runs:
        reference_runs[family] = warm_run(Degrees(), *overrides_of(family, STRONG), steps=STEPS)[0]
    one, degrees = reference_runs[family], meshes[mesh]
    local = f"--training.local_batch_size={8 // degrees.dp // 2}"
    overrides = overrides_of(family, STRONG, local, "--model.implementation=transformers")
    many = warm_run(degrees, *overrides, steps=STEPS)[0]
    assert many.losses == pytest.approx(one.losses, rel=RELATIVE_TOLERANCE)
    assert many.grad_norms == pytest.approx(one.grad_norms, rel=RELATIVE_TOLERANCE)
    adapters = {name for name in one.weights if is_adapter(name)}
    assert adapters == {name for name in many.weights if is_adapter(name)}
    for name in adapters:
        assert many.digests[name] == one.digests[name], name
        torch.testing.assert_close(many.weights[name], one.weights[name], rtol=0, atol=WEIGHT_TOLERANCE)


def test_optimizer_memory_is_adapters_only(run_ranks, checked, overrides_of, meshes):
    job = checked(meshes["TP2xEP2"], *overrides_of("qwen3_moe"))

    def rank_main() -> None:
        trainer = assemble(job)
        trainer.stepper.train_step(trainer.loader.micro_batches(0))
        adapters = {id(p) for name, p in trainer.model.named_parameters() if is_adapter(name)}
        assert {id(p) for p in trainer.stepper.optimizer.state} == adapters
        for name, param in trainer.model.named_parameters():
            assert param.requires_grad == is_adapter(name), name
        elements = sum(s["exp_avg"].to_local().numel() for s in trainer.stepper.optimizer.state.values())
        assert elements == sum(p.to_local().numel() for p in trainer.model.parameters() if id(p) in adapters)

    run_ranks(4, rank_main)


def test_bfloat16_base_under_fsdp(run_ranks, checked, overrides_of, meshes):
    """Frozen weights in two bytes, adapters and their gradients in four, in one FSDP unit."""
    job = checked(meshes["TP2xEP2"], *overrides_of("qwen3_moe", "--lora.base_dtype=bfloat16"))

    def rank_main() -> None:
        trainer = assemble(job)
        first = trainer.stepper.train_step(trainer.loader.micro_batches(0)).loss.item()
        for step in (0, 0, 0):
            last = trainer.stepper.train_step(trainer.loader.micro_batches(step)).loss.item()
        assert last < first
        for name, param in trainer.model.named_parameters():
            assert param.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name

    run_ranks(4, rank_main)


def test_dropout_is_the_same_when_layers_are_recomputed(warm_run, overrides_of):
    overrides = overrides_of("qwen3_moe", "--lora.dropout=0.3")
    plain = warm_run(Degrees(), *overrides, steps=3)[0]
    for mode in ("full", "selective"):
        recomputed = warm_run(Degrees(), *overrides, f"--activation_checkpoint.mode={mode}", steps=3)[0]
        assert recomputed.losses == plain.losses and recomputed.grad_norms == plain.grad_norms, mode
    without = warm_run(Degrees(), *overrides_of("qwen3_moe"), steps=3)[0]
    assert without.losses[1:] != plain.losses[1:], "nothing was dropped"


@pytest.fixture
def train(run_warm, checked) -> Callable[..., None]:

    def run(degrees: Degrees, folder: Path, *overrides: str) -> None:
        job: Checked = checked(degrees, f"--job.dump_folder={folder}", *overrides)
        run_warm(degrees.world_size, train_to_the_end, job)

    return run


def test_resume(train, overrides_of, meshes, tmp_path):
    """A step holds the adapters only; resumed on the same mesh bit for bit, on another one to rounding."""
    overrides = overrides_of(
        "qwen3_moe",
        "--training.steps=2",
        "--checkpoint.interval=1",
        "--lora.dropout=0.1",
        "--lora.targets=o_proj, experts",
    )
    whole = tmp_path / "whole"
    train(meshes["TP2xEP2"], whole, *overrides)
    step = whole / "checkpoint/step-2"
    assert {path.name for path in step.iterdir() if path.suffix == ".safetensors"} == {"adapter_model.safetensors"}
    config = json.loads((step / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and config["target_modules"] == ["o_proj"]
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert Path(config["base_model_name_or_path"]).joinpath("model.safetensors").exists()

    def resumed(mesh: str) -> Path:
        folder = tmp_path / mesh
        shutil.copytree(whole / "checkpoint/step-1", folder / "checkpoint/step-1")
        train(meshes[mesh], folder, *overrides)
        return folder

    same = resumed("TP2xEP2")
    for name in ("adapter_model.safetensors", "titanlite/optimizer.safetensors"):
        assert file_digest(step / name) == file_digest(same / "checkpoint/step-2" / name), name
    adapters = "adapter_model.safetensors"
    assert file_digest(step / adapters) != file_digest(whole / "checkpoint/step-1" / adapters)


def test_resume_on_another_mesh_and_without_adapters(train, run_ranks, checked, overrides_of, meshes, tmp_path):
    overrides = overrides_of("qwen3_moe", "--training.steps=2", "--checkpoint.interval=1")
    whole, folder = tmp_path / "whole", tmp_path / "other"
    train(meshes["FSDP4"], whole, *overrides)
    shutil.copytree(whole / "checkpoint/step-1", folder / "checkpoint/step-1")
    train(meshes["TP2xEP2"], folder, *overrides)
    expected = load_file(whole / "checkpoint/step-2/adapter_model.safetensors")
    found = load_file(folder / "checkpoint/step-2/adapter_model.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=WEIGHT_TOLERANCE)

    plain = checked(meshes["FSDP4"], f"--job.dump_folder={whole}", *overrides, "--lora.rank=0", "--lora.alpha=16")

    def rank_main() -> str:
        with pytest.raises(ConfigError) as error:
            assemble(plain)
        return str(error.value)

    assert all("holds another run, at step 2: lora.rank 4 -> 0" in text for text in run_ranks(4, rank_main))


def test_adapters_belong_to_the_model_that_they_were_trained_on(train, overrides_of, tmp_path):
    """What a run overrides is in no file of peft's: resuming with another is refused, merging writes the run's."""
    overrides = overrides_of("qwen3", "--training.steps=2", "--checkpoint.interval=1")
    train(Degrees(), tmp_path / "run", *overrides, "--model.overrides.rope_theta=777")
    step = tmp_path / "run/checkpoint/step-2"
    shutil.copytree(step.with_name("step-1"), tmp_path / "resumed/checkpoint/step-1")
    with pytest.raises(AssertionError, match=r"whose model is another one: rope_theta is .*, there 777"):
        train(Degrees(), tmp_path / "resumed", *overrides)
    train(Degrees(), tmp_path / "resumed", *overrides, "--model.overrides.rope_theta=777")
    export_merged(step, tmp_path / "merged", torch.float32)
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 777


def test_a_merged_model_has_a_card_of_its_own(train, base_of, overrides_of, tmp_path):
    """Not that of its base, which has other data, steps and losses, but its license; the training is that of the
    adapters."""
    folder = shutil.copytree(base_of("qwen3"), tmp_path / "base")
    header = "license: apache-2.0\ndatasets:\n- other/data\nbase_model: other/model"
    (folder / "README.md").write_text(f"---\n{header}\n---\n# Card\n\nloss of the base 9.87\n")
    overrides = overrides_of("qwen3", f"--checkpoint.initial_load_path={folder}", "--training.steps=2")
    train(Degrees(), tmp_path / "run", *overrides)
    step = tmp_path / "run/checkpoint/step-2"
    export_merged(step, tmp_path / "merged", torch.bfloat16)
    card = ModelCard.load(tmp_path / "merged/README.md")
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert card.data.datasets is None and card.data.base_model is None and card.data.tags == ["titanlite"]
    text = (tmp_path / "merged/README.md").read_text()
    assert "A `qwen3` model in bfloat16: LoRA adapters of rank 4 (factor 2) merged into `base` by titanlite." in text
    assert "9.87" not in text and "other/" not in text
    run = (step / "README.md").read_text()
    assert text.endswith(run[run.index("\n## Data") :]) and "After 2 of 2 steps." in text and "rank = 4" in text

    (step / "titanlite/manifest.json").unlink()  # adapters of another tool
    (step / "README.md").write_text("---\nlibrary_name: peft\ndatasets:\n- a/b\n---\n# Model Card\n\n## Data\n")
    export_merged(step, tmp_path / "foreign", torch.bfloat16)
    text = (tmp_path / "foreign/README.md").read_text()
    assert "LoRA adapters of rank 4" in text and "peft" not in text and "a/b" not in text and "## Data" not in text
    (step / "README.md").unlink()
    export_merged(step, tmp_path / "bare", torch.bfloat16)
    assert (tmp_path / "bare/README.md").read_text() == text


def test_a_run_begins_with_trained_adapters(train, run_ranks, checked, overrides_of, tmp_path):
    """Those of another run, or of peft; what does not fit is said, and a resumed run takes its own."""
    overrides = overrides_of("qwen3_moe", "--training.steps=2", "--checkpoint.interval=1", "--lora.targets=experts")
    train(Degrees(), tmp_path / "first", *overrides)
    start = tmp_path / "first/checkpoint/step-2"
    begin = [*overrides, f"--lora.init_from={start}"]
    train(Degrees(), tmp_path / "second", *begin)
    first, second = (load_file(tmp_path / run / "checkpoint/step-2" / ADAPTER_FILE) for run in ("first", "second"))
    assert all(not torch.equal(first[name], second[name]) for name in first)
    shutil.copytree(tmp_path / "second/checkpoint/step-1", tmp_path / "resumed/checkpoint/step-1")
    train(Degrees(), tmp_path / "resumed", *begin)
    resumed = load_file(tmp_path / "resumed/checkpoint/step-2" / ADAPTER_FILE)
    assert all(torch.equal(second[name], resumed[name]) for name in second)

    def rank_main() -> list[str]:
        trainer = build(begin)
        placed = {
            f"{name.removesuffix('.weight')}": p for name, p in trainer.model.named_parameters() if is_adapter(name)
        }
        found = whole(placed["model.layers.0.mlp.experts.down_lora_A"]).flatten(0, 1)
        assert torch.equal(found, first["base_model.model.model.layers.0.mlp.experts.lora_A.weight"])
        said = []
        for changed in (
            ["--lora.rank=8"],
            ["--lora.alpha=3"],
            ["--lora.targets=q_proj"],
            ["--lora.init_from=/nowhere"],
        ):
            with pytest.raises((CheckpointError, PlanError)) as error:
                build([*begin, *changed])
            said.append(str(error.value))
        return said

    def build(options: list[str]) -> Trainer:
        job = checked(Degrees(), f"--job.dump_folder={tmp_path / 'none'}", *options)
        return assemble(job)

    ((rank, alpha, targets, nowhere),) = run_ranks(1, rank_main)
    assert f"lora.init_from: the adapters in {start} have rank 4, but lora.rank is 8. Set it to 4" in rank
    assert "scaled by 2, but lora.alpha = 3" in alpha and "or leave lora.init_from out" in alpha
    assert "q_proj.lora_A: missing" in targets and "experts.lora_A.weight: unexpected" in targets
    assert "lora.init_from: checkpoint /nowhere: has no adapter_model.safetensors" in nowhere
