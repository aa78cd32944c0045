from dataclasses import replace

import pytest
import torch

from titanlite.config.schema import LoRASection, OptimizerSection
from titanlite.features.lora.layers import apply_lora
from titanlite.metrics.flops import group_parameters
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families
from titanlite.optim.optimizer import freeze_parameters


def build(family="qwen3_moe", **sizes):
    return build_decoder(replace(families()[family].presets["debug"], **sizes))


def names_by_group(model, groups):
    names = {param: name for name, param in model.named_parameters()}
    return {
        group: {names[param].removeprefix("model.layers.0.") for param in params}
        for group, params in groups.items()
    }


def test_each_trained_parameter_is_in_the_group_of_its_use():
    model = build(num_layers=1, tie_word_embeddings=False)
    found = names_by_group(model, group_parameters(model))
    assert found == {
        "embedding": {"model.embed_tokens.weight"},
        "attention": {f"self_attn.{name}_proj.weight" for name in "qkvo"},
        "norm": {
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "model.norm.weight",
        },
        "router": {"mlp.gate.weight"},
        "experts": {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
        "head": {"lm_head.weight"},
    }


def test_dense_layers_tied_weights_and_shared_experts():
    dense = build("qwen3", num_layers=1, tie_word_embeddings=True)
    found = names_by_group(dense, group_parameters(dense))
    assert found["feed_forward"] == {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert "head" not in found
    shared = build("dots1")
    groups = names_by_group(shared, group_parameters(shared))
    assert any("shared_experts" in name for name in groups["experts"]) and "feed_forward" in groups


def test_frozen_parameters_are_in_none_and_adapters_in_their_own():
    model = build(num_layers=1)
    freeze_parameters(model, OptimizerSection(freeze="*.mlp.gate.*"))
    assert "router" not in group_parameters(model)
    model = build(num_layers=1)
    apply_lora(model, LoRASection(rank=2), torch.float32)
    assert set(group_parameters(model)) == {"lora"}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_text"])
def test_groups_part_the_trained_parameters(family):
    model = build(family)
    grouped = [param for params in group_parameters(model).values() for param in params]
    assert len(grouped) == len(set(grouped)) and set(grouped) == set(model.parameters())
    assert "other" not in group_parameters(model)
