"""Configurations of transformers that are no plain tables of numbers, and classes under another
name.
"""

import json
import math
from copy import deepcopy

import pytest
import torch
import transformers
from tiny_transformers import TEXT_SIZES

from titanlite.base.errors import ConfigError
from titanlite.checkpoint.description import describe_model
from titanlite.checkpoint.folder import read_json
from titanlite.config.model import ModelSection
from titanlite.features.transformers.build import build_transformers
from titanlite.models.families import resolve_model_config
from titanlite.models.families.config_json import load_config_and_class, transformers_config

_MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_heads": 8,
    "head_dim": 8,
    "vocab_size": 64,
}


def resolve(folder, content):
    (folder / "config.json").write_text(content)
    return resolve_model_config(ModelSection(hf_assets_path=str(folder)))


def test_attributes_that_each_layer_has_for_itself():
    """Gemma 4's layers of full attention have wider heads, and transformers names no width of the
    whole.
    """
    sizes = TEXT_SIZES | {"head_dim": 16, "vocab_size_per_layer_input": 128}
    layers = {
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 32}},
    }
    hf = transformers.Gemma4TextConfig(**sizes, **layers).to_dict()
    config = transformers_config(hf, "test")
    assert config.attention_width == 4 * 32
    assert build_transformers(config).state_shapes["model.layers.1.self_attn.q_proj.weight"] == (
        128,
        32,
    )


def test_infinities_are_read_and_kept(tmp_path):
    content = json.dumps(_MAMBA2)[:-1] + ', "time_step_limit": [0.0, Infinity]}'
    config = resolve(tmp_path, content)
    assert load_config_and_class(config.hf, "test")[0].time_step_limit == [0.0, math.inf]
    written = describe_model(config, {}, torch.float32, None)["config.json"].decode()
    assert json.loads(written)["time_step_limit"] == [0.0, {"__float__": "Infinity"}], (
        "as transformers 5 writes it"
    )
    again = resolve(tmp_path, written)
    assert build_transformers(again).state_shapes == build_transformers(config).state_shapes
    assert read_json(tmp_path / "config.json", "test")["model_type"] == "mamba2"


def test_a_size_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="initializer_range = nan is not a finite number"):
        resolve(tmp_path, json.dumps(_MAMBA2)[:-1] + ', "initializer_range": NaN}')


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("musicgen_decoder", "MusicgenForCausalLM"),  # the mapping lists it under musicgen
        ("qwen3_5", "Qwen3_5ForCausalLM"),  # of the text model, as which transformers builds it
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ],
)
def test_the_class_that_architectures_names(model_type, name):
    config, cls = load_config_and_class({"model_type": model_type, "architectures": [name]}, "test")
    assert cls.__name__ == name
    assert type(config) is cls.config_class  # type: ignore[attr-defined]


def test_other_classes_are_not_taken():
    for named in (["MusicgenForConditionalGeneration"], ["LlamaForCausalLM"], []):
        with pytest.raises(
            ConfigError, match="no class that generates text for model_type 'musicgen_decoder'"
        ):
            load_config_and_class(
                {"model_type": "musicgen_decoder", "architectures": named}, "test"
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
        (
            {**GEMMA, "parts": [{"a": 1}, {"depths": [2, 2**28]}]},
            "parts.depths = 268435456 is more",
        ),
        ({**GEMMA, "num_attention_heads": 0}, "ZeroDivisionError"),
        (
            {**MIXTRAL, "num_local_experts": 2**15, "num_hidden_layers": 2**10},
            "33554432 in all, more than",
        ),
    ],
)
def test_absurd_sizes_of_transformers_classes(hf, text):
    with pytest.raises(ConfigError, match=text):
        build_transformers(transformers_config(deepcopy(hf), "config.json"))
