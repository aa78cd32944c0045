"""MXFP4 folders: the native decoder reads the values that transformers dequantizes."""

import pytest
import torch
from quantized_folder import read_region, write_mxfp4
from tensors import changed
from tiny_transformers import save_tiny

from tests.loading import hf_checkpoint
from titanlite.base.errors import PlanError, VerifyError
from titanlite.checkpoint import reader as reader_module
from titanlite.materialize import Region, build_plan, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import model_config_from_hf

DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def folder(tmp_path):
    save_tiny("gpt_oss", tmp_path / "gpt_oss")
    write_mxfp4(tmp_path / "gpt_oss")
    return tmp_path / "gpt_oss"


def build(folder):
    config = model_config_from_hf(folder)
    return build_decoder(config), hf_checkpoint(folder, config)


def test_values_and_logits_are_those_of_transformers(folder, monkeypatch):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    theirs.float()  # transformers 5.17 leaves the experts in bfloat16
    monkeypatch.setattr(reader_module, "JOB_BYTES", 4096)  # a few rows per job
    model, source = build(folder)
    materialize(model, "cpu", [source])
    expected = theirs.state_dict()
    for name, param in model.named_parameters():
        value = param.mT if param.dim() == 3 else param
        assert torch.equal(value, expected[name.replace("mlp.gate.", "mlp.router.")]), name
    tokens = torch.arange(22).view(2, 11)
    logits = theirs(tokens, use_cache=False).logits
    assert (model(tokens) - logits).norm() <= 1e-5 * logits.norm()


def test_a_region_takes_its_own_blocks(folder):
    model, source = build(folder)
    materialize(model, "cpu", [source])
    whole = dict(model.named_parameters())[DOWN].detach()
    for region in (
        Region((2, 0, 0), (1, 64, 64)),
        Region((1, 3, 32), (2, 20, 32)),
        Region((3, 17, 5), (1, 20, 30)),  # blocks cut
    ):
        assert torch.equal(read_region(source.reader, DOWN, region), whole[region.slices]), region


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("down_proj_scales", lambda x: x.fill_(255), r"layers\.0\.mlp\.experts\.down_proj: not"),
        ("down_proj_scales", lambda x: x[:, :-1].contiguous(), r"does not fit \(4, 64, 64\) in"),
        ("down_proj_scales", lambda x: None, r"layers\.0\.mlp\.experts\.down_proj: missing"),
    ],
)
def test_what_is_damaged_is_refused(folder, name, edit, message):
    key = f"model.layers.0.mlp.experts.{name}"
    with changed(folder / "model.safetensors") as stored:
        edited = edit(stored.pop(key))
        stored |= {} if edited is None else {key: edited}
    with pytest.raises((PlanError, VerifyError), match=message):
        model, source = build(folder)
        build_plan(model, [source])
        materialize(model, "cpu", [source])
