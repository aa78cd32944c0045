"""MXFP4 folders: the native decoder reads the values that transformers dequantizes; under adapters
they stay quantized.
"""

import pytest
import torch
import torch.nn.functional as F
from quantized_folder import write_mxfp4
from safetensors.torch import load_file, save_file
from tiny_transformers import save_tiny

from tests.loading import hf_checkpoint
from titanlite.base.errors import PlanError, VerifyError
from titanlite.checkpoint import reader as reader_module
from titanlite.config.schema import LoRASection
from titanlite.features.lora.block_formats import MXFP4, decode_blocks, encode_weights
from titanlite.features.lora.layers import apply_lora
from titanlite.materialize import ReadRequest, Region, build_plan, materialize
from titanlite.materialize.layout import encoding_of
from titanlite.models.decoder import build_decoder
from titanlite.models.families import model_config_from_hf

DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def folder(tmp_path):
    save_tiny("gpt_oss", tmp_path / "gpt_oss")
    write_mxfp4(tmp_path / "gpt_oss")
    return tmp_path / "gpt_oss"


def build(folder, form=None):
    config = model_config_from_hf(folder)
    model = build_decoder(config)
    if form is not None:
        apply_lora(model, LoRASection(rank=2), torch.float32)
        encode_weights(model, form)
    return model, hf_checkpoint(folder, config)


def dequantized(folder):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )


def test_values_and_logits_are_those_of_transformers(folder, monkeypatch):
    theirs = dequantized(folder)
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


def test_steps_are_those_of_transformers(tmp_path):
    save_tiny("gpt_oss", tmp_path)
    write_mxfp4(tmp_path, (119, 123))
    theirs = dequantized(tmp_path)
    model, source = build(tmp_path)
    materialize(model, "cpu", [source])
    tokens = torch.arange(22).view(2, 11)
    labels = tokens.roll(-1, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, theirs)]
    losses = []
    for _ in range(3):
        logits = theirs(tokens, use_cache=False).logits
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = model(tokens, labels).cross_entropy / labels.numel()
        assert abs(loss - expected) <= 1e-5 * expected
        losses.append(expected.item())
        for one, optimizer in zip((loss, expected), optimizers, strict=True):
            one.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[2] < losses[0] * 0.99, "nothing was learned"


def test_a_region_takes_its_own_blocks(folder):
    model, source = build(folder)
    materialize(model, "cpu", [source])
    whole = dict(model.named_parameters())[DOWN].detach()
    for region in (
        Region((2, 0, 0), (1, 64, 64)),
        Region((1, 3, 32), (2, 20, 32)),
        Region((3, 17, 5), (1, 20, 30)),  # blocks cut
    ):
        part = torch.full(region.lengths, float("nan"))
        source.reader.read([ReadRequest(DOWN, region, part)])
        assert torch.equal(part, whole[region.slices]), region


def test_blocks_are_kept_bit_for_bit_under_adapters(folder, monkeypatch):
    monkeypatch.setattr(reader_module, "JOB_BYTES", 4096)
    plain, source = build(folder)
    materialize(plain, "cpu", [source])
    model, source = build(folder, "mxfp4")
    materialize(model, "cpu", [source])
    kept = dict(model.named_parameters())
    for name, param in plain.named_parameters():
        encoding = encoding_of(kept[name])
        assert (encoding is not None) == (param.dim() == 3), name
        values = kept[name]
        if encoding is not None:
            values = decode_blocks(values, MXFP4, param.shape[-1], torch.float32)
        assert torch.equal(values, param), name
    tokens = torch.arange(22).view(2, 11)
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("down_proj_scales", lambda x: x.fill_(255), r"layers\.0\.mlp\.experts\.down_proj: not"),
        ("down_proj_scales", lambda x: x[:, :-1].contiguous(), r"does not fit \(4, 64, 64\) in"),
        ("down_proj_scales", lambda x: None, r"layers\.0\.mlp\.experts\.down_proj: missing"),
    ],
)
def test_what_is_damaged_is_refused(folder, name, edit, message):
    stored = load_file(folder / "model.safetensors")
    key = f"model.layers.0.mlp.experts.{name}"
    changed = edit(stored.pop(key))
    stored |= {} if changed is None else {key: changed}
    save_file(stored, folder / "model.safetensors")
    with pytest.raises((PlanError, VerifyError), match=message):
        model, source = build(folder)
        build_plan(model, [source])
        materialize(model, "cpu", [source])
