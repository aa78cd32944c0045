"""LoRA through real trainers: every mesh trains the same adapters, resuming is exact, and the base
model never changes.
"""

import shutil
from pathlib import Path

import pytest
import torch
from files import file_digest, read_json
from quantized_folder import write_mxfp4
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.functional.conftest import (
    NO_PRESET,
    RELATIVE_TOLERANCE,
    assert_same_run,
    take_step,
    weekly,
)
from tests.saving import whole
from titanlite.assemble import assemble
from titanlite.checkpoint.folder import ADAPTER_FILE
from titanlite.config.parallelism import Degrees
from titanlite.features.tools.export import export_merged
from titanlite.models.interface import is_adapter

STEPS = 3
WEIGHT_TOLERANCE = 1.25e-5
STRONG = "--lora.alpha=32"  # so that a few steps learn something
LORA = [
    "--lora.rank=4",
    "--lora.alpha=8",
    "--moe.expert_bias_update_rate=none",
    "--training.local_batch_size=4",
]
FAMILIES = {
    "qwen3_moe": [],
    "qwen3": ["--model.name=qwen3"],
    "dots1": ["--model.name=dots1"],
    "gpt_oss": ["--model.name=gpt_oss"],
    "few_experts": ["--model.overrides.num_experts=2", "--model.overrides.top_k=1"],
}
FULL_AC = "--activation_checkpoint.mode=full"


def tolerance_of(name):
    return WEIGHT_TOLERANCE if is_adapter(name) else 0.0


@pytest.fixture
def base_of(pretrained):
    """`base_of(family)`: a pretrained model, wide enough that experts differ and the loss has
    something to unlearn.
    """
    return lambda family: pretrained(family, 0.1, *FAMILIES[family])


@pytest.fixture
def overrides_of(base_of):
    def get(family, *overrides):
        return [*NO_PRESET, *LORA, f"--checkpoint.initial_load_path={base_of(family)}", *overrides]

    return get


@pytest.fixture
def reference(warm_run, overrides_of, once):
    """`reference(family)`: the run of one process."""

    def get(family):
        overrides = overrides_of(family, STRONG)
        return once(family, lambda: warm_run(Degrees(), *overrides, steps=STEPS)[0])

    return get


@pytest.mark.parametrize(
    ("mesh", "family", "overrides"),
    [
        weekly("FSDP4", "qwen3_moe", []),
        ("TP2xEP4", "qwen3_moe", ["--activation_checkpoint.mode=selective"]),
        weekly("HSDP2x2", "few_experts", []),
        weekly("TP2xFSDP2", "few_experts", []),
        weekly("TP2xFSDP2", "qwen3", [FULL_AC]),
        weekly("TP2xEP2", "dots1", []),
        ("CP2", "qwen3_moe", ["--activation_checkpoint.mode=keep_attention"]),
        weekly("PP2xTP2xEP2", "qwen3_moe", []),
        ("PP2", "dots1", [FULL_AC]),
    ],
)
def test_mesh_trains_the_adapters_of_one_process(
    reference, warm_run, overrides_of, base_of, meshes, mesh, family, overrides
):
    one, degrees = reference(family), meshes[mesh]
    local = f"--training.local_batch_size={8 // degrees.dp // 2}"
    ranks = warm_run(degrees, *overrides_of(family, STRONG, local, *overrides), steps=STEPS)
    assert_same_run(one, ranks, tolerance_of)
    stored = load_file(base_of(family) / "model.safetensors")
    adapters = [name for name in one.weights if name.endswith("lora_B")]
    assert adapters and all(one.weights[name].any() for name in adapters), "nothing was learned"
    assert one.losses[-1] < one.losses[0] - 0.02, f"nothing was learned: {one.losses}"
    for name in stored.keys() & one.weights.keys():
        assert torch.equal(one.weights[name], stored[name]), f"{name}: the base model moved"


@pytest.mark.parametrize(
    ("mesh", "family"),
    [("EP2", "qwen3_moe"), weekly("FSDP4", "qwen3")],
)
def test_transformers_own_class_trains_the_same_adapters(
    warm_run, overrides_of, meshes, reference, mesh, family
):
    """Another implementation of the model trains the adapters that the native decoder trains in one
    process.
    """
    one, degrees = reference(family), meshes[mesh]
    local = f"--training.local_batch_size={8 // degrees.dp // 2}"
    overrides = overrides_of(family, STRONG, local, "--model.implementation=transformers")
    many = warm_run(degrees, *overrides, steps=STEPS)[0]
    assert many.losses == pytest.approx(one.losses, rel=RELATIVE_TOLERANCE)
    assert many.grad_norms == pytest.approx(one.grad_norms, rel=RELATIVE_TOLERANCE)
    adapters = {name for name in one.weights if is_adapter(name)}
    assert adapters == {name for name in many.weights if is_adapter(name)}
    for name in adapters:
        assert many.digests[name] == one.digests[name], name
        torch.testing.assert_close(
            many.weights[name], one.weights[name], rtol=0, atol=WEIGHT_TOLERANCE
        )


def test_base_is_frozen_in_two_bytes_and_adapters_are_trained_in_four(
    run_ranks, checked, overrides_of
):
    """Both dtypes may be in one FSDP unit, and the optimizer has memory for adapters alone."""
    job = checked(
        Degrees(dp_shard=2, ep=2), *overrides_of("qwen3_moe", "--lora.base_dtype=bfloat16")
    )

    def rank_main():
        trainer = assemble(job)
        losses = [take_step(trainer, 0).loss.item() for _ in range(3)]
        assert losses[-1] < losses[0]
        for name, param in trainer.model.named_parameters():
            assert param.requires_grad == is_adapter(name), name
            assert param.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
        adapters = {id(p): p for name, p in trainer.model.named_parameters() if is_adapter(name)}
        states = trainer.parts.stepper.optimizer.state
        assert {id(p) for p in states} == adapters.keys()
        elements = sum(state["exp_avg"].to_local().numel() for state in states.values())
        assert elements == sum(p.to_local().numel() for p in adapters.values())

    run_ranks(2, rank_main)


def test_dropout_is_the_same_when_layers_are_recomputed(warm_run, overrides_of):
    overrides = overrides_of("qwen3_moe", "--lora.dropout=0.3")
    plain = warm_run(Degrees(), *overrides, steps=2)[0]
    for mode in ("full", "selective"):
        recomputed = warm_run(
            Degrees(), *overrides, f"--activation_checkpoint.mode={mode}", steps=2
        )[0]
        assert recomputed.losses == plain.losses and recomputed.grad_norms == plain.grad_norms, mode
    without = warm_run(Degrees(), *overrides_of("qwen3_moe"), steps=2)[0]
    assert without.losses[1:] != plain.losses[1:], "nothing was dropped"


def test_resume(train_into, overrides_of, tmp_path):
    """A checkpoint holds only the adapters, and a resume is exact."""
    degrees = Degrees(tp=2, ep=2)
    overrides = overrides_of(
        "qwen3_moe",
        "--training.steps=2",
        "--checkpoint.interval=1",
        "--lora.dropout=0.1",
        "--lora.targets=o_proj, experts",
    )
    whole = tmp_path / "whole"
    train_into(whole, degrees, *overrides)
    step = whole / "checkpoint/step-2"
    assert {path.name for path in step.iterdir() if path.suffix == ".safetensors"} == {
        "adapter_model.safetensors"
    }
    config = read_json(step / "adapter_config.json")
    assert config["r"] == 4 and config["lora_alpha"] == 8 and config["target_modules"] == ["o_proj"]
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert Path(config["base_model_name_or_path"]).joinpath("model.safetensors").exists()

    same = tmp_path / "resumed/checkpoint/step-2"
    shutil.copytree(whole / "checkpoint/step-1", same.with_name("step-1"))
    train_into(tmp_path / "resumed", degrees, *overrides)
    for name in ("adapter_model.safetensors", "titanlite/optimizer.safetensors"):
        assert file_digest(step / name) == file_digest(same / name), name
    adapters = "adapter_model.safetensors"
    assert file_digest(step / adapters) != file_digest(whole / "checkpoint/step-1" / adapters)


def test_adapters_belong_to_the_model_that_they_were_trained_on(train_into, overrides_of, tmp_path):
    """peft's files do not record a run's overrides, so a resume with other overrides is refused,
    and a merge writes the run's overrides.
    """
    overrides = overrides_of("qwen3", "--training.steps=2", "--checkpoint.interval=1")
    train_into(tmp_path / "run", Degrees(), *overrides, "--model.overrides.rope_theta=777")
    step = tmp_path / "run/checkpoint/step-2"
    shutil.copytree(step.with_name("step-1"), tmp_path / "resumed/checkpoint/step-1")
    with pytest.raises(
        AssertionError, match=r"whose model is different: rope_theta is .*, there 777"
    ):
        train_into(tmp_path / "resumed", Degrees(), *overrides)
    train_into(tmp_path / "resumed", Degrees(), *overrides, "--model.overrides.rope_theta=777")
    export_merged(step, tmp_path / "merged", torch.float32)
    config = read_json(tmp_path / "merged/config.json")
    assert config["rope_parameters"]["rope_theta"] == 777


def test_adapters_over_mxfp4_are_merged(train_into, overrides_of, base_of, meshes, tmp_path):
    """The adapters are trained on 4 ranks, each with its own blocks; transformers reads the export,
    and finds the same sums.
    """
    base = tmp_path / "base"
    shutil.copytree(base_of("gpt_oss"), base, ignore=shutil.ignore_patterns("manifest.json"))
    expected = write_mxfp4(base, (119, 123))
    kept = ["--lora.base_dtype=mxfp4", f"--checkpoint.initial_load_path={base}"]
    steps = ["--training.steps=2", "--checkpoint.interval=2", "--lora.targets=experts"]
    steps.append("--training.local_batch_size=2")
    train_into(tmp_path / "run", meshes["EP2xFSDP2"], *overrides_of("gpt_oss", *kept, *steps))
    step = tmp_path / "run/checkpoint/step-2"
    adapters = load_file(step / ADAPTER_FILE)
    export_merged(step, tmp_path / "merged", torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    found = dict(merged.named_parameters())
    prefix = "base_model.model."
    for key, weight in expected.items():  # (E, in, out)
        module, _, leaf = key.rpartition(".")
        inner = "" if leaf == "down_proj" else ".base_layer"
        a, b = (adapters[f"{prefix}{module}{inner}.lora_{leaf}.weight"] for leaf in "AB")
        a_Eri, b_orE = a.unflatten(0, (len(weight), -1)), b.unflatten(1, (-1, len(weight)))
        delta = 2 * torch.einsum("eri,ore->eio", a_Eri, b_orE)
        assert delta.abs().max() > 1e-4
        torch.testing.assert_close(found[key], weight + delta, rtol=0, atol=1e-6)


def test_a_run_begins_with_trained_adapters(train_into, run_ranks, checked, overrides_of, tmp_path):
    """The adapters are from another run or from peft. A mismatch is an error, and a resumed run
    uses its own adapters.
    """
    overrides = overrides_of(
        "qwen3_moe", "--training.steps=2", "--checkpoint.interval=1", "--lora.targets=experts"
    )
    train_into(tmp_path / "first", Degrees(), *overrides)
    start = tmp_path / "first/checkpoint/step-2"
    begin = [*overrides, f"--lora.init_from={start}"]
    train_into(tmp_path / "second", Degrees(), *begin)
    first, second = (
        load_file(tmp_path / run / "checkpoint/step-2" / ADAPTER_FILE)
        for run in ("first", "second")
    )
    assert all(not torch.equal(first[name], second[name]) for name in first)
    shutil.copytree(tmp_path / "second/checkpoint/step-1", tmp_path / "resumed/checkpoint/step-1")
    train_into(tmp_path / "resumed", Degrees(), *begin)
    resumed = load_file(tmp_path / "resumed/checkpoint/step-2" / ADAPTER_FILE)
    assert all(torch.equal(second[name], resumed[name]) for name in second)

    def rank_main():
        trainer = assemble(checked(Degrees(), f"--job.dump_folder={tmp_path / 'none'}", *begin))
        found = whole(
            dict(trainer.model.named_parameters())["model.layers.0.mlp.experts.down_lora_A"]
        ).flatten(0, 1)
        assert torch.equal(
            found, first["base_model.model.model.layers.0.mlp.experts.lora_A.weight"]
        )

    run_ranks(1, rank_main)
    with pytest.raises(
        AssertionError,
        match=r"lora\.init_from: the adapters in .* have rank 4, but lora\.rank is 8",
    ):
        train_into(tmp_path / "none", Degrees(), *begin, "--lora.rank=8")
