"""Families: presets against hub-style config.json files, round trips through transformers'
AutoConfig, refusals.
"""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from files import error_of, read_json, write_json
from transformers import AutoConfig

from tests.loading import hf_config
from tests.unit.models.test_config_mutations import base_of
from titanlite.base.errors import ConfigError
from titanlite.checkpoint.description import describe_model
from titanlite.config import RopeScaling
from titanlite.config.model import ModelSection
from titanlite.models.families import (
    check_model_config,
    families,
    family_of,
    model_config_from_hf,
    resolve_model_config,
)
from titanlite.models.families.config_json import NotNativeError
from titanlite.models.families.rope import rope_to_hf

PRESETS = [(family.name, flavor) for family in families().values() for flavor in family.presets]
# As published on the hub, by flavor; keys that have no bearing on the architecture included.
HUB = read_json(Path(__file__).parent / "published_configs.json")
QWEN3, LLAMA, GLM, DEEPSEEK = (
    HUB["0.6B"],
    HUB["3.1-8B"],
    HUB["4.5-Air-106B-A12B"],
    HUB["V3-671B-A37B"],
)


def from_hf(hf):
    return families()[hf["model_type"]].from_hf(hf, "config.json")


def test_hub_config_in_both_forms_equals_the_preset():
    for flavor, hf in HUB.items():
        preset = families()[hf["model_type"]].presets[flavor]
        assert from_hf(hf) == preset
        kept = {k: v for k, v in hf.items() if k != "torch_dtype"}
        # transformers writes into the tables it is given
        again = AutoConfig.for_model(**deepcopy(kept)).to_dict()
        assert "rope_parameters" in again
        assert from_hf(again) == preset


def test_presets_are_consistent_and_survive_transformers(tmp_path):
    for family, flavor in PRESETS:
        config = families()[family].presets[flavor]
        assert config.family == family == family_of(config).name
        assert check_model_config(config) == []
        hf_config(config).save_pretrained(tmp_path)
        assert (
            model_config_from_hf(tmp_path)
            == model_config_from_hf(tmp_path / "config.json")
            == config
        )
        loaded = AutoConfig.from_pretrained(tmp_path)
        assert loaded.architectures == [families()[family].architecture]
        assert type(loaded).model_type == family


UNUSUAL = [
    {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "initializer_range": 0.006,
        "rms_norm_eps": 3e-6,
        "rope_theta": 12345.0,
        "num_kv_heads": 4,
        "rope_scaling": RopeScaling("linear", factor=3.0),
    },
    {"rope_scaling": RopeScaling("yarn", 4.0, truncate=False, attention_factor=1.5, mscale=0.7)},
]


def test_unusual_values_survive_transformers(tmp_path):
    for family in families():
        for changes in UNUSUAL:
            configured = {*families()[family].keys, "rope_theta", "rope_scaling"}
            config = replace(
                families()[family].presets["debug"],
                **{key: value for key, value in changes.items() if key in configured},
            )
            hf_config(config).save_pretrained(tmp_path)
            assert model_config_from_hf(tmp_path) == config


def test_kimi_k2_is_a_deepseek_v3_under_another_name(tmp_path):
    yarn_table = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    betas = {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    published = {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50000.0,
        "rope_scaling": {**yarn_table, **betas},
        "routed_scaling_factor": 2.827,
    }
    write_json(tmp_path / "config.json", {**DEEPSEEK, **published})
    config = model_config_from_hf(tmp_path)
    assert config == families()["deepseek_v3"].presets["Kimi-K2-1T-A32B"]
    saved = json.loads(describe_model(config, {}, torch.float32, tmp_path)["config.json"])
    # transformers has a class by this name only
    assert saved["model_type"] == "deepseek_v3" and "auto_map" not in saved
    assert saved["topk_method"] == "noaux_tc" and saved["rope_parameters"]["beta_fast"] == 1.0


def test_no_multi_token_layer_is_promised_without_weights():
    assert family_of(from_hf(GLM)).to_hf(from_hf(GLM))["num_nextn_predict_layers"] == 0


def test_keys_that_may_be_left_out_or_have_another_name():
    hf = {key: value for key, value in LLAMA.items() if value not in (False, None, 0.02)}
    del hf["num_key_value_heads"]
    assert from_hf(hf) == replace(families()["llama"].presets["3.1-8B"], num_kv_heads=32)
    hf = {key: value for key, value in HUB["30B-A3B"].items() if key != "num_experts"}
    assert from_hf({**hf, "num_local_experts": 128}) == families()["qwen3_moe"].presets["30B-A3B"]
    old = from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert old.rope_scaling == RopeScaling("linear", factor=4.0)
    assert from_hf({**QWEN3, "rope_parameters": {"rope_type": "default"}}).rope_theta == 1e6, (
        "beside the table"
    )


def test_where_the_length_of_pretraining_may_stand():
    """In the table, else on its own; else it is the longest sequence, as for transformers. On its
    own, it counts.
    """
    table = {"rope_type": "yarn", "factor": 4.0}
    for hf, length in (
        ({"rope_scaling": table}, 40960),
        ({"rope_scaling": {**table, "original_max_position_embeddings": 32768}}, 32768),
        (
            {
                "rope_scaling": {"original_max_position_embeddings": 7, **table},
                "original_max_position_embeddings": 9,
            },
            9,
        ),
    ):
        found = from_hf({**QWEN3, **hf})
        assert found.rope_scaling == RopeScaling(
            "yarn", factor=4.0, original_max_position_embeddings=length
        )
        theirs = AutoConfig.for_model(**{**QWEN3, **hf})
        theirs.standardize_rope_params()
        assert theirs.rope_parameters["original_max_position_embeddings"] == length


def test_optional_values_of_a_rotary_table():
    """null means false for transformers, and a setting replaces the value of the original file."""
    table = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "truncate": None}
    found = from_hf({**QWEN3, "rope_scaling": table}).rope_scaling
    assert (found.beta_fast, found.truncate) == (16.0, False)
    default = replace(found, beta_fast=32.0)
    assert rope_to_hf(default, table)["beta_fast"] == 32.0
    assert "beta_fast" not in rope_to_hf(default, {})


REFUSED = read_json(Path(__file__).parent / "refused_configs.json")
KINDS = {
    "not native": {NotNativeError},
    "wrong": {ConfigError},
    "wrong in transformers 5.17": {NotNativeError, ConfigError},
}


def test_unusable_values_are_refused_by_name():
    """What the decoder cannot express and transformers' class may have; and what transformers
    refuses, or nothing can compute.
    """
    for row in REFUSED:
        hf = {**(HUB.get(row["base"]) or base_of(row["base"])), **row["changes"]}
        with pytest.raises(ConfigError) as error:
            from_hf({key: value for key, value in hf.items() if value != "~LEFT OUT~"})
        assert type(error.value) in KINDS[row["kind"]], row
        text = str(error.value)
        assert text.startswith("config.json: ") and row["says"] in text, (row, text)


def test_everything_that_the_decoder_lacks_is_said_at_once():
    text = error_of(
        NotNativeError,
        from_hf,
        {**QWEN3, "hidden_act": "gelu", "use_sliding_window": True, "is_causal": False},
    )
    assert text.startswith("config.json: 3 problems:")
    assert "hidden_act = 'gelu' is not supported by the native decoder, only 'silu' is." in text
    assert "use_sliding_window = True is not supported" in text and "is_causal = False" in text


def test_a_balance_loss_that_transformers_would_add_is_said(caplog):
    from_hf({**base_of("qwen3_moe"), "output_router_logits": True})
    assert "set moe.aux_loss_coeff" in caplog.text


def section(rope_scaling=None, **changes):
    result = ModelSection(name="qwen3_moe", flavor="debug")
    for name, value in (rope_scaling or {}).items():
        setattr(result.overrides.rope_scaling, name, value)
    for name, value in changes.items():
        setattr(result.overrides if hasattr(result.overrides, name) else result, name, value)
    return result


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_overrides_change_single_sizes(tmp_path):
    preset = families()["qwen3_moe"].presets["debug"]
    assert resolve_model_config(section()) == preset
    changes = {
        "num_layers": 7,
        "norm_topk_prob": False,
        "rope_theta": 5e4,
        "max_position_embeddings": 131072,
    }
    expected = replace(preset, **changes, rope_scaling=RopeScaling(**YARN))
    assert resolve_model_config(section(YARN, **changes)) == expected
    write_json(tmp_path / "config.json", LLAMA)
    preset = families()["llama"].presets["3.1-8B"]
    for given, scaling in (
        ({"factor": 16.0}, RopeScaling("llama3", factor=16.0)),
        (YARN, RopeScaling(**YARN)),
    ):
        found = resolve_model_config(section(given, flavor="", hf_assets_path=str(tmp_path)))
        assert found == replace(preset, rope_scaling=scaling)
