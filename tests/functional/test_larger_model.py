"""Qwen3.5 as it is published: a model of images and text, whose text model is native."""

import shutil

import pytest
import torch
import transformers
from files import read_json, write_json
from safetensors.torch import load_file, save_file

from titanlite.assemble import assemble
from titanlite.checkpoint.commit import check_folder
from titanlite.config import load_config
from titanlite.config.model import ModelConfig
from titanlite.features.tools.export import main as export
from titanlite.models.families import any_model_config_from_hf
from titanlite.preflight import check

PREFIX = "model.language_model."
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-3,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
# Keys that transformers does not know, or that the decoder has in another way.
MORE = {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
FAMILIES = {"qwen3_5": {"intermediate_size": 96}, "qwen3_5_moe": {**EXPERTS, "mlp_only_layers": []}}


def stored(folder):
    """All tensors of the model in `folder`, whatever its files."""
    return {
        key: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for key, tensor in load_file(path).items()
    }


@pytest.fixture
def published(pretrained, tmp_path):
    """`published(model_type, tied, dtype)`: a folder as on the hub, with random weights."""

    def make(model_type, *, tied=False, dtype=torch.float32):
        words = pretrained("words", 0.1, "--model.name=qwen3_5_text")
        vocab_size = read_json(words / "config.json")["vocab_size"]
        text = {**TEXT, **FAMILIES[model_type], "vocab_size": vocab_size}
        hf = transformers.AutoConfig.for_model(
            model_type,
            text_config={**text, "tie_word_embeddings": tied},
            vision_config={**VISION, "out_hidden_size": 64},
            tie_word_embeddings=tied,
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(hf, dtype=torch.float32)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn(param.shape) * 0.05)
        folder = tmp_path / "base"
        model.to(dtype).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(words / name, folder / name)
        (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')
        path = folder / "config.json"
        table = read_json(path)
        table["text_config"] |= MORE
        write_json(path, table)
        more = {
            "mtp.fc.weight": torch.randn(64, 128, dtype=torch.bfloat16),
            "mtp.layers.0.mlp.experts.1.up_proj.weight": torch.randn(32, 64),
        }
        save_file(stored(folder) | more, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.fixture
def train(run_ranks, text_folder, tmp_path):
    """`train(base, *overrides)` on two ranks; returns the last checkpoint."""

    def run(base, *overrides, name="run", steps=2, ranks=2):
        config = tmp_path / "job.toml"
        config.write_text(
            f'[model]\npath = "{base}"\n[data]\ndataset = "text"\npath = "{text_folder}"\n'
            "[training]\nseq_len = 32\nlocal_batch_size = 1\nglobal_batch_size = 4\n"
            "[metrics]\nenable_tensorboard = false\n[optimizer]\nlr = 1e-3\n"
        )
        given = [
            *("--config", str(config), f"--job.dump_folder={tmp_path / name}"),
            *(f"--training.steps={steps}", *overrides),
        ]
        job = check(load_config(given), ranks)
        run_ranks(ranks, lambda: assemble(job).train())
        return tmp_path / name / f"checkpoint/step-{steps}"

    return run


def load(folder, auto="AutoModelForImageTextToText"):
    model, info = getattr(transformers, auto).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    return model, {key: value for key, value in info.items() if value}


@pytest.mark.parametrize(
    ("model_type", "tied", "mesh"),
    [
        pytest.param(
            *("qwen3_5", False, ["--parallelism.tensor_parallel_degree=2"]),
            marks=pytest.mark.full,
        ),
        ("qwen3_5", True, []),
        ("qwen3_5_moe", False, ["--parallelism.expert_parallel_degree=2"]),
    ],
)
def test_what_is_saved_is_the_whole_model_with_its_text_trained(
    published, train, tmp_path, model_type, tied, mesh
):
    base = published(model_type, tied=tied)
    assert isinstance(any_model_config_from_hf(base, "here"), ModelConfig)
    before = stored(base)
    last = train(base, *mesh)
    got = stored(last)
    assert got.keys() == before.keys() and check_folder(last, checksums=True) == []
    for key, tensor in before.items():
        is_text = key.startswith((PREFIX, "lm_head"))
        assert got[key].dtype == tensor.dtype and got[key].shape == tensor.shape
        assert torch.equal(got[key], tensor) != is_text, key
    table, original = (read_json(x / "config.json") for x in (last, base))
    for key in ("architectures", "model_type", "vision_config", "image_token_id"):
        assert table[key] == original[key], key
    for key, value in original["text_config"].items():
        assert table["text_config"][key] == value, key
    assert table["tie_word_embeddings"] is tied
    assert (last / "preprocessor_config.json").read_text() == '{"patch_size": 4}'

    model, info = load(last)
    assert type(model).__name__ == original["architectures"][0] and info == {}
    tokens = torch.arange(24).view(2, 12)
    alone, info = load(last, "AutoModelForCausalLM")
    assert info == {} and torch.equal(model(tokens).logits, alone(tokens).logits)
    saved = model.state_dict()
    assert all(torch.equal(saved[key], got[key]) for key in got.keys() & saved.keys())

    # A run goes on from there, and exports.
    further = stored(train(base, *mesh, steps=3))
    assert further.keys() == before.keys()
    assert torch.equal(
        further["model.visual.pos_embed.weight"], got["model.visual.pos_embed.weight"]
    )
    assert export([str(last), str(tmp_path / "out"), "--dtype", "bfloat16"]) in (0, None)
    out = stored(tmp_path / "out")
    assert out.keys() == before.keys() and load(tmp_path / "out")[1] == {}
