"""Gated delta net in a decoder: first values, and norms in bfloat16."""

import math

import pytest
import torch

from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder


def test_first_values_are_those_of_transformers(tiny):
    config = tiny.config("qwen3_next", linear_num_value_heads=256)
    model = build_decoder(config, torch.bfloat16)
    materialize(model, "cpu", seed=1)
    layer = model.get_submodule("model.layers.0.linear_attn")
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert layer.out_proj.weight.dtype == torch.bfloat16
    decay = layer.A_log.detach().exp()
    assert 0.01 <= decay.min() < 1 and 15 < decay.max() <= 16
    assert decay.mean() == pytest.approx(8, abs=1)
    assert (layer.dt_bias == 1).all() and (layer.norm.weight == 1).all()
    assert layer.conv1d.weight.detach().float().std() == pytest.approx(0.02, rel=0.1)
    for name in ("input_layernorm", "post_attention_layernorm"):
        assert not model.get_submodule(f"model.layers.0.{name}").weight.any()
    assert not model.model.norm.weight.any()


def test_a_zero_centred_norm_keeps_what_bfloat16_has_no_place_for(tiny):
    model = build_decoder(tiny.config("qwen3_next"), torch.bfloat16)
    materialize(model, "cpu", seed=1)
    norm = model.model.norm
    x = torch.full((1, norm.weight.numel()), 64.0, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(0.00390625)  # half of the step after 1
        assert norm(x).float().mean() == pytest.approx(1 / math.sqrt(1 + norm.eps / 4096), rel=0.01)
        norm.weight.fill_(0.005)
        assert norm(x).float().mean() > 1
