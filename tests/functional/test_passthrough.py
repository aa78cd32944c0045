"""Tensors of a folder that its model does not compute are in every checkpoint of a run and in every
export, streamed.
"""

import shutil

import pytest
import torch
import transformers
from files import read_json
from safetensors.torch import load_file, save_file

from tests.functional.conftest import NO_PRESET
from tests.loading import stored
from titanlite.checkpoint.commit import check_folder
from titanlite.config.parallelism import Degrees
from titanlite.features.tools.export import main as export

LAYER = "model.layers.3."
EMBEDDING, HEAD = f"{LAYER}embed_tokens.weight", f"{LAYER}shared_head.head.weight"
GLM = ("--model.name=glm4_moe", "--model.overrides.num_layers=3")


def prediction_layer(tensors, dtype=torch.bfloat16):
    """Return a layer for multi-token prediction after the last layer of `tensors`, with copies of
    embedding and head.
    """
    width = tensors["model.embed_tokens.weight"].shape[1]
    layer = {
        f"{LAYER}eh_proj.weight": torch.randn(width, 2 * width, dtype=torch.bfloat16),
        f"{LAYER}enorm.weight": torch.randn(width, dtype=torch.float32),
        f"{LAYER}mlp.experts.gate_up_proj": torch.randn(3, 7, width, dtype=torch.bfloat16),
        f"{LAYER}empty": torch.empty(0, 3),
        f"{LAYER}scalar": torch.tensor(7, dtype=torch.int64),
    }
    return layer | {
        EMBEDDING: tensors["model.embed_tokens.weight"].clone(),
        HEAD: tensors["lm_head.weight"].clone(),
    }


def is_same(got, expected):
    """Check that `got` has all of `expected`, except for the copies, with the same dtypes and
    bits.
    """
    pairs = [(got[key], tensor) for key, tensor in expected.items() if key not in (EMBEDDING, HEAD)]
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def follows(got, base):
    """Check that embedding and head were trained, and that their copies equal the trained ones."""
    pairs = [("model.embed_tokens.weight", EMBEDDING), ("lm_head.weight", HEAD)]
    return all(torch.equal(got[a], got[b]) and not torch.equal(got[a], base[a]) for a, b in pairs)


@pytest.fixture
def train(train_into, tmp_path):
    """`train(degrees, *overrides)` in one run's folder; returns its newest checkpoint."""

    def run(degrees, *overrides):
        train_into(tmp_path / "run", degrees, *overrides)
        return max(
            (tmp_path / "run/checkpoint").glob("step-*"),
            key=lambda path: int(path.name.partition("-")[2]),
        )

    return run


def test_a_prediction_layer_survives_training_resumes_other_meshes_and_export(
    train, pretrained, tmp_path
):
    base = shutil.copytree(
        pretrained("glm", 0.1, *GLM), tmp_path / "base", ignore=shutil.ignore_patterns("titanlite")
    )
    tensors = load_file(base / "model.safetensors")
    layer = prediction_layer(tensors)
    save_file(tensors | layer, base / "model.safetensors", {"format": "pt"})
    weights = f"--checkpoint.initial_load_path={base}"

    first = train(Degrees(dp_shard=2), *GLM, weights, "--training.steps=2")
    got = stored(first)
    assert is_same(got, layer) and follows(got, tensors)
    assert read_json(first / "config.json")["num_nextn_predict_layers"] == 1
    assert check_folder(first, checksums=True) == []

    # From here on each checkpoint is the source of the next one, because old checkpoints are
    # removed at once.
    (base / "model.safetensors").unlink()
    keeping_one = (
        "--checkpoint.interval=1",
        "--checkpoint.keep_latest_k=1",
        "--checkpoint.async_mode=async",
    )
    last = train(Degrees(tp=2, dp_shard=2, ep=2), *GLM, weights, *keeping_one, "--training.steps=5")
    assert last.name == "step-5" and [path.name for path in last.parent.glob("step-*")] == [
        "step-5"
    ]
    again = stored(last)
    assert is_same(again, layer) and follows(again, got)
    assert check_folder(last, checksums=True) == []

    # Pipeline stages also share the files.
    last = train(
        Degrees(dp_shard=1, pp=2),
        *GLM,
        weights,
        "--training.steps=6",
    )
    again, before = stored(last), again
    assert last.name == "step-6" and is_same(again, layer) and follows(again, before)

    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(last, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and info["unexpected_keys"] == set(layer)
    own = {key: tensor for key, tensor in again.items() if key not in layer}
    shutil.copytree(
        last, tmp_path / "alone", ignore=shutil.ignore_patterns("*.safetensors*", "titanlite")
    )
    save_file(own, tmp_path / "alone/model.safetensors", {"format": "pt"})
    alone = load(tmp_path / "alone", dtype=torch.float32)
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens).logits, alone(tokens).logits)

    assert export([str(last), str(tmp_path / "out"), "--dtype", "float16"]) in (0, None)
    out = stored(tmp_path / "out")
    assert is_same(out, layer) and out["model.embed_tokens.weight"].dtype == torch.float16
    assert torch.equal(out[EMBEDDING], out["model.embed_tokens.weight"])
    assert torch.equal(out[HEAD], out["lm_head.weight"])
    assert read_json(tmp_path / "out/config.json")["num_nextn_predict_layers"] == 1


def test_through_transformers_class_and_from_the_base_of_adapters(train_into, pretrained, tmp_path):
    """On 2 ranks, files of adapters do not have these tensors, and merging takes them from the
    base.
    """
    base = shutil.copytree(
        pretrained("glm", 0.1, *GLM), tmp_path / "base", ignore=shutil.ignore_patterns("titanlite")
    )
    tensors = load_file(base / "model.safetensors")
    more = prediction_layer(tensors) | {
        "mtp.table": torch.arange(9),
        "mtp.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | more, base / "model.safetensors", {"format": "pt"})
    settings = [*NO_PRESET, f"--model.path={base}", "--training.steps=2"]
    settings.append("--moe.expert_bias_update_rate=none")

    def train(name, *overrides):
        train_into(tmp_path / name, Degrees(dp_shard=2), *settings, *overrides)
        return tmp_path / name / "checkpoint/step-2"

    got = stored(train("full", "--model.implementation=transformers"))
    assert got.keys() == {*tensors, *more} and follows(got, tensors)
    assert is_same(got, {key: tensor for key, tensor in more.items() if key != "mtp.head.weight"})
    assert torch.equal(got["mtp.head.weight"], got["lm_head.weight"])

    adapters = train("lora", "--lora.rank=2")
    assert not [key for key in stored(adapters) if "lora_" not in key]
    assert export([str(adapters), str(tmp_path / "out"), "--merge", "--dtype", "float32"]) in (
        0,
        None,
    )
    out = stored(tmp_path / "out")
    assert out.keys() == {*tensors, *more} and is_same(out, more)
    assert torch.equal(out[EMBEDDING], tensors["model.embed_tokens.weight"])
