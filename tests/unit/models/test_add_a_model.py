"""The example of docs/add_a_model.md is executed, and the model it describes equals transformers'
own.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from titanlite.materialize import materialize
from titanlite.models import families
from titanlite.models.decoder import build_decoder
from titanlite.models.families import part_sizes

DOC = Path(__file__).parents[3] / "docs" / "add_a_model.md"


@pytest.fixture
def documented(monkeypatch):
    found = []
    for block in re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.S):
        assert len(block.splitlines()) < 60
        scope = {}
        exec(block, scope)
        found.append(scope["FAMILY"])
    known = {**families.families(), **{family.name: family for family in found}}
    monkeypatch.setattr(families, "families", lambda: known)
    return tuple(found)


@pytest.fixture
def cwm(documented):
    return documented[0]


def assert_same_logits(ours, theirs):
    tokens = torch.arange(40).reshape(2, 20) * 3 % 128
    with torch.no_grad():
        expected = theirs(tokens).logits
        actual = ours(tokens)
    assert (actual - expected).norm() <= 1e-5 * expected.norm()  # float32, different order of sums


def test_the_documented_family_matches_transformers(cwm):
    config = replace(
        cwm.presets["32B"],
        vocab_size=128,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        sliding_window=7,
    )
    assert families.check_model_config(config) == []
    ours = build_decoder(config)
    materialize(ours, "cpu", seed=1)
    theirs = transformers.CwmForCausalLM(transformers.CwmConfig(**cwm.to_hf(config))).eval()
    theirs.load_state_dict(ours.state_dict())

    assert_same_logits(ours, theirs)


def test_the_documented_family_reads_a_config_and_refuses_a_bias(cwm):
    config = cwm.presets["32B"]
    assert cwm.from_hf({**cwm.to_hf(config), "model_type": "cwm"}, "config.json") == config
    with pytest.raises(Exception, match="mlp_bias = True is not supported"):
        cwm.from_hf({**cwm.to_hf(config), "mlp_bias": True}, "config.json")


def test_the_documented_layers_match_transformers(documented):
    family = documented[1]
    config = replace(family.presets["debug"], vocab_size=128, num_layers=4)
    ours = build_decoder(config)
    materialize(ours, "cpu", seed=1)
    assert ours.moe_layer_numbers() == [1, 3]
    values = {k: v for k, v in ours.state_dict().items() if not k.endswith("expert_bias")}
    hf_config = transformers.Qwen3MoeConfig(**family.to_hf(config))
    hf_config._experts_implementation = "eager"
    theirs = transformers.Qwen3MoeForCausalLM(hf_config).eval()
    theirs.load_state_dict(values)
    assert_same_logits(ours, theirs)
    names = {name for part in part_sizes(config) for name in part.splits}
    assert names == {"num_heads", "num_kv_heads", "intermediate_size"}
