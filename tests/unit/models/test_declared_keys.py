"""What families declare of config.json, against transformers' classes; null, absence, and what is
said aloud.
"""

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
from titanlite.models.families.keys import HEADS, MISSING, SHARE, Key

FAMILIES = sorted(families())
# Looked at in another way (rotary tables, `required`), or without effect on what the model
# computes: those are refused when the configuration to be saved is built, before the first step.
OTHERWISE = {
    *(
        "rope_parameters",
        "dtype",
        "id2label",
        "label2id",
        "problem_type",
        "transformers_version",
        "architectures",
    ),
    *(
        "output_hidden_states",
        "return_dict",
        "is_encoder_decoder",
        "use_cache",
        "chunk_size_feed_forward",
    ),
    *(
        "bos_token_id",
        "eos_token_id",
        "hidden_act",
        "attention_dropout",
        "mlp_bias",
        "pretraining_tp",
    ),
    *(
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "mlp_layer_types",
    ),
    *("output_router_logits", "router_aux_loss_coef", "decoder_sparse_step", "mlp_only_layers"),
    *("num_mtp_layers", "num_nextn_predict_layers", "is_causal"),
}


def kinds_of(annotation: Any) -> set[str]:
    if isinstance(annotation, str):
        return {kind.strip() for kind in annotation.split("|")}
    parts = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return {
        "None" if part is type(None) else part.__name__ if type(part) is type else str(part)
        for part in parts
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_class_is_declared_as_there(family):
    declared, ours = (
        families()[family].declared,
        {value: key for key, value in families()[family].keys.items()},
    )
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


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_what_transformers_makes_of_it(family):
    """Of every key that is read: its declared meaning, or refused by name. Never silently the
    default.
    """
    ours = {theirs: ours for ours, theirs in families()[family].keys.items()}
    meanings = {
        "norm_topk_prob": False,
        "rope_interleave": False,
        "q_lora_rank": 0,
        "num_key_value_heads": 4,
    }
    meanings |= {"head_dim": 8}  # a share
    for key, field in ours.items():
        if families()[family].declared.get(key, Key()).null is not MISSING:
            assert getattr(read({**base_of(family), key: None}), field) == meanings[key], key
        else:
            with pytest.raises(ConfigError, match=key):
                read({**base_of(family), key: None})


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
    assert (
        getattr(read({key: value for key, value in hf.items() if value is not ...}), field) == value
    )


GEMMA = {
    "model_type": "gemma2",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 40,
}
MIXTRAL = {**GEMMA, "model_type": "mixtral", "intermediate_size": 32, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("hf", "text"),
    [
        ({**GEMMA, "num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648 is more than 4096"),
        ({**GEMMA, "num_attention_heads": 0}, "ZeroDivisionError"),
        ({**GEMMA, "rms_norm_eps": float("inf")}, "rms_norm_eps = inf is not a finite number"),
        ({"model_type": "gpt2", "resid_pdrop": -1}, "resid_pdrop = -1 is no probability"),
        (
            {**GEMMA, "parts": [{"a": 1}, {"vocab_size": 2**28}]},
            "parts.vocab_size = 268435456 is more than",
        ),
        ({**GEMMA, "id2label": [1]}, "transformers refuses it: "),
        (
            {**MIXTRAL, "num_local_experts": 2**15, "num_hidden_layers": 2**10},
            "33554432 in all, more than",
        ),
        (
            {**GEMMA, "hidden_size": 2**24, "vocab_size": 2**24, "intermediate_size": 2**24},
            "vocab|parameters|size",
        ),
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
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.flatten(), reduction="sum"
    ).backward()
    actual, expected = (
        model.get_parameter("model.embed_tokens.weight").grad for model in (ours, theirs)
    )
    assert actual is not None and expected is not None
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
    assert bool(actual[3].count_nonzero()) == tied


def test_what_is_read_without_effect_is_named(caplog):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for table, words in (
        (
            {**yarn, "attn_factor": 1.0},
            "'attn_factor' (did you mean 'attention_factor'?) has no effect",
        ),
        ({**yarn, "low_freq_factor": 1.0}, "'low_freq_factor' (only for llama3) has no effect"),
        ({"factor": 4.0}, "'factor' (only for linear, llama3, yarn) has no effect"),
        (
            {"rope_type": "linear", "type": "yarn", "factor": 4.0},
            "type = 'yarn' has no effect next to rope_type",
        ),
        ({**yarn, "truncate": None}, ""),
        ({"type": "linear", "factor": 2.0}, ""),
    ):
        logging.warn_once.cache_clear()
        caplog.clear()
        read({**base_of("llama"), "rope_scaling": table})
        assert words in caplog.text and ("no effect" in caplog.text) == bool(words), table
    read({**base_of("qwen3_moe"), "output_router_logits": True, "router_aux_loss_coef": 0.01})
    assert (
        "weighed by router_aux_loss_coef (0.01)" in caplog.text
        and "moe.aux_loss_coeff" in caplog.text
    )
