"""Weights in blocks on one process: published ones are kept, others are encoded."""

from dataclasses import replace

import pytest
import torch
from quantized_folder import write_fp8
from safetensors.torch import save_file

from tests.loading import hf_checkpoint
from titanlite.checkpoint import reader as reader_module
from titanlite.checkpoint.hf_model import check_layout
from titanlite.checkpoint.pieces import Layout, checkpoint_pieces
from titanlite.config.schema import LoRASection
from titanlite.features.lora.block_formats import (
    BLOCK_FORMATS,
    decode_blocks,
    encode_blocks,
    encode_weights,
)
from titanlite.features.lora.layers import apply_lora
from titanlite.materialize import Init, Normal, materialize
from titanlite.materialize.layout import encoding_of
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families
from titanlite.models.interface import is_adapter

# Widths that are several blocks, one, and parts of one.
CONFIG = replace(
    families()["qwen3_moe"].presets["debug"],
    num_layers=2,
    hidden_size=160,
    moe_intermediate_size=40,
)
WIDE = {name: Init(Normal(std=0.05)) for name in ("*_proj.weight", "*.experts.*_proj")}


def build(form):
    model = build_decoder(CONFIG)
    apply_lora(model, LoRASection(rank=2), torch.float32)
    encode_weights(model, form)
    return model


def values_of(param):
    """What `param` stands for, in float32."""
    encoding = encoding_of(param)
    layout, width = BLOCK_FORMATS[encoding.name], encoding.shape[-1]
    return decode_blocks(param.detach(), layout, width, torch.float32)


def rounded(weight, form):
    layout = BLOCK_FORMATS[form]
    records = encode_blocks(weight.flatten(0, -2), layout)
    return decode_blocks(records, layout, weight.shape[-1], torch.float32).view(weight.shape)


def is_encoded(name):
    return name.startswith("model.layers") and "_proj" in name and not is_adapter(name)


def as_stored(model):
    """The parameters under Hugging Face's keys."""
    return {
        piece.key: param.detach()[piece.region.slices].reshape(piece.shape).contiguous()
        for name, param in model.named_parameters()
        for piece in checkpoint_pieces(name, tuple(param.shape), model.config, Layout())
    }


def write_folder(folder, stored):
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("form", "block", "exact"),
    [
        ("fp8", (128, 128), True),
        ("fp8", (16, 128), True),
        ("fp8", (32, 48), False),
        ("nf4", (128, 128), False),
    ],
)
def test_fp8_is_kept_if_it_can_be_and_else_encoded_again(form, block, exact, tmp_path, monkeypatch):
    plain = build_decoder(CONFIG)
    materialize(plain, "cpu", [WIDE], seed=5)
    write_folder(tmp_path / "fp8", as_stored(plain))
    stored = write_fp8(tmp_path / "fp8", block)
    monkeypatch.setattr(reader_module, "JOB_BYTES", 16384)
    dequantized, model = build_decoder(CONFIG), build(form)
    materialize(dequantized, "cpu", [hf_checkpoint(tmp_path / "fp8", CONFIG)])
    materialize(model, "cpu", [hf_checkpoint(tmp_path / "fp8", CONFIG)])
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(dict(dequantized.named_parameters())[name], stored[name])
    expected = {name: param.detach() for name, param in dequantized.named_parameters()}
    for name, param in model.named_parameters():
        if is_encoded(name):
            wanted = expected[name] if exact else rounded(expected[name], form)
            assert torch.equal(values_of(param), wanted), name


def test_a_model_in_few_bits_is_not_saved_as_if_it_were_plain():
    model = build("nf4")
    plan = materialize(model, "cpu", seed=5)
    (problem,) = check_layout(plan)
    assert "q_proj.weight (nf4) and 11 other tensors are quantized" in problem
