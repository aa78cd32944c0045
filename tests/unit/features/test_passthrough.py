"""Which tensors pass through, what becomes of them, and that they are never in memory."""

import dataclasses

import pytest
import torch
import transformers
from files import error_of, read_json, read_table, write_json
from safetensors.torch import load_file, save_file

from tests.saving import model_files, save_hf_model
from titanlite.base.errors import CheckpointError, PlanError
from titanlite.checkpoint import reader
from titanlite.checkpoint.hf_model import weights_of
from titanlite.checkpoint.pieces import find_passthrough
from titanlite.checkpoint.writer import create_files, snapshot, write_items
from titanlite.features.passthrough import find_carried
from titanlite.features.tools.export import export_checkpoint
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families

GLM, QWEN3 = (families()[name].presets["debug"] for name in ("glm4_moe", "qwen3"))
LAYER = f"model.layers.{GLM.num_layers}."
COPY_OF_EMBEDDING, COPY_OF_HEAD = f"{LAYER}embed_tokens.weight", f"{LAYER}shared_head.head.weight"
EH_PROJ = {f"{LAYER}eh_proj.weight": torch.randn(8, 16, generator=torch.Generator().manual_seed(1))}


def save(config, folder):
    model = build_decoder(config)
    save_hf_model(model, materialize(model, "cpu", seed=4), None, folder, torch.float32)


@pytest.fixture
def saved(tmp_path, one_rank):
    """A GLM-4.5 without a layer for prediction."""
    save(GLM, tmp_path / "model")
    return tmp_path / "model"


def with_more(saved, folder, more, **config):
    """Copy the model to `folder` with `more` tensors and settings in config.json; return its own
    tensors.
    """
    folder.mkdir()
    tensors = load_file(saved / "model.safetensors")
    save_file(
        tensors | {key: tensor.clone() for key, tensor in more.items()},
        folder / "model.safetensors",
    )
    table = read_json(saved / "config.json") | config
    write_json(folder / "config.json", table)
    return tensors


def carried_in(folder, config=GLM):
    """Plan and passthrough tensors of a native model in `folder`."""
    model = build_decoder(config)
    source = weights_of(folder, model, exact=True)
    plan = materialize(model, "cpu", [source])
    return plan, find_carried([source], config, torch.bfloat16)


@pytest.mark.parametrize(
    ("key", "is_one"),
    [
        ("mtp.fc.weight", True),
        ("model.visual.blocks.0.attn.qkv.weight", True),
        ("multi_modal_projector.linear.weight", True),
        ("model.layers.2.eh_proj.weight", True),
        ("model.layers.2.mlp.experts.0.up_proj.weight", True),  # in a layer with eh_proj
        ("model.language_model.layers.9.eh_proj.weight", True),
        ("model.layers.3.mlp.up_proj.weight", False),  # a layer too many, which predicts nothing
        ("model.layers.1.eh_proj.weight", False),  # in a layer that is computed
        ("model.vision_part.head.weight", False),  # another tensor of the part is computed
        ("extra.weight", False),
        ("passed.over.by.transformers", True),
        ("model.layers.2.rotary_emb.inv_freq", False),  # from the configuration
    ],
)
def test_which_tensors_may_be_carried(key, is_one):
    used = {
        "model.layers.1.mlp.up_proj.weight",
        "model.embed_tokens.weight",
        "model.vision_part.proj.weight",
    }
    keys = [*used, "model.layers.2.eh_proj.weight", key]
    assert (key in find_passthrough(keys, used, ["^passed.over"])) == is_one


def test_what_neither_is_computed_nor_passes_through_is_refused(saved, tmp_path):
    with_more(saved, tmp_path / "base", EH_PROJ | {"model.layers.0.mlp.up.weight": torch.ones(2)})
    said = error_of(PlanError, carried_in, tmp_path / "base")
    text = (
        "unexpected, checkpoint {} has it and the model does not. Correct its name, or remove it "
        "there."
    )
    assert said.endswith(f"model.layers.0.mlp.up.weight: {text.format(tmp_path / 'base')}")


def test_of_a_tied_model_the_copy_of_the_head_follows_the_embedding(tmp_path, one_rank):
    config = dataclasses.replace(QWEN3, tie_word_embeddings=True)
    save(config, tmp_path / "model")
    embedding = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"]
    with_more(
        tmp_path / "model",
        tmp_path / "base",
        {"lm_head.weight": embedding, "mtp.lm_head.weight": embedding},
    )
    plan, carried = carried_in(tmp_path / "base", config)
    with torch.no_grad():
        plan.model.model.embed_tokens.weight.add_(1)
    files = carried.add_to(model_files(plan, config, torch.float32))
    assert {item.key for file in files for item in file.items} >= {"mtp.lm_head.weight"}
    create_files(tmp_path, files)
    write_items(tmp_path, files, "writing")
    assert torch.equal(
        load_file(tmp_path / "model.safetensors")["mtp.lm_head.weight"], embedding + 1
    )


def test_fp8_is_dequantized_as_the_trained_weights_are(saved, tmp_path):
    key, block = f"{LAYER}mlp.down_proj.weight", [4, 3]
    codes = torch.randn(10, 8).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3)
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    more = EH_PROJ | {key: codes, f"{key}_scale_inv": scale}
    with_more(saved, tmp_path / "base", more, quantization_config=quantization)
    export_checkpoint(tmp_path / "base", tmp_path / "out", torch.float32)
    got = load_file(tmp_path / "out/model.safetensors")
    spread = scale.repeat_interleave(4, 0)[:10].repeat_interleave(3, 1)[:, :8]
    assert torch.equal(got[key], codes.float() * spread) and f"{key}_scale_inv" not in got
    assert torch.equal(got[f"{LAYER}eh_proj.weight"], EH_PROJ[f"{LAYER}eh_proj.weight"])
    config = read_json(tmp_path / "out/config.json")
    assert "quantization_config" not in config and config["num_nextn_predict_layers"] == 1
    assert "num_mtp_layers" not in config

    with_more(saved, tmp_path / "bad", EH_PROJ | {key: codes, f"{key}_scale_inv": scale[:2]})
    with pytest.raises(
        CheckpointError,
        match=rf"{key}_scale_inv has shape .* Dequantize the checkpoint with transformers first\.",
    ):
        carried_in(tmp_path / "bad")


def test_they_are_never_in_memory(saved, tmp_path, monkeypatch):
    """Of one tensor of 96 MiB the largest buffer has 1 MiB, also when the shards are copied for the
    background.
    """
    large = torch.arange(12 << 20, dtype=torch.int64).view(3, 4, -1)
    with_more(saved, tmp_path / "base", {"mtp.large": large})
    plan, carried = carried_in(tmp_path / "base")
    sizes = []
    read = reader.read_bytes

    def counting(files, file, view, offset):
        sizes.append(len(view))
        read(files, file, view, offset)

    monkeypatch.setattr(reader, "read_bytes", counting)
    files, _ = snapshot(carried.add_to(model_files(plan, GLM, torch.float32)), {})
    assert sizes == []
    create_files(tmp_path, files)
    write_items(tmp_path, files, "writing")
    assert max(sizes) == 1 << 20 and sum(sizes) == large.nbytes == carried.nbytes
    assert torch.equal(load_file(tmp_path / "model.safetensors")["mtp.large"], large)


def test_the_text_part_of_a_larger_model_stays_a_part_of_it(tmp_path):
    """Vision tower and config.json survive, so that the whole can be loaded again."""
    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3_5Config(**read_table("tiny_qwen3_5"))
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    table = read_json(tmp_path / "whole/config.json")
    table["architectures"] = ["Qwen3_5ForCausalLM"]
    write_json(tmp_path / "whole/config.json", table)
    with_more(tmp_path / "whole", tmp_path / "base", {"mtp.fc.weight": torch.randn(32, 64)})
    export_checkpoint(tmp_path / "base", tmp_path / "out", torch.float32)
    base, out = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert base.keys() == out.keys() and all(torch.equal(base[key], out[key]) for key in base)
    assert read_json(tmp_path / "out/config.json")["vision_config"]["depth"] == 1
    load = transformers.Qwen3_5ForConditionalGeneration.from_pretrained
    _, info = load(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    tokens = torch.arange(10)[None]
    loaded = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("base", "out")
    ]
    assert torch.equal(loaded[0](tokens).logits, loaded[1](tokens).logits)
