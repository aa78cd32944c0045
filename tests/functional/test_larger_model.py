"""Qwen3.5 as it is published: a model of images and text, whose text model is native in
titanlite.
"""

import shutil

import pytest
import torch
import transformers
from files import read_json, write_json
from peft import PeftModel
from safetensors.torch import save_file

from tests.functional.conftest import MESHES, NO_PRESET, weekly
from tests.loading import refusal, stored
from tests.unit.checkpoint.test_hf_model import split_experts
from titanlite.checkpoint.commit import check_folder
from titanlite.config.model import ModelConfig
from titanlite.features.tools.export import main as export
from titanlite.models.families import any_model_config_from_hf

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
# transformers does not know these keys, or the decoder stores them differently.
MORE = {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
# The steps are large enough to change a bfloat16 number near 1.
IN_BFLOAT16 = ["--checkpoint.export_dtype=bfloat16", "--optimizer.lr=1e-2"]
FAMILIES = {"qwen3_5": {"intermediate_size": 96}, "qwen3_5_moe": {**EXPERTS, "mlp_only_layers": []}}


@pytest.fixture
def published(pretrained, tmp_path):
    """`published(model_type, ...)`: a folder as on the hub, with random weights; in bfloat16
    `A_log` and the norm behind it stay in float32. `is_base`: as `AutoModel` saves it.
    """

    def make(model_type, *, tied=False, dtype=torch.float32, is_fused=True, is_base=False):
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
        table["text_config"] |= {**MORE, "dtype": table["dtype"]}
        write_json(path, table)
        more = {
            "mtp.fc.weight": torch.randn(64, 128, dtype=torch.bfloat16),
            "mtp.layers.0.mlp.experts.1.up_proj.weight": torch.randn(32, 64),
        }
        tensors = stored(folder)
        for key, tensor in model.float().state_dict().items():
            if key.endswith(("A_log", "linear_attn.norm.weight")):
                tensors[key] = tensor
        if not is_fused:
            tensors = split_experts(tensors)
        if is_base:
            tensors = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
            tensors.pop("lm_head.weight", None)
        save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.fixture
def train(train_into, tmp_path):
    """`train(base, mesh, *overrides)` on two ranks; returns the last checkpoint."""

    def run(base, mesh, *overrides, steps=2):
        model = [*NO_PRESET, f"--model.path={base}", "--moe.expert_bias_update_rate=none"]
        size = "--training.global_batch_size=4"
        train_into(
            tmp_path / "run",
            MESHES[mesh],
            *model,
            size,
            f"--training.steps={steps}",
            *overrides,
        )
        return tmp_path / f"run/checkpoint/step-{steps}"

    return run


def load(folder, auto="AutoModelForImageTextToText"):
    model, info = getattr(transformers, auto).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    return model, {key: value for key, value in info.items() if value}


@pytest.mark.parametrize(
    ("model_type", "form", "settings"),
    [
        weekly("qwen3_5", {}, ["TP2"]),
        ("qwen3_5", {"tied": True, "dtype": torch.bfloat16}, ["FSDP2", *IN_BFLOAT16]),
        weekly("qwen3_5_moe", {"is_fused": False}, ["FSDP2"]),
        ("qwen3_5_moe", {"tied": True, "is_base": True}, ["EP2"]),
    ],
)
def test_what_is_saved_is_the_whole_model_with_its_text_trained(
    published, train, tmp_path, model_type, form, settings
):
    base = published(model_type, **form)
    assert isinstance(any_model_config_from_hf(base, "here"), ModelConfig)
    before = {
        key if key.startswith(("model.", "lm_head.", "mtp.")) else f"model.{key}": tensor
        for key, tensor in stored(base).items()
    }
    last = train(base, *settings)
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
    assert table["tie_word_embeddings"] is form.get("tied", False)
    assert (last / "preprocessor_config.json").read_text() == '{"patch_size": 4}'

    model, info = load(last)
    assert type(model).__name__ == original["architectures"][0] and info == {}
    tokens = torch.arange(24).view(2, 12)
    alone, info = load(last, "AutoModelForCausalLM")
    assert info == {} and torch.equal(model(tokens).logits, alone(tokens).logits)
    saved = model.state_dict()
    both = got.keys() & saved.keys()
    assert both and all(torch.equal(saved[key], got[key].float()) for key in both)

    # The run can be resumed from this checkpoint, and the checkpoint can be exported.
    further = stored(train(base, *settings, steps=3))
    assert further.keys() == before.keys()
    assert torch.equal(
        further["model.visual.pos_embed.weight"], got["model.visual.pos_embed.weight"]
    )
    assert export([str(last), str(tmp_path / "out"), "--dtype", "bfloat16"]) in (0, None)
    out = stored(tmp_path / "out")
    assert out.keys() == before.keys() and load(tmp_path / "out")[1] == {}


def test_a_base_model_without_a_head_is_refused(published):
    text = refusal(published("qwen3_5", is_base=True))
    assert "lm_head.weight: missing" in text and "has the base model alone" in text


# peft asks for it
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_of_the_text_model_are_those_of_the_whole_for_peft(published, train, tmp_path):
    base = published("qwen3_5_moe")
    before = stored(base)
    last = train(base, "FSDP2", "--lora.rank=4")
    assert export([str(last), str(tmp_path / "out"), "--merge", "--dtype", "float32"]) in (0, None)
    out = stored(tmp_path / "out")
    assert out.keys() == before.keys()
    for key, tensor in before.items():
        assert torch.equal(out[key], tensor) or key.startswith(PREFIX), key
    merged, info = load(tmp_path / "out")
    whole = PeftModel.from_pretrained(load(base)[0], last)
    tokens = torch.arange(24).view(2, 12)
    logits, expected = (model(tokens).logits for model in (merged, whole))
    assert info == {} and (logits - expected).norm() <= 1e-5 * expected.norm()
    with whole.disable_adapter():
        assert (whole(tokens).logits - expected).norm() > 1e-4 * expected.norm()
