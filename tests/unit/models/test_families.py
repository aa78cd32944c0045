"""Families: presets against hub-style config.json files, round trips through transformers'
AutoConfig, refusals.
"""

import json
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.unit.models.test_config_mutations import base_of
from titanlite.base.errors import ConfigError
from titanlite.base.text import list_names
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
from titanlite.models.families.keys import NotNativeError
from titanlite.ops import inverse_frequencies

PRESETS = [(family.name, flavor) for family in families().values() for flavor in family.presets]
# As published on the hub, by flavor; keys that have no bearing on the architecture included.
HUB: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text()
)
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
        AutoConfig.for_model(family, **family_of(config).to_hf(config)).save_pretrained(tmp_path)
        assert (
            model_config_from_hf(tmp_path)
            == model_config_from_hf(tmp_path / "config.json")
            == config
        )
        loaded = AutoConfig.from_pretrained(tmp_path)
        assert loaded.architectures == [families()[family].architecture]
        assert type(loaded).model_type == family


UNUSUAL: list[dict[str, Any]] = [
    {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "initializer_range": 0.006,
        "rms_norm_eps": 3e-6,
    }
    | {"rope_theta": 12345.0, "num_kv_heads": 4, "rope_scaling": RopeScaling("linear", factor=3.0)},
    {"rope_scaling": RopeScaling("yarn", factor=4.0, original_max_position_embeddings=512)},
    {"rope_scaling": RopeScaling("yarn", 4.0, truncate=False, attention_factor=1.5, mscale=0.7)},
]


def test_unusual_values_survive_transformers(tmp_path):
    for family in families():
        for changes in UNUSUAL:
            fixed = families()[family].fixed
            config = replace(
                families()[family].presets["debug"],
                **{key: value for key, value in changes.items() if key not in fixed},
            )
            AutoConfig.for_model(family, **family_of(config).to_hf(config)).save_pretrained(
                tmp_path
            )
            assert model_config_from_hf(tmp_path) == config


def test_where_the_rotated_part_of_a_head_may_stand():
    air = families()["glm4_moe"].presets["4.5-Air-106B-A12B"]
    hf = {key: value for key, value in GLM.items() if key != "partial_rotary_factor"}
    assert from_hf(hf) == air  # transformers' default
    table = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.25}
    assert from_hf({**hf, "rope_parameters": table}) == replace(air, partial_rotary_factor=0.25)


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
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK, **published}))
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


def test_unusual_yarn_tables_are_read_as_transformers_reads_them():
    for table in [
        {"truncate": None},
        {"truncate": False},
        {"beta_fast": None, "attention_factor": None, "mscale": 0.0, "mscale_all_dim": 1.0},
        {"factor": 8, "beta_slow": 2},
    ]:
        hf = {**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, **table}}
        found = from_hf(hf)
        assert found.rope_scaling is not None
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**deepcopy(hf)), "cpu")
        actual = inverse_frequencies(found.rotary_dim, found.rope_theta, found.rope_scaling)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
        assert found.rope_scaling.attention_scaling == pytest.approx(factor, rel=1e-12)


def yarn(**entries):
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **entries}}


INF, NAN = float("inf"), float("nan")
# What the decoder cannot express and transformers' class may have: a family or a published file,
# changes, and the words that must be said.
NOT_NATIVE: list[tuple[Any, dict[str, Any], str]] = [
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    ("qwen3", {"is_causal": False}, "is_causal = False"),
    ("llama", {"per_layer_config": {}}, "per_layer_config"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("dots1", {"sliding_window": ..., "max_window_layers": 1}, "layer_types = ["),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types = ["),
    ("deepseek_v3", {"mlp_layer_types": ["dense", "dense"]}, "mlp_layer_types = ["),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("qwen3", {"attention_dropout": 0.5}, "attention_dropout = 0.5"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True"),
    ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank = 0"),
    ("deepseek_v3", {"head_dim": 4}, "head_dim = 4 is not qk_rope_head_dim = 8."),
    ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    # transformers rotates half of each head then, for every scaled rope_type.
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "partial_rotary",
    ),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": None}}, "rope_type null"),
    (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "'full_attention'",
    ),
    (
        DEEPSEEK,
        {"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim",
    ),
]
# What transformers refuses, or nothing can compute.
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("qwen3_moe", {"num_experts": None}, "transformers refuses it: num_experts = null: "),
    ("qwen3_moe", {"head_dim": None}, "head_dim = null is not of type int."),
    ("dots1", {"n_shared_experts": None}, "n_shared_experts = null is not of type int."),
    ("dots1", {"routed_scaling_factor": 4}, "routed_scaling_factor = 4: "),
    ("llama", {"vocab_size": "10"}, 'vocab_size = "10"'),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0"),
    ("qwen2", {"initializer_range": 1.5}, "initializer_range = 1.5 is not between 0.0 and 1.0."),
    ("llama", {"rms_norm_eps": INF}, "rms_norm_eps = inf is not a finite number"),
    ("llama", {"anything": [{"deep": NAN}]}, "anything.deep = nan is not a finite number"),
    ("llama", {"pad_token_id": 40}, "pad_token_id (40) is not less than vocab_size (40)"),
    ("llama", {"hidden_size": 30, "head_dim": 8}, "hidden_size = 30"),
    ("llama", {"num_labels": 10**9}, "num_labels"),
    ("llama", {"num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648 is more than 4096"),
    (
        "llama",
        {"num_hidden_layers": 2**12, "hidden_size": 2**20, "intermediate_size": 2**24},
        "parameters or more",
    ),
    (
        "glm4_moe",
        {"n_routed_experts": 1, "num_experts_per_tok": 1},
        "num_experts (1) is less than 2",
    ),
    ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank = -1"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0"),
    ("deepseek_v3", {"n_shared_experts": 0}, "num_shared_experts (0)"),
    (DEEPSEEK, {"num_key_value_heads": 64}, "num_kv_heads (64)"),
    (GLM, {"head_dim": 42}, "partial_rotary_factor (0.5) of head_dim (42)"),
    (GLM, {"partial_rotary_factor": "half"}, "partial_rotary_factor = 'half'"),
    (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor (1.5)"),
    ("llama", {"rope_theta": None}, "rope_theta = null is not a float"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor = null"),
    (
        "llama",
        {**yarn(), "original_max_position_embeddings": None},
        "original_max_position_embeddings",
    ),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "factor"),
    ("qwen3", yarn(factor=0.0), "rope_scaling.factor = 0.0 is not between"),
    ("qwen3", yarn(beta_fast=0.5), "beta_fast"),
    ("qwen3", yarn(truncate="no"), "truncate = 'no' is not a bool"),
    ("qwen3", yarn(mscale="1"), "mscale"),
]


@pytest.mark.parametrize(("kind", "rows"), [(NotNativeError, NOT_NATIVE), (ConfigError, WRONG)])
def test_unusable_values_are_refused_by_name(kind, rows):
    for base, changes, words in rows:
        hf = {**(base_of(base) if isinstance(base, str) else base), **changes}
        with pytest.raises(ConfigError) as error:
            from_hf({key: value for key, value in hf.items() if value is not ...})
        assert type(error.value) is kind, changes
        text = str(error.value)
        assert text.startswith("config.json: ") and words in text, (changes, text)


def test_everything_that_the_decoder_lacks_is_said_at_once():
    with pytest.raises(NotNativeError) as error:
        from_hf({**QWEN3, "hidden_act": "gelu", "use_sliding_window": True, "is_causal": False})
    text = str(error.value)
    assert text.startswith("config.json: 3 problems:")
    assert "hidden_act = 'gelu' is not supported by the native decoder, only 'silu' is." in text
    assert "use_sliding_window = True is not supported" in text and "is_causal = False" in text


@pytest.mark.parametrize(
    ("family", "changes", "field", "value"),
    [
        ("glm4_moe", {"partial_rotary_factor": None}, "partial_rotary_factor", 1.0),
        ("glm4_moe", {}, "partial_rotary_factor", 0.5),
        ("qwen3_moe", {"head_dim": ...}, "head_dim", 8),
        ("qwen3", {"head_dim": ...}, "head_dim", 128),
        ("dots1", {"sliding_window": ..., "max_window_layers": 2}, "num_layers", 2),
        ("dots1", {"sliding_window": 9, "layer_types": ["full_attention"] * 2}, "num_layers", 2),
        ("dots1", {"norm_topk_prob": None}, "norm_topk_prob", False),
        ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank", 0),
        ("llama", {"pad_token_id": -1}, "pad_token_id", 39),
        ("llama", {"num_key_value_heads": ...}, "num_kv_heads", 4),
    ],
)
def test_absence_and_null(family, changes, field, value):
    hf = {key: value for key, value in {**base_of(family), **changes}.items() if value is not ...}
    assert getattr(from_hf(hf), field) == value


def test_a_balance_loss_that_transformers_would_add_is_said(caplog):
    from_hf({**base_of("qwen3_moe"), "output_router_logits": True})
    assert "set moe.aux_loss_coeff" in caplog.text


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist\. Give a path"):
        model_config_from_hf(tmp_path)
    path = tmp_path / "config.json"
    for content, text in [
        ("{", "cannot read"),
        (
            "[]",
            f"model_type 'None' has no native decoder; there are {list_names(families())}.",
        ),
        ('{"model_type": ["qwen3"]}', "has no native decoder"),
    ]:
        path.write_text(content)
        with pytest.raises(ConfigError) as error:
            model_config_from_hf(tmp_path)
        assert text in str(error.value) and str(path) in str(error.value)


def section(**changes):
    result = ModelSection(name="qwen3_moe", flavor="debug")
    for name, value in changes.items():
        if name.startswith("rope_scaling."):
            setattr(result.overrides.rope_scaling, name.partition(".")[2], value)
        else:
            setattr(result.overrides if name in asdict(result.overrides) else result, name, value)
    return result


def scaling(**values):
    return {f"rope_scaling.{name}": value for name, value in values.items()}


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
    assert resolve_model_config(section(**changes, **scaling(**YARN))) == expected
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = {"flavor": "", "hf_assets_path": str(tmp_path)}
    llama = families()["llama"].presets["3.1-8B"]
    factor = RopeScaling("llama3", factor=16.0)
    assert resolve_model_config(section(**given, **scaling(factor=16.0))) == replace(
        llama, rope_scaling=factor
    )
    assert resolve_model_config(section(**given, **scaling(**YARN))).rope_scaling == RopeScaling(
        **YARN
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"name": "qwen3moe"},
            "unknown family 'qwen3moe'. Did you mean 'qwen3_moe'? There are: deepseek_v3, dots1, ",
        ),
        (
            {"flavor": "30B-A3"},
            "family 'qwen3_moe' has no flavor '30B-A3'. Did you mean '30B-A3B'? There are: ",
        ),
        ({"num_kv_heads": 3}, "num_heads (4) is not a multiple of num_kv_heads (3)."),
        ({"head_dim": 7}, "head_dim (7) is odd"),
        ({"hidden_size": 0, "rope_theta": 0.0, "moe_intermediate_size": 0}, "model: 3 problems:"),
        ({"top_k": 9}, "top_k (9) is more than num_experts (8)."),
        ({"num_expert_groups": 3}, "num_experts (8) is not a multiple of num_expert_groups (3)."),
        ({"num_expert_groups": 0}, "num_experts (8) is not a multiple of num_expert_groups (0)."),
        (
            {"num_expert_groups": 4, "num_limited_groups": 5},
            "num_limited_groups (5) is not between 1 and 4.",
        ),
        (
            {"num_expert_groups": 4, "top_k": 3},
            "top_k (3) is more than the experts in 1 of 4 groups (2).",
        ),
        (
            {"num_shared_experts": 1},
            "overrides.num_shared_experts = 1: every qwen3_moe has 0, and its Hugging Face",
        ),
        ({"name": "qwen3", "qk_norm": False}, "overrides.qk_norm = False: every qwen3 has True"),
        (
            scaling(factor=4.0),
            "model.overrides.rope_scaling: rope_type is missing. Set it, for example to 'yarn'.",
        ),
        (scaling(rope_type="yarn", factor=4.0), "original_max_position_embeddings is missing"),
        (
            scaling(**YARN, high_freq_factor=2.0),
            "high_freq_factor means nothing for 'yarn'. Leave it out.",
        ),
        (scaling(**{**YARN, "factor": 0.5}), "rope_scaling.factor = 0.5 is less than 1"),
        (
            scaling(**YARN, mscale=0.7),
            "mscale has no effect without mscale_all_dim. Set both, or none.",
        ),
        (
            scaling(**YARN, mscale=-20.0, mscale_all_dim=1.0),
            "mscale (-20.0) and mscale_all_dim (1.0)",
        ),
        (
            scaling(**YARN, beta_slow=40.0),
            "beta_slow (40.0) is not less than rope_scaling.beta_fast (32.0).",
        ),
        (
            scaling(**LLAMA3, low_freq_factor=4.0),
            "low_freq_factor (4.0) is not less than rope_scaling.high_freq_factor",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_contradictory_overrides_are_refused(changes, text):
    with pytest.raises(ConfigError) as error:
        resolve_model_config(section(**changes))
    assert text in str(error.value)
