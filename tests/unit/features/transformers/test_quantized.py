"""FP8 and MXFP4 folders are read as transformers dequantizes them, each region by its own bytes."""

import json

import pytest
import torch
from files import read_json
from quantized_folder import read_region, write_fp8, write_mxfp4
from tensors import changed
from tiny_transformers import ALL_MODELS, mapping_of, save_tiny, store_as

from titanlite.base.errors import ConfigError
from titanlite.checkpoint.hf_model import weights_of
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import Region, materialize
from titanlite.models.families.config_json import transformers_config

BLOCK = (8, 16)


def build(folder, dtype=torch.bfloat16):
    hf = read_json(folder / "config.json")
    return build_transformers(transformers_config(hf, "config.json"), dtype)


def load(folder, dtype=torch.bfloat16):
    model = build(folder, dtype)
    source = weights_of(folder, model)
    return model, materialize(model, "cpu", [source]), source


def save(name, folder):
    save_tiny(name, folder)
    return folder


def assert_as_transformers(folder, config):
    model, plan, _ = load(folder)
    theirs = type(model.transformers_model).from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config
    )
    expected = theirs.state_dict()
    for entry in plan.entries:
        if entry.info.persistent:
            name = next(name for name in entry.names if name in expected)
            assert torch.equal(entry.tensor, expected[name].to(entry.tensor.dtype)), name


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("mixtral", None),  # experts fused from one matrix each
        ("qwen2_5_vl", BLOCK),
    ],
)
def test_fp8_is_read_as_transformers_dequantizes_it(tmp_path, name, block):
    from transformers import FineGrainedFP8Config

    folder = save(name, tmp_path / name)
    write_fp8(folder, block)
    config = FineGrainedFP8Config(weight_block_size=block, dequantize=True)  # type: ignore[arg-type]
    assert_as_transformers(folder, config)


def test_mxfp4_is_read_as_transformers_dequantizes_it(tmp_path):
    from transformers import Mxfp4Config

    folder = save("gpt_oss", tmp_path / "gpt_oss")
    write_mxfp4(folder)
    assert_as_transformers(folder, Mxfp4Config(dequantize=True))


@pytest.mark.parametrize(
    ("block", "suffix", "edit"),
    [
        ((7, 24), "_scale", lambda scale: scale.bfloat16()),  # edges cut blocks
        ((1, 16), "_scale_inv", lambda scale: (scale.log2() + 127).to(torch.uint8)),  # exponents
        (BLOCK, "_scale_inv", lambda scale: scale.to(torch.float8_e8m0fnu)),
    ],
)
def test_other_forms_of_factors(
    tmp_path,
    block,
    suffix,
    edit,
):
    """Also experts that are fused in the file, and factors of activations, which nothing here
    needs.
    """
    folder = save("gpt_oss", tmp_path / "gpt_oss")
    expected = write_fp8(folder, block, suffix, edit)
    if suffix == "_scale":
        with changed(folder / "model.safetensors") as stored:
            stored["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(())
        expected = {k: v for k, v in expected.items() if stored[k].dtype != torch.float8_e4m3fn}
    model, _, source = load(folder, torch.float32)
    state = model.transformers_model.state_dict()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
    if suffix != "_scale":
        name = "model.layers.1.mlp.experts.down_proj"
        for region in (Region((2, 0, 0), (1, 64, 64)), Region((0, 5, 15), (4, 4, 18))):
            assert torch.equal(
                read_region(source.reader, name, region), expected[name][region.slices]
            )


@pytest.mark.parametrize(
    ("kind", "block"),
    [("fused", BLOCK), ("side_by_side", BLOCK), ("transposed", (16, 16))],
)
def test_fp8_is_cut_and_converted(tmp_path, kind, block):
    folder = save("llama", tmp_path / "llama")
    expected = write_fp8(folder, block)
    with changed(folder / "model.safetensors") as stored:
        store_as(kind, stored)
    model = build(folder)
    model.all_conversions = mapping_of(kind)
    materialize(model, "cpu", [weights_of(folder, model)])
    for key, value in model.transformers_model.state_dict().items():
        assert torch.equal(value, expected[key].bfloat16()), key


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            r"'modelopt' \(\{'quant_algo': 'NVFP4'\}\)",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"'fp8' \(\{'weight_block_size': \[128\]\}\)",
        ),
    ],
)
def test_other_formats_are_named_and_refused(quantization, named):
    hf = json.loads(ALL_MODELS["qwen2_5_vl"]().to_json_string())
    for table in (
        {"quantization_config": quantization},
        {"text_config": {"quantization_config": quantization}},
    ):
        with pytest.raises(
            ConfigError, match=rf"quantization_config: weights of quant_method {named} cannot"
        ):
            transformers_config({**hf, **table}, "config.json")
