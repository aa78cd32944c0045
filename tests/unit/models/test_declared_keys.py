"""What families declare of config.json, against transformers' classes; null, absence, and what is said aloud."""

import dataclasses
import typing
from copy import deepcopy
from types import UnionType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.unit.models.test_config_mutations import base_of
from titanlite.base import log as logging
from titanlite.base.errors import ConfigError
from titanlite.features.transformers.build import build_transformers
from titanlite.models.families import families
from titanlite.models.families.config_json import transformers_config
from titanlite.models.families.family import _KINDS
from titanlite.models.families.keys import HEADS, MISSING, SHARE, Key, NotNativeError

FAMILIES = sorted(families())
# Looked at in another way (rotary tables, `required`), or without effect on what the model computes: those are refused
# when the configuration to be saved is built, before the first step.
OTHERWISE = {
    *("rope_parameters", "dtype", "id2label", "label2id", "problem_type", "transformers_version", "architectures"),
    *("output_hidden_states", "return_dict", "is_encoder_decoder", "use_cache", "chunk_size_feed_forward"),
    *("bos_token_id", "eos_token_id", "hidden_act", "attention_dropout", "mlp_bias", "pretraining_tp"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "mlp_layer_types"),
    *("output_router_logits", "router_aux_loss_coef", "decoder_sparse_step", "mlp_only_layers"),
    *("num_mtp_layers", "num_nextn_predict_layers", "is_causal"),
}


def kinds_of(annotation: Any) -> set[str]:
    if isinstance(annotation, str):
        return {kind.strip() for kind in annotation.split("|")}
    parts = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return {"None" if part is type(None) else part.__name__ if type(part) is type else str(part) for part in parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_class_is_declared_as_there(family):
    declared, ours = families()[family].declared, {value: key for key, value in families()[family].keys.items()}
    fields = {field.name: field for field in dataclasses.fields(CONFIG_MAPPING[family])}
    assert not fields.keys() - {*declared, *ours} - OTHERWISE
    for name in fields.keys() & {*declared, *ours} - OTHERWISE:
        field, key = fields[name], declared.get(name, Key())
        kinds = kinds_of(field.type)
        assert "None" in kinds or key.null is MISSING, name
        assert kinds - {"None"} == {_KINDS[ours.get(name, name)].__name__}, name
        if key.default is HEADS or key.default is SHARE:
            assert field.default is None, name  # derived in __post_init__
        elif key.default is not MISSING:
            assert key.default == field.default, name


def read(hf: dict[str, Any]) -> Any:
    return families()[hf["model_type"]].from_hf(hf, "config.json")


def refusal(hf: dict[str, Any], kind: type[ConfigError] = ConfigError) -> str:
    with pytest.raises(ConfigError) as error:
        read(hf)
    assert type(error.value) is kind
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_what_transformers_makes_of_it(family):
    """Of every key that is read: its declared meaning, or refused by name. Never silently the default."""
    ours = {theirs: ours for ours, theirs in families()[family].keys.items()}
    meanings = {"norm_topk_prob": False, "rope_interleave": False, "q_lora_rank": 0, "num_key_value_heads": 4}
    meanings |= {"head_dim": 8}  # a share
    for key, field in ours.items():
        if families()[family].declared.get(key, Key()).null is not MISSING:
            assert getattr(read({**base_of(family), key: None}), field) == meanings[key], key
        else:
            assert key in refusal({**base_of(family), key: None})


@pytest.mark.parametrize(
    ("family", "changes", "field", "value"),
    [
        ("glm4_moe", {"partial_rotary_factor": None}, "partial_rotary_factor", 1.0),
        ("glm4_moe", {}, "partial_rotary_factor", 0.5),
        ("qwen3_moe", {"head_dim": ...}, "head_dim", 8),
        ("qwen3", {"head_dim": ...}, "head_dim", 128),
        ("dots1", {"sliding_window": ..., "max_window_layers": 2}, "num_layers", 2),
        ("dots1", {"sliding_window": ...}, "num_layers", 2),  # from layer 62 on
        ("dots1", {"sliding_window": 9, "layer_types": ["full_attention"] * 2}, "num_layers", 2),
        ("llama", {"pad_token_id": -1}, "pad_token_id", 39),
        ("llama", {"num_key_value_heads": ...}, "num_kv_heads", 4),
    ],
)
def test_absence_and_null(family, changes, field, value):
    hf = {**base_of(family), **changes}
    if family == "glm4_moe" and not changes:
        hf.pop("partial_rotary_factor", None)
    assert getattr(read({key: value for key, value in hf.items() if value is not ...}), field) == value


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("dots1", {"sliding_window": ..., "max_window_layers": 1}, "sliding_window = 4096, which transformers takes"),
        ("llama", {"per_layer_config": {}}, "per_layer_config"),
        ("qwen3", {"is_causal": False}, "is_causal = False"),
        ("llama", {"is_causal": None}, "is_causal = None"),
        ("qwen3", {"attention_dropout": "x"}, "attention_dropout = 'x'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
        ("qwen3", {"rope_scaling": {"full_attention": None}}, "'full_attention'"),
    ],
)
def test_what_transformers_may_have(family, changes, text):
    hf = {key: value for key, value in {**base_of(family), **changes}.items() if value is not ...}
    assert text in refusal(hf, NotNativeError)


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("dots1", {"routed_scaling_factor": 4}, "routed_scaling_factor = 4 is of the wrong type: transformers expects"),
        ("dots1", {"routed_scaling_factor": 4}, "Write 4.0."),
        ("qwen3", {"pad_token_id": "1"}, "pad_token_id = '1'"),
        ("qwen3", {"attention_bias": 0}, "attention_bias = 0"),
        ("llama", {"initializer_range": 1.5}, "initializer_range = 1.5 is more than 1.0."),
        ("llama", {"hidden_size": 30, "head_dim": 8}, "hidden_size (30) is no multiple of num_heads (4)"),
        ("llama", {"num_labels": 10**9}, "num_labels"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps = inf is not a finite number"),
        ("llama", {"anything": {"deep": float("nan")}}, "anything.deep = nan is not a finite number"),
        ("llama", {"anything": [{"deep": float("nan")}]}, "anything.deep = nan is not a finite number"),
        ("llama", {"pad_token_id": 40}, "pad_token_id (40) is not less than vocab_size (40)"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts = 8, but num_local_experts = 4. Give one."),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank = 0 is not positive"),
        ("deepseek_v3", {"head_dim": 4}, "head_dim = 4 is not qk_rope_head_dim = 8."),
        ("deepseek_v3", {"n_shared_experts": 0}, "num_shared_experts (0) is not positive"),
        ("glm4_moe", {"n_routed_experts": 1, "num_experts_per_tok": 1}, "num_experts (1) is less than 2"),
        ("glm4_moe", {"n_routed_experts": 0}, "num_experts (0) is less than 2"),
        ("llama", {"rope_scaling": {"rope_type": None}}, "rope_type = null is not a text"),
        ("llama", {"rope_scaling": {"rope_type": []}}, "rope_type = [] is not a text"),
        ("llama", {"rope_scaling": {"rope_theta": None}}, "rope_scaling: rope_theta = null is not a number"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "contradict each other",
        ),
        ("llama", {"original_max_position_embeddings": None, "rope_scaling": "YARN"}, "is not a number"),
        ("llama", {"num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648 is more than 4096"),
        ("llama", {"num_hidden_layers": 10**18}, "num_hidden_layers = 1000000000000000000 is more than 4096"),
        (
            "llama",
            {"num_hidden_layers": 2**12, "hidden_size": 2**20, "intermediate_size": 2**24},
            "parameters or more",
        ),
        ("llama", {"num_attention_heads": 0}, "num_heads = 0 is not positive"),
        ("llama", {"rms_norm_eps": 1e30}, "rms_norm_eps = 1e+30 is more than 1.0"),
    ],
)
def test_what_nothing_can_compute_is_refused(family, changes, text):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    changes = {key: yarn if value == "YARN" else value for key, value in changes.items()}
    assert text in refusal({**base_of(family), **changes})


GEMMA = {"model_type": "gemma2", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 40}
MIXTRAL = {**GEMMA, "model_type": "mixtral", "intermediate_size": 32, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("hf", "text"),
    [
        ({**GEMMA, "num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648 is more than 4096"),
        ({**GEMMA, "hidden_size": 10**18}, "hidden_size = 1000000000000000000 is more than"),
        ({**GEMMA, "num_attention_heads": 0}, "ZeroDivisionError"),
        ({**GEMMA, "rms_norm_eps": float("inf")}, "rms_norm_eps = inf is not a finite number"),
        ({**GEMMA, "attention_dropout": 1.5}, "attention_dropout = 1.5 is no probability"),
        ({"model_type": "gpt2", "resid_pdrop": -1}, "resid_pdrop = -1 is no probability"),
        ({**GEMMA, "parts": [{"a": 1}, {"vocab_size": 2**28}]}, "parts.vocab_size = 268435456 is more than"),
        ({**GEMMA, "id2label": [1]}, "transformers refuses it: "),
        ({**GEMMA, "num_labels": 10**10}, "num_labels"),
        ({**MIXTRAL, "num_local_experts": 2**20}, "num_local_experts = 1048576 is more than 65536"),
        ({**MIXTRAL, "num_local_experts": 2**15, "num_hidden_layers": 2**10}, "33554432 in all, more than"),
        ({**GEMMA, "hidden_size": 2**24, "vocab_size": 2**24, "intermediate_size": 2**24}, "vocab|parameters|size"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**6}}, "text_config.num_hidden_layers"),
        ({"model_type": "qwen3_next", "decoder_sparse_step": 0, "num_hidden_layers": 2}, "ZeroDivisionError"),
    ],
)
def test_absurd_sizes_of_transformers_classes(hf, text):
    with pytest.raises(ConfigError, match=text):
        build_transformers(transformers_config(deepcopy(hf), "config.json"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_row_of_the_padding_has_the_gradient_of_transformers(family, tied, tiny):
    """None from the lookup; what a tied head has of it stays."""
    config = tiny.config(family, tie_word_embeddings=tied, pad_token_id=3)
    ours = tiny.ours(config)
    theirs = tiny.theirs(config, ours)
    assert theirs.config.pad_token_id == 3
    tokens = torch.tensor([[3, 5, 3, 9, 11, 3, 2, 7]])
    ours(tokens, tokens).cross_entropy.backward()
    logits = theirs(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    actual, expected = (model.get_parameter("model.embed_tokens.weight").grad for model in (ours, theirs))
    assert actual is not None and expected is not None
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
    assert bool(actual[3].count_nonzero()) == tied


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "attn_factor": 1.0},
            "rope_scaling: 'attn_factor' (did you mean 'attention_factor'?) has no effect for rope_type 'yarn'.",
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "low_freq_factor": 1.0},
            "rope_scaling: 'low_freq_factor' (only for llama3) has no effect for rope_type 'yarn'.",
        ),
        (
            {"factor": 4.0, "finetuned": True},
            "'factor' (only for linear, llama3, yarn), 'finetuned' has no effect for rope_type 'default': there is no "
            "rope_type, so nothing is scaled.",
        ),
        ({"rope_type": "linear", "type": "yarn", "factor": 4.0}, "type = 'yarn' has no effect next to rope_type"),
    ],
)
def test_entries_of_the_rotary_table_without_effect_are_named(table, text, caplog):
    logging.warn_once.cache_clear()
    read({**base_of("llama"), "rope_scaling": table})
    assert [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotary_table_without_other_entries_is_read_in_silence(family, caplog):
    logging.warn_once.cache_clear()
    for table in ({"rope_type": "yarn", "factor": 4.0, "truncate": None}, {"type": "linear", "factor": 2.0}, {}):
        read({**base_of(family), "rope_scaling": table})
    assert "no effect" not in caplog.text


def test_the_balance_loss_of_transformers_is_named(caplog):
    logging.warn_once.cache_clear()
    read({**base_of("qwen3_moe"), "output_router_logits": True, "router_aux_loss_coef": 0.01})
    assert "weighed by router_aux_loss_coef (0.01)" in caplog.text and "moe.aux_loss_coeff" in caplog.text
