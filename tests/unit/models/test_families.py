"""Families: presets against hub-style config.json files, round trips through transformers' AutoConfig, refusals."""

import json
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from titanlite.base.errors import ConfigError
from titanlite.config import ModelConfig, RopeScaling
from titanlite.config.model import ModelSection
from titanlite.models.families import (
    check_model_config,
    families,
    family_of,
    model_config_from_hf,
    resolve_model_config,
)
from titanlite.ops import inverse_frequencies

PRESETS = [(family.name, flavor) for family in families().values() for flavor in family.presets]

# As published on the hub, keys that have no bearing on the architecture included.
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN2_5_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MOONLIGHT: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("quantization_config", "rope_scaling")},
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
HUB = {
    "0.6B": QWEN3_0_6B,
    "30B-A3B": QWEN3_30B_A3B,
    "3.1-8B": LLAMA_3_1_8B,
    "2.5-7B": QWEN2_5_7B,
    "4.5-Air-106B-A12B": GLM_4_5_AIR,
    "V3-671B-A37B": DEEPSEEK_V3,
    "Moonlight-16B-A3B": MOONLIGHT,
}


def from_hf(hf: dict[str, Any]) -> ModelConfig:
    return families()[hf["model_type"]].from_hf(hf, "config.json")


def refuse(hf: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        from_hf(hf)
    return str(error.value)


def test_hub_config_equals_preset():
    for flavor in HUB:
        hf = HUB[flavor]
        assert from_hf(hf) == families()[hf["model_type"]].presets[flavor]


def test_hub_config_written_by_transformers_5_equals_preset():
    for flavor, hf in HUB.items():
        kept = {k: v for k, v in hf.items() if k != "torch_dtype"}
        again = AutoConfig.for_model(**deepcopy(kept)).to_dict()  # transformers writes into the tables it is given
        assert "rope_parameters" in again
        assert from_hf(again) == families()[hf["model_type"]].presets[flavor]


def test_preset_is_consistent():
    for family, flavor in PRESETS:
        config = families()[family].presets[flavor]
        assert config.family == family
        assert check_model_config(config) == []
        assert family_of(config).name == family


def test_config_json_round_trip_through_transformers(tmp_path):
    for family, flavor in PRESETS:
        config = families()[family].presets[flavor]
        hf_config = AutoConfig.for_model(family, **family_of(config).to_hf(config))
        hf_config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
        assert model_config_from_hf(tmp_path) == config
        assert model_config_from_hf(tmp_path / "config.json") == config
        loaded = AutoConfig.from_pretrained(tmp_path)
        assert loaded.architectures == [families()[family].architecture]
        assert type(loaded).model_type == family


def test_round_trip_of_unusual_sizes(tmp_path):
    for family in sorted(families()):
        config = replace(
            families()[family].presets["debug"],
            attention_bias=True,
            tie_word_embeddings=True,
            initializer_range=0.006,
            rms_norm_eps=3e-6,
            rope_theta=12345.0,
            num_kv_heads=4,
            rope_scaling=RopeScaling("linear", factor=3.0),
        )
        AutoConfig.for_model(family, **family_of(config).to_hf(config)).save_pretrained(tmp_path)
        assert model_config_from_hf(tmp_path) == config


def test_round_trip_of_yarn(tmp_path):
    for family in families():
        for scaling in [
            RopeScaling("yarn", factor=4.0, original_max_position_embeddings=512),
            RopeScaling(
                "yarn", 4.0, original_max_position_embeddings=512, truncate=False, attention_factor=1.5, mscale=0.7
            ),
        ]:
            config = replace(families()[family].presets["debug"], rope_scaling=scaling)
            AutoConfig.for_model(family, **family_of(config).to_hf(config)).save_pretrained(tmp_path)
            assert model_config_from_hf(tmp_path) == config


def test_where_the_rotated_part_of_a_head_may_stand():
    air = families()["glm4_moe"].presets["4.5-Air-106B-A12B"]
    hf = {key: value for key, value in GLM_4_5_AIR.items() if key != "partial_rotary_factor"}
    assert from_hf(hf) == air  # transformers' default
    table = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.25}
    assert from_hf({**hf, "rope_parameters": table}) == replace(air, partial_rotary_factor=0.25)


def test_the_layer_for_multi_token_prediction_is_not_promised_without_its_weights():
    assert family_of(from_hf(GLM_4_5_AIR)).to_hf(from_hf(GLM_4_5_AIR))["num_nextn_predict_layers"] == 0


def test_keys_that_may_be_left_out():
    hf = {key: value for key, value in LLAMA_3_1_8B.items() if value not in (False, None, 0.02)}
    del hf["num_key_value_heads"]
    assert from_hf(hf) == replace(families()["llama"].presets["3.1-8B"], num_kv_heads=32)
    hf = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    assert from_hf({**hf, "num_local_experts": 128}) == families()["qwen3_moe"].presets["30B-A3B"]


def test_everything_that_is_wrong_is_said_at_once():
    text = refuse({**QWEN3_0_6B, "hidden_act": "gelu", "use_sliding_window": True, "vocab_size": None})
    assert text.startswith("config.json: 3 problems:")
    assert "hidden_act = 'gelu' is not supported by the native decoder, only 'silu' is." in text
    assert "use_sliding_window = True is not supported" in text
    assert "vocab_size = null" in text


@pytest.mark.parametrize(
    ("hf", "changes", "text"),
    [
        (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, "mlp_only_layers = [0] is not supported"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        (QWEN3_30B_A3B, {"num_experts": None}, "num_experts = null"),
        (QWEN2_5_7B, {"is_causal": False}, "is_causal = False is not supported"),
        (GLM_4_5_AIR, {"head_dim": 42}, "partial_rotary_factor rotates 21 of 42, an odd number"),
        (QWEN2_5_7B, {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (QWEN2_5_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (GLM_4_5_AIR, {"partial_rotary_factor": "half"}, "partial_rotary_factor = 'half' is not a number"),
        (GLM_4_5_AIR, {"partial_rotary_factor": 0.01}, "partial_rotary_factor rotates 1 of 128, an odd number"),
        (GLM_4_5_AIR, {"partial_rotary_factor": 1.5}, "partial_rotary_factor (1.5) of head_dim (128) is no even"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        (DEEPSEEK_V3, {"num_key_value_heads": 64}, "num_kv_heads (64) is not num_heads (128), which latent attention"),
        (DEEPSEEK_V3, {"v_head_dim": 0}, "v_head_dim = 0 is not positive"),
        (DEEPSEEK_V3, {"kv_lora_rank": 0}, "kv_lora_rank = 0 is not positive, as latent attention needs it"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": None}, "qk_rope_head_dim = null"),
        (
            DEEPSEEK_V3,
            {"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim is supported by the native decoder with rope_type 'yarn' alone",
        ),
        (DEEPSEEK_V3, {"q_lora_rank": -1}, "q_lora_rank = -1 is negative"),
        (LLAMA_3_1_8B, {"mlp_bias": True}, "mlp_bias = True is not supported"),
        (LLAMA_3_1_8B, {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
        (LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic' is not supported"),
    ],
)
def test_unsupported_features_are_refused(hf, changes, text):
    message = refuse({**hf, **changes})
    assert message.startswith("config.json: ")
    assert text in message


def test_old_style_linear_scaling():
    hf = {**LLAMA_3_1_8B, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert from_hf(hf).rope_scaling == RopeScaling("linear", factor=4.0)


def test_where_the_length_of_pretraining_may_stand():
    """In the table, else on its own; else it is the longest sequence, as for transformers. On its own, it counts."""
    table = {"rope_type": "yarn", "factor": 4.0}
    yarn = RopeScaling("yarn", factor=4.0)
    for hf, length in (
        ({"rope_scaling": table}, 40960),
        ({"rope_scaling": {**table, "original_max_position_embeddings": 32768}}, 32768),
        ({"rope_scaling": {"original_max_position_embeddings": 7, **table}, "original_max_position_embeddings": 9}, 9),
    ):
        found = from_hf({**QWEN3_0_6B, **hf})
        assert found.rope_scaling == replace(yarn, original_max_position_embeddings=length)
        theirs = AutoConfig.for_model(**{**QWEN3_0_6B, **hf})
        theirs.standardize_rope_params()
        assert theirs.rope_parameters["original_max_position_embeddings"] == length


def test_unusual_yarn_tables_are_read_as_transformers_reads_them():
    for table in [
        {"truncate": None},
        {"truncate": False},
        {"factor": None},
        {"factor": None, "original_max_position_embeddings": 32768},
        {"beta_fast": None, "attention_factor": None, "mscale": 0.0, "mscale_all_dim": 1.0},
        {"factor": 8, "beta_slow": 2},
    ]:
        hf = {**QWEN3_0_6B, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, **table}}
        found = from_hf(hf)
        assert found.rope_scaling is not None
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**deepcopy(hf)), "cpu")
        actual = inverse_frequencies(found.rotary_dim, found.rope_theta, found.rope_scaling)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
        assert found.rope_scaling.attention_scaling == pytest.approx(factor, rel=1e-12)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no .*config\.json\. Give a folder"):
        model_config_from_hf(tmp_path)
    path = tmp_path / "config.json"
    for content, text in [
        ("{", "cannot read"),
        (
            "[]",
            "model_type 'None' has no native decoder; there are deepseek_v3, dots1, glm4_moe, llama, qwen2, ",
        ),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' has no native decoder"),
        ('{"model_type": ["qwen3"]}', "has no native decoder"),
    ]:
        path.write_text(content)
        with pytest.raises(ConfigError) as error:
            model_config_from_hf(tmp_path)
        assert text in str(error.value)
        assert str(path) in str(error.value)


def section(**changes: Any) -> ModelSection:
    result = ModelSection(name="qwen3_moe", flavor="debug")
    for name, value in changes.items():
        setattr(result.overrides if name in asdict(result.overrides) else result, name, value)
    return result


def test_overrides_change_single_sizes():
    preset = families()["qwen3_moe"].presets["debug"]
    assert resolve_model_config(section()) == preset
    expected = replace(preset, num_layers=7, norm_topk_prob=False, rope_theta=5e4)
    assert resolve_model_config(section(num_layers=7, norm_topk_prob=False, rope_theta=5e4)) == expected


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def scaled(base: ModelSection, **values: Any) -> ModelSection:
    for name, value in values.items():
        setattr(base.overrides.rope_scaling, name, value)
    return base


def test_overrides_scale_rotary_embeddings(tmp_path):
    found = resolve_model_config(scaled(section(max_position_embeddings=131072), **YARN))
    assert found.rope_scaling == RopeScaling(**YARN)
    assert found.max_position_embeddings == 131072
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    from_file = section(flavor="", hf_assets_path=str(tmp_path))
    assert resolve_model_config(scaled(from_file, factor=16.0)).rope_scaling == RopeScaling("llama3", factor=16.0)
    assert resolve_model_config(scaled(from_file, **YARN)).rope_scaling == RopeScaling(**YARN)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"factor": 4.0}, "model.overrides.rope_scaling: rope_type is missing. Set it, for example to 'yarn'."),
        ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings is missing, which 'yarn' needs."),
        ({**YARN, "high_freq_factor": 2.0}, "high_freq_factor means nothing for 'yarn'. Leave it out."),
        ({**YARN, "factor": -1.0}, "rope_scaling.factor = -1.0 is not positive."),
        ({**YARN, "factor": 0.5}, "rope_scaling.factor = 0.5 is less than 1"),
        ({**YARN, "mscale": 0.7}, "mscale has no effect without mscale_all_dim. Set both, or none."),
        (
            {**YARN, "mscale": -20.0, "mscale_all_dim": 1.0},
            "mscale (-20.0) and mscale_all_dim (1.0) make a factor on queries and keys of -1.56, which is not",
        ),
        ({**YARN, "beta_slow": 40.0}, "rope_scaling.beta_slow (40.0) is not less than rope_scaling.beta_fast (32.0)."),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 8192},
            "rope_scaling.low_freq_factor (4.0) is not less than rope_scaling.high_freq_factor (4.0).",
        ),
    ],
)
def test_wrong_rotary_overrides(values, text):
    with pytest.raises(ConfigError) as error:
        resolve_model_config(scaled(section(), **values))
    assert text in str(error.value)


def test_overrides_apply_to_a_config_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    config = resolve_model_config(section(flavor="", hf_assets_path=str(tmp_path), num_layers=2))
    assert config == replace(families()["qwen3"].presets["0.6B"], num_layers=2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"name": "qwen3moe"},
            "unknown family 'qwen3moe'. Did you mean 'qwen3_moe'? There are: deepseek_v3, dots1, glm4_moe, llama,",
        ),
        ({"flavor": "30B-A3"}, "family 'qwen3_moe' has no flavor '30B-A3'. Did you mean '30B-A3B'? There are: "),
        ({"num_layers": 0}, "num_layers = 0 is not positive."),
        ({"num_kv_heads": 3}, "num_heads (4) is not a multiple of num_kv_heads (3)."),
        ({"head_dim": 7}, "head_dim (7) is odd"),
        ({"top_k": 9}, "top_k (9) is more than num_experts (8)."),
        ({"top_k": 0}, "top_k = 0 is not positive."),
        ({"num_expert_groups": 3}, "num_experts (8) is not a multiple of num_expert_groups (3)."),
        ({"num_expert_groups": 0}, "num_experts (8) is not a multiple of num_expert_groups (0)."),
        ({"num_expert_groups": 4, "num_limited_groups": 5}, "num_limited_groups (5) is not between 1 and 4."),
        ({"num_expert_groups": 4, "top_k": 3}, "top_k (3) is more than the experts in 1 of 4 groups (2)."),
    ],
)
def test_contradictions_are_named(changes, text):
    with pytest.raises(ConfigError) as error:
        resolve_model_config(section(**changes))
    assert text in str(error.value)


def test_all_contradictions_at_once():
    with pytest.raises(ConfigError, match="model: 3 problems:"):
        resolve_model_config(section(hidden_size=0, head_dim=7, top_k=20))


@pytest.mark.parametrize(
    ("hf", "changes"),
    [
        # transformers rotates half of each head then, for every scaled rope_type.
        (LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}),
        (QWEN3_0_6B, {"layer_types": ["sliding_attention"] * 28}),
        (QWEN3_0_6B, {"quantization_config": {"quant_method": "gptq"}}),
        (LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "llama3"}}),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn"}}),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": 0.0}}),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}}),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}),
        (QWEN3_0_6B, {"rope_theta": float("inf")}),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0}}),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": "no"}}),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": "1"}}),
    ],
)
def test_features_that_should_be_refused(hf, changes):
    refuse({**hf, **changes})


@pytest.mark.parametrize(
    "changes", [{"rope_theta": None}, {"rope_scaling": "linear"}, {"num_attention_heads": 0}, {"vocab_size": "10"}]
)
def test_wrong_values_are_config_errors(changes):
    refuse({**LLAMA_3_1_8B, **changes})


def test_theta_beside_rope_parameters():
    hf = {**QWEN3_0_6B, "rope_parameters": {"rope_type": "default"}}
    assert from_hf(hf).rope_theta == 1e6


def test_impossible_sizes():
    for changes in [
        {"moe_intermediate_size": 0},
        {"num_dense_layers": -1},
        {"num_shared_experts": -1},
        {"rope_theta": 0.0},
    ]:
        assert check_model_config(replace(families()["qwen3_moe"].presets["debug"], **changes)) != []


@pytest.mark.parametrize(
    ("family", "override", "has"),
    [
        ("qwen3", {"qk_norm": False}, True),
        ("qwen3", {"num_experts": 8}, 0),
        ("qwen3_moe", {"num_shared_experts": 1}, 0),
    ],
)
def test_override_that_the_hugging_face_model_could_not_express(family, override, has):
    ((key, value),) = override.items()
    overrides = ModelSection().overrides
    setattr(overrides, key, value)
    with pytest.raises(ConfigError) as error:
        resolve_model_config(ModelSection(name=family, flavor="debug", overrides=overrides))
    assert f"model: overrides.{key} = {value}: every {family} has {has!r}, and its Hugging Face model" in str(
        error.value
    )
