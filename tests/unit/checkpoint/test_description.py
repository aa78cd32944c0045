"""The config.json and the tokenizer files that are saved with a model's weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from files import error_of, read_json, write_json
from tiny_transformers import TEXT_SIZES

from tests.saving import save_tokenizer
from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.description import describe_model
from titanlite.config import RopeScaling
from titanlite.models.families import families, model_config_from_hf
from titanlite.models.families.config_json import transformers_config

YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=1024)
QWEN3 = families()["qwen3"].presets["debug"]


def write(config, original, folder):
    """Write config.json for `config`, after a start from a folder whose config.json is `original`;
    return it.
    """
    assets, out = folder / "assets", folder / "out"
    assets.mkdir(exist_ok=True)
    out.mkdir(exist_ok=True)
    write_json(assets / "config.json", {**original, "model_type": config.family})
    describe_into(out, config, assets)
    return read_json(out / "config.json")


def describe_into(folder, config, assets=None):
    for name, content in describe_model(config, {}, torch.float32, assets).items():
        (folder / name).write_bytes(content)


def test_code_that_is_not_written_is_not_named(tmp_path):
    original = {
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
    }
    written = write(families()["deepseek_v3"].presets["debug"], original, tmp_path)
    assert "auto_map" not in written and written["aux_loss_alpha"] == 0.001
    hf = {
        **original,
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    out = tmp_path / "transformers"
    out.mkdir(exist_ok=True)
    describe_into(out, transformers_config(hf, "config.json"))
    written = read_json(out / "config.json")
    assert "auto_map" not in written and written["head_dim"] == 32


def test_what_transformers_refuses_is_named_with_the_file(tmp_path):
    """The error comes before any training, because this description is built before the first
    step.
    """
    config = families()["llama"].presets["debug"]
    hf = {**families()["llama"].to_hf(config), "model_type": "llama", "hidden_size": 90}
    write_json(tmp_path / "config.json", hf)
    config = replace(config, hidden_size=90)
    text = error_of(CheckpointError, describe_model, config, {}, torch.float32, tmp_path)
    assert "refuses the config.json to be saved: " in text and "hidden size (90)" in text
    assert f"{tmp_path}/config.json, [model]" in text and "space" not in text


def test_generation_stops_where_trained_answers_end(tmp_path):
    path = tmp_path / "generation_config.json"
    for known, eos in [
        ({}, [7, 3]),
        ({"eos_token_id": 3}, [3, 7]),
        ({"eos_token_id": [7, 3]}, [7, 3]),
    ]:
        write_json(path, known | {"top_k": 5})
        written = json.loads(
            describe_model(QWEN3, {}, torch.float32, tmp_path, [7, 3])["generation_config.json"]
        )
        assert (written["eos_token_id"], written["top_k"]) == (eos, 5)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: generation_config.json "):
        describe_model(QWEN3, {}, torch.float32, tmp_path, [3])


def test_what_there_is_for_each_layer_is_derived_anew(tmp_path):
    original = {
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "max_window_layers": 5,
        "x": [1] * 4,
    }
    written = write(QWEN3, original, tmp_path)
    assert written["layer_types"] == ["full_attention"] * QWEN3.num_layers
    assert written["max_window_layers"] == QWEN3.num_layers and written["x"] == [1] * 4


ROPES = {
    "default": None,
    "linear": RopeScaling("linear", factor=2.0),
    "llama3": RopeScaling("llama3", factor=8.0, original_max_position_embeddings=512),
    "yarn": replace(YARN, beta_fast=20.0),
}


@pytest.mark.parametrize("family", sorted(families()))
def test_older_readers_find_every_key_under_its_older_name(tmp_path, family):
    """Transformers 4 ignores `rope_parameters` and would use its defaults; titanlite reads both
    forms.
    """
    if families()[family].has_rope_by_kind:
        pytest.skip("transformers 4 has no common names for a table per kind of layer")
    for scaling in ROPES:
        if family == "gpt_oss" and scaling == "default":
            continue  # gpt-oss's class accepts YaRN only
        config = replace(
            families()[family].presets["debug"], rope_theta=12345.0, rope_scaling=ROPES[scaling]
        )
        if family == "glm4_moe":
            config = replace(config, partial_rotary_factor=0.25)
        written = write(config, {}, tmp_path)
        newer = {"rope_parameters": written.pop("rope_parameters")}
        older = {"model_type", "rope_theta", "rope_scaling", "partial_rotary_factor"}
        if "num_local_experts" in written:
            newer["num_local_experts"] = written.pop("num_local_experts")
            older.add("num_experts")
        write_json(tmp_path / "older.json", written)
        assert model_config_from_hf(tmp_path / "older.json") == config
        rest = {
            key: value for key, value in written.items() if key == "model_type" or key not in older
        }
        write_json(tmp_path / "newer.json", rest | newer)
        assert model_config_from_hf(tmp_path / "newer.json") == config


PUBLISHED = read_json(Path(__file__).parents[1] / "models/published_configs.json")
NOT_WRITTEN = read_json(Path(__file__).with_name("keys_not_written.json"))
DOTS1 = PUBLISHED["Moonlight-16B-A3B"].keys() - NOT_WRITTEN["of latent attention"]


def test_a_flavor_is_written_with_the_keys_of_a_published_folder(tmp_path):
    rows = [(hf["model_type"], flavor, hf.keys()) for flavor, hf in PUBLISHED.items()]
    # A published dots.llm1 has the expert keys of DeepSeek-V3, but not its attention.
    dots1 = DOTS1 | {"sliding_window", "max_window_layers"}
    for name, flavor, keys in [*rows, ("dots1", "debug", dots1)]:
        family = families()[name]
        written = write(family.presets[flavor], {}, tmp_path)
        lacking = keys - {*NOT_WRITTEN["of any family"]} - written.keys()
        assert lacking <= {*NOT_WRITTEN["of a family"].get(name, ())}
        assert family.from_hf(written, "config.json") == family.presets[flavor]
        if "scoring_func" in keys:
            router = [written[key] for key in ("scoring_func", "topk_method", "moe_layer_freq")]
            assert router == ["sigmoid", "noaux_tc", 1]


@pytest.mark.parametrize("family", sorted(families()))
def test_the_scaling_of_the_run_is_read_back_and_the_table_keeps_what_the_folder_said(
    tmp_path, family
):
    """The original scaling may be in several places, and one of them would override the run's own
    scaling.
    """
    config = replace(families()[family].presets["debug"], rope_scaling=YARN)
    top = {"original_max_position_embeddings": 512}
    table = {"rope_type": "yarn", "factor": 2.0, **top}
    for original in ({"rope_scaling": table}, top, {"rope_scaling": table, **top}):
        write(config, original, tmp_path)
        assert model_config_from_hf(tmp_path / "out") == config
    if families()[family].has_rope_by_kind:
        return  # it has a table for each kind of layer
    table = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    # a key of another type has no effect, and is kept
    table |= {"beta_fast": 32, "finetuned": True, "low_freq_factor": 2.0}
    for form in ("rope_scaling", "rope_parameters"):
        written = write(config, {form: table}, tmp_path)
        for name in ("rope_scaling", "rope_parameters"):
            assert {**written[name], **table} == written[name]
        assert model_config_from_hf(tmp_path / "out") == config


def test_a_rotary_table_of_another_type_leaves_nothing(tmp_path):
    """The run overrode the type, so an entry of the folder's table would describe a scaling that is
    no longer used.
    """
    config = replace(families()["qwen3"].presets["debug"], rope_scaling=ROPES["linear"])
    table = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "finetuned": True,
    }
    written = write(config, {"rope_parameters": table}, tmp_path)
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


ROPE_OF_4 = read_json(Path(__file__).with_name("rope_of_transformers_4.json"))


@pytest.mark.parametrize("form", ["older", "newer"])
@pytest.mark.parametrize("model_type", ROPE_OF_4)
def test_models_of_transformers_have_the_rotary_keys_of_4(tmp_path, model_type, form):
    """The older keys are written whether the folder is from transformers 4 or 5, and transformers 5
    reads the same values as without them.
    """
    from transformers import AutoConfig

    hf = {**TEXT_SIZES, "model_type": model_type, **ROPE_OF_4[model_type]}
    read = AutoConfig.for_model(**json.loads(json.dumps(hf)))
    if form == "newer":
        read.save_pretrained(tmp_path / "newer")
        hf = read_json(tmp_path / "newer" / "config.json")
        assert "rope_theta" not in hf
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    describe_into(out, transformers_config(hf, "config.json"))
    written = read_json(out / "config.json")
    assert (
        written["rope_parameters"]
        == read.rope_parameters
        == AutoConfig.from_pretrained(out).rope_parameters
    )
    assert {key: written[key] for key in ROPE_OF_4[model_type]} == ROPE_OF_4[model_type]


def test_tables_of_kinds_of_layers_are_as_of_transformers_5(tmp_path):
    from transformers import AutoConfig

    hf = TEXT_SIZES | {"model_type": "gemma3_text", "rope_local_base_freq": 7e3}
    describe_into(tmp_path, transformers_config(hf, "config.json"))
    rope = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert rope["sliding_attention"]["rope_theta"] == 7e3
    assert "rope_theta" not in read_json(tmp_path / "config.json")


NAMED = {"image_token": "<image>"}
# What tokenizer_config.json says of special tokens, and which of them have names.
SPECIAL = {
    "list": ({"additional_special_tokens": ["<turn>"]}, {}),
    "table": ({"extra_special_tokens": NAMED | {"boi": "<boi>"}}, NAMED | {"boi": "<boi>"}),
    "keys": (NAMED, NAMED),
    "both": ({"extra_special_tokens": NAMED, "additional_special_tokens": ["<turn>"]}, NAMED),
}


@pytest.mark.parametrize("form", SPECIAL)
def test_special_tokens_of_a_saved_tokenizer_are_what_both_versions_read(tmp_path, form):
    """Transformers 5 writes each named token as a key. Version 4 ignores such keys, would take the
    image token for a word, and raises an error for a list of extra tokens. Keys that say how a file
    was loaded are not saved.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    table, named = SPECIAL[form]
    words = ["<eos>", "<turn>", "<image>", "<boi>", "a"]
    vocab = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    inner.add_special_tokens(words[:-1])
    inner.save(str(tmp_path / "tokenizer.json"))
    table = {"eos_token": "<eos>", "unk_token": "<eos>", **table}
    table["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(tmp_path / "tokenizer_config.json", table)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    special = set(tokenizer.all_special_ids)
    unnamed = tokenizer.extra_special_tokens  # transformers 5.17 drops the list of "both"
    assert special >= {0, 2 if named else 1}
    for folder in (tmp_path / "first", tmp_path / "again"):
        folder.mkdir()
        save_tokenizer(tokenizer, folder)
        written = read_json(folder / "tokenizer_config.json")
        assert written.get("extra_special_tokens", {}) == named
        assert written.get("additional_special_tokens", []) == unnamed
        assert written["tokenizer_class"] == table["tokenizer_class"]
        loading = {"is_local", "local_files_only", "name_or_path", "model_specific_special_tokens"}
        assert not loading & written.keys()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        assert set(tokenizer.all_special_ids) == special
        assert not named or tokenizer.image_token == "<image>"
        assert tokenizer("a<image><turn>")["input_ids"] == [4, 2, 1]
