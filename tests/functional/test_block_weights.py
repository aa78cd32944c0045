"""Frozen quantized weights on real trainers: every mesh has the same bits, and takes the same steps
as plain weights.
"""

import shutil

import pytest
import torch
from quantized_folder import write_fp8, write_mxfp4
from safetensors.torch import load_file, save_file

from tests.functional.conftest import (
    NO_PRESET,
    RELATIVE_TOLERANCE,
    assert_same_run,
    take_step,
    weekly,
)
from tests.functional.test_lora import tolerance_of
from titanlite.assemble import assemble
from titanlite.base.errors import VerifyError
from titanlite.config.parallelism import Degrees
from titanlite.features.lora.block_formats import BLOCK_FORMATS, decode_blocks, encode_blocks
from titanlite.materialize.layout import encoding_of, num_values
from titanlite.models.interface import is_adapter

STEPS = 2
SIZES = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 8,
}
FEW_EXPERTS = SIZES | {"num_experts": 2, "top_k": 1}
LATENT = {
    **SIZES,
    "num_layers": 3,
    "head_dim": 32,
    "kv_lora_rank": 96,  # no multiple of a block
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
DELTA = {
    **SIZES,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 128,
}
MODELS = {
    "qwen3_moe": ("qwen3_moe", SIZES),
    "few_experts": ("qwen3_moe", FEW_EXPERTS),
    "qwen3": ("qwen3", {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "qwen3_next": ("qwen3_next", DELTA),
    "gpt_oss": ("gpt_oss", {k: v for k, v in SIZES.items() if k != "intermediate_size"}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {name: size for name, size in DELTA.items() if name != "intermediate_size"},
    ),
}
SELECTIVE = "--activation_checkpoint.mode=selective"
FULL = "--activation_checkpoint.mode=full"
TWO = "--training.local_batch_size=2"


@pytest.fixture
def base_of(pretrained):
    """`base_of(model_name)`: a pretrained model."""

    def get(model_name):
        family, sizes = MODELS[model_name]
        overrides = [f"--model.overrides.{name}={size}" for name, size in sizes.items()]
        return pretrained(model_name, 0.06, f"--model.name={family}", *overrides)

    return get


def settings(folder, model_name, form, *overrides):
    lora = [
        "--lora.rank=4",
        "--lora.alpha=8",
        "--moe.expert_bias_update_rate=none",
        f"--lora.base_dtype={form}",
    ]
    model = f"--model.name={MODELS[model_name][0]}"
    batch = "--training.local_batch_size=8"  # one micro-batch on one rank
    return [*NO_PRESET, model, *lora, batch, f"--checkpoint.initial_load_path={folder}", *overrides]


@pytest.fixture
def run_alone(warm_run, base_of, once):
    """The run of one process."""

    def run(model_name, form, *overrides):
        given = settings(base_of(model_name), model_name, form, *overrides)
        return once(tuple(given), lambda: warm_run(Degrees(), *given, steps=STEPS)[0])

    return run


@pytest.mark.parametrize(
    ("mesh", "model_name", "form", "overrides"),
    [
        ("FSDP2", "qwen3_moe", "fp8", [SELECTIVE]),
        ("TP2xEP2", "qwen3_moe", "nf4", [FULL]),
        weekly("TP2xEP4", "qwen3_moe", "fp8", []),
        ("TP2xFSDP2", "few_experts", "nf4", []),  # experts split along dim 1
        weekly("DDP4", "qwen3", "fp8", []),
        weekly("CP2xTP2", "qwen3_moe", "nf4", []),
        weekly("PP2xTP2xEP2", "qwen3_moe", "fp8", []),
        ("PP2", "deepseek_v3", "nf4", ["--parallelism.fsdp_once_per_step=true"]),
        weekly("TP2xEP2", "qwen3_next", "nf4", []),
        weekly("EP2xFSDP2", "qwen3_next", "fp8", [FULL]),
        # frozen experts without adapters
        ("TP2xEP2 only", "qwen3_5_moe", "nf4", ["--lora.targets=q_proj, v_proj"]),
        weekly("TP2xEP2", "qwen3_moe", "nf4", ["--lora.targets=gate_up_proj", SELECTIVE]),
    ],
)
def test_mesh_trains_as_one_process_does(
    warm_run, run_alone, base_of, meshes, mesh, model_name, form, overrides
):
    targets = [option for option in overrides if option.startswith("--lora.targets")]
    one = run_alone(model_name, form, *targets)
    degrees = meshes[mesh]
    local = f"--training.local_batch_size={max(8 // degrees.dp // 2, 1)}"
    given = settings(base_of(model_name), model_name, form, local, *overrides)
    ranks = warm_run(degrees, *given, steps=STEPS)
    assert_same_run(one, ranks, tolerance_of, equal_nan=True)
    adapters = [name for name in one.weights if name.endswith("lora_B")]
    assert adapters and all(one.weights[name].any() for name in adapters), "nothing was learned"


def rounded_to(form, weight):
    layout = BLOCK_FORMATS[form]
    return decode_blocks(encode_blocks(weight, layout), layout, weight.shape[-1], torch.float32)


@pytest.mark.parametrize(
    ("model_name", "form"),
    [("qwen3_moe", "fp8"), weekly("deepseek_v3", "nf4")],
)
def test_training_is_that_of_the_rounded_weights(
    warm_run, run_alone, base_of, tmp_path, model_name, form
):
    """Training uses exactly the rounded weights, and all of them: a model with these weights,
    written in float32, takes the same steps.
    """
    folder = tmp_path / "rounded"
    shutil.copytree(base_of(model_name), folder)
    stored = load_file(folder / "model.safetensors")
    matrices = [
        name for name in stored if name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))
    ]
    assert len(matrices) > 40
    for name in matrices:
        stored[name] = rounded_to(form, stored[name])
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (plain,) = warm_run(Degrees(), *settings(folder, model_name, "float32"), steps=STEPS)
    in_blocks = run_alone(model_name, form)
    assert in_blocks.losses == pytest.approx(plain.losses, rel=1e-6)
    assert in_blocks.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6)
    unrounded = run_alone(model_name, "float32")
    assert in_blocks.losses != pytest.approx(unrounded.losses, rel=1e-4), "nothing was rounded"


DOWN = "model.layers.1.mlp.experts.down_proj"
PUBLISHED = {
    "fp8": (
        "qwen3_moe",
        "FSDP2",
        lambda folder: write_fp8(folder, (128, 128)),
        [DOWN, "model.layers.0.self_attn.q_proj.weight"],
    ),
    "mxfp4": ("gpt_oss", "TP2xEP2 only", lambda folder: write_mxfp4(folder, (119, 123)), [DOWN]),
}


@pytest.mark.parametrize("form", PUBLISHED)
def test_published_blocks_are_kept_as_they_are(warm_run, base_of, meshes, tmp_path, form):
    """Each rank reads its own blocks, and trains on the values that they encode. Nothing is rounded
    a second time, even if shards cut the blocks of 128 rows.
    """
    model_name, mesh, write, names = PUBLISHED[form]
    folder = tmp_path / form
    shutil.copytree(base_of(model_name), folder)
    write(folder)
    (dequantized,) = warm_run(Degrees(), *settings(folder, model_name, "float32"), steps=STEPS)
    given = settings(folder, model_name, form, TWO)
    kept = warm_run(meshes[mesh], *given, steps=STEPS)[0]
    assert kept.losses == pytest.approx(dequantized.losses, rel=RELATIVE_TOLERANCE)
    for name in names:
        plain = dequantized.weights[name]
        layout, width = BLOCK_FORMATS[form], plain.shape[-1]
        found = decode_blocks(kept.weights[name], layout, width, torch.float32)
        assert torch.equal(found, plain), name


def test_bfloat16_matmuls_and_memory(run_ranks, checked, base_of):
    """Packed blocks, which parameters hold as bfloat16 elements, are gathered unchanged and have
    the expected size.
    """
    given = settings(
        base_of("qwen3_moe"), "qwen3_moe", "nf4", TWO, "--training.mixed_precision_param=bfloat16"
    )
    job = checked(Degrees(dp_shard=2, ep=2), *given)

    def rank_main():
        trainer = assemble(job)
        first = take_step(trainer, 0).loss.item()
        assert take_step(trainer, 0).loss.item() < first
        encoded = [param for param in trainer.model.parameters() if encoding_of(param) is not None]
        assert len(encoded) == 2 * (4 + 2)
        for param in encoded:
            assert param.dtype == torch.bfloat16
            assert param.numel() * 2 * 8 == num_values(param) * 4.5
        for name, param in trainer.model.named_parameters():
            assert param.requires_grad == is_adapter(name), name

    run_ranks(2, rank_main)


def test_what_is_not_finite_in_the_model_is_found_when_it_is_loaded(
    run_ranks, checked, base_of, tmp_path
):
    folder = base_of("qwen3_moe")
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    stored = load_file(broken / "model.safetensors")
    stored["model.layers.1.mlp.experts.3.up_proj.weight"][7, 70] = float("inf")
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    job = checked(Degrees(dp_shard=2, ep=2), *settings(broken, "qwen3_moe", "nf4", TWO))

    def rank_main():
        with pytest.raises(VerifyError) as error:
            assemble(job)
        return str(error.value)

    for text in run_ranks(2, rank_main):
        assert (
            "model.layers.1.mlp.experts.gate_up_proj: not filled, NaN or infinite, in 1 of its "
            "blocks (nf4)" in text
        )
