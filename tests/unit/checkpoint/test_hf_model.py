"""A Hugging Face folder as a source: which stored tensors make up the model's tensors, and all
mismatches.
"""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from files import error_of
from safetensors.torch import save_file

from tests.loading import hf_checkpoint
from titanlite.base.errors import PlanError
from titanlite.checkpoint import hf_model
from titanlite.materialize import build_plan, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families

QWEN3, LLAMA, QWEN3_MOE, DOTS1, GLM4_MOE = (
    families()[name].presets["debug"]
    for name in ("qwen3", "llama", "qwen3_moe", "dots1", "glm4_moe")
)
TIED = replace(QWEN3, tie_word_embeddings=True)
UNTIED = replace(QWEN3, tie_word_embeddings=False)


def weights_of(config):
    """Return all persistent tensors of a model by name; the bias of each expert is a recognizable
    number.
    """
    model = build_decoder(config)
    materialize(model, "cpu", seed=3)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith("expert_bias"):
            tensor.copy_(torch.arange(1.0, len(tensor) + 1))
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def split_experts(weights, bias_name=None):
    """Return `weights` in Hugging Face's layout: one tensor per expert, and gate and up apart."""
    stored = {}
    for name, tensor in weights.items():
        prefix, leaf = name.rsplit(".", 1)
        if leaf == "expert_bias":
            if bias_name is not None:
                stored[f"{prefix}.{bias_name}"] = tensor
        elif leaf in ("gate_up_proj", "down_proj"):
            for expert, matrix in enumerate(tensor):
                if leaf == "down_proj":
                    stored[f"{prefix}.{expert}.down_proj.weight"] = matrix.clone()
                else:
                    gate, up = matrix.chunk(2)
                    stored[f"{prefix}.{expert}.gate_proj.weight"] = gate.clone()
                    stored[f"{prefix}.{expert}.up_proj.weight"] = up.clone()
        else:
            stored[name] = tensor
    return stored


def save(folder, stored, file="model.safetensors"):
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, path, {"format": "pt"})
    return folder


def load(folder, config, **options):
    """Return the tensors of a model that is read from `folder`."""
    model = build_decoder(config)
    materialize(model, "cpu", [hf_checkpoint(folder, config, **options)])
    return dict(model.state_dict())


def refusal(folder, config):
    return error_of(PlanError, build_plan, build_decoder(config), [hf_checkpoint(folder, config)])


def assert_equal(got, expected, but=()):
    for name, tensor in expected.items():
        if not name.endswith(tuple(but)):
            assert torch.equal(got[name], tensor), name


# ---- valid folders ----


def test_dense_model_and_what_other_programs_add(tmp_path):
    weights = weights_of(UNTIED)
    extra = {
        f"model.{place}rotary_emb.inv_freq": torch.ones(8) for place in ("", "layers.0.self_attn.")
    }
    assert_equal(load(save(tmp_path, weights | extra), UNTIED), weights)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    weights = weights_of(GLM4_MOE)
    stored = split_experts(weights, "e_score_correction_bias")
    mtp = {
        "model.layers.3.eh_proj.weight": torch.ones(64, 128),
        "model.layers.3.embed_tokens.weight": torch.ones(2048, 64),
        "model.layers.3.mlp.experts.0.gate_proj.weight": torch.ones(32, 64),
    }
    assert_equal(load(save(tmp_path, stored | mtp), GLM4_MOE), weights)
    # A model with one more layer would take this for a decoder layer, which has unexpected tensors.
    refused = refusal(save(tmp_path, stored | mtp), replace(GLM4_MOE, num_layers=4))
    assert "model.layers.3.eh_proj.weight" in refused
    # If `eh_proj` is missing, the tensors are an unexpected decoder layer.
    del mtp["model.layers.3.eh_proj.weight"]
    assert "model.layers.3.embed_tokens.weight" in refusal(save(tmp_path, stored | mtp), GLM4_MOE)


def test_experts_as_in_memory(tmp_path):
    """As `save_pretrained` of transformers 5 may write them."""
    weights = weights_of(QWEN3_MOE)
    stored = {name: x for name, x in weights.items() if not name.endswith("expert_bias")}
    assert_equal(load(save(tmp_path, stored), QWEN3_MOE), stored)


# ---- mismatches ----


EXPERTS = "model.layers.0.mlp.experts"
PER_EXPERT, DENSE = partial(split_experts, weights_of(QWEN3_MOE)), dict
MISSING = "missing, checkpoint {} does not have"
# The model, its stored tensors, the changes to them (None: the tensor is left out), and words of
# the error.
REFUSED = [
    (
        TIED,
        DENSE,
        {"lm_head.weight": torch.zeros(3, 3)},
        ["with shape (3, 3), the model expects (2048, 64)."],
    ),
    (
        LLAMA,
        DENSE,
        {"model.layers.3.input_layernorm.weight": torch.ones(64), "x\n": torch.ones(1)},
        [
            "2 problems:",
            "layernorm.weight: unexpected, checkpoint {} has it and the model does not.",
            "x\\n: unexpected",
        ],
    ),
    (
        QWEN3_MOE,
        PER_EXPERT,
        # The matrix is transposed, and so has the same number of bytes.
        {f"{EXPERTS}.7.down_proj.weight": torch.zeros(32, 64)},
        [
            f"{EXPERTS}.down_proj: checkpoint {{}} has {EXPERTS}.7.down_proj.weight with shape "
            "(32, 64), the model"
        ],
    ),
    (
        QWEN3_MOE,
        PER_EXPERT,
        {f"{EXPERTS}.0.gate_proj.weight": None, f"{EXPERTS}.3.up_proj.weight": None}
        | {f"{EXPERTS}.1.gate_proj.weight": torch.zeros(1), "lm_head.bias": torch.zeros(2048)},
        [
            "4 problems:",
            f"{EXPERTS}.gate_up_proj: {MISSING} {EXPERTS}.0.gate_proj.weight.",
            f"{MISSING} {EXPERTS}.3.up_proj.weight.",
            f"{EXPERTS}.1.gate_proj.weight with shape (1,)",
            "lm_head.bias: unexpected",
        ],
    ),
]


@pytest.mark.parametrize(("config", "stored", "changes", "words"), REFUSED)
def test_all_that_does_not_fit_is_named(tmp_path, config, stored, changes, words):
    tensors = stored(weights_of(config)) if stored is DENSE else stored()
    tensors = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
    text = refusal(save(tmp_path, tensors), config)
    assert [word for word in words if word.replace("{}", str(tmp_path)) not in text] == [], text


# ---- tied models ----


def test_tied_model_with_one_tensor_or_two_equal_ones(tmp_path, caplog):
    weights = weights_of(TIED)
    embedding = weights.pop("model.embed_tokens.weight")
    both = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.to(torch.float64, copy=True),
    }
    for i, names in enumerate([["model.embed_tokens.weight"], ["lm_head.weight"], list(both)]):
        got = load(save(tmp_path / str(i), weights | {name: both[name] for name in names}), TIED)
        assert_equal(
            got, weights | {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
        )
    assert not caplog.messages


@pytest.mark.parametrize("row", [1000, -1])
def test_tied_model_with_another_head_in_the_file(tmp_path, monkeypatch, row):
    """The head would be dropped, but transformers uses it. One different value is enough, in any
    chunk.
    """
    monkeypatch.setattr(hf_model, "_CHUNK_ELEMENTS", 10_000)
    weights = weights_of(TIED)
    other = weights["model.embed_tokens.weight"].clone()
    other[row, 63] += 1e-3
    folder = save(tmp_path, weights | {"lm_head.weight": other})
    text = refusal(folder, TIED)
    assert text.startswith(
        f"materialize: lm_head.weight: checkpoint {folder} has it with different values "
        "than model.embed"
    )
    assert "tie_word_embeddings = false in its config.json" in text
    got = load(folder, replace(TIED, tie_word_embeddings=False))
    assert torch.equal(got["lm_head.weight"], other)


def test_rank_0_alone_reads_what_is_compared(tmp_path, run_ranks):
    weights = weights_of(TIED)
    folder = save(
        tmp_path, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    )

    def rank_main():
        calls, original = [], os.preadv
        os.preadv = lambda *arguments: calls.append(arguments) or original(*arguments)
        hf_checkpoint(folder, TIED)
        return len(calls)

    of_first, of_second = run_ranks(2, rank_main)
    assert of_first > 0 and of_second == 0


# ---- expert_bias ----


def test_sidecar_that_does_not_fit(tmp_path):
    save(tmp_path, split_experts(weights_of(QWEN3_MOE)))
    sidecar = {
        "model.layers.0.mlp.gate.expert_bias": torch.ones(9),
        "model.layers.9.mlp.gate.expert_bias": torch.ones(8),
    }
    save(tmp_path, sidecar, "titanlite/expert_bias.safetensors")
    text = refusal(tmp_path, QWEN3_MOE)
    assert text.startswith("materialize: 2 problems:")
    assert "model.layers.0.mlp.gate.expert_bias with shape (9,), the model expects (8,)." in text
    assert "model.layers.9.mlp.gate.expert_bias: unexpected" in text


# ---- full-precision weights stored with the model ----


@pytest.mark.parametrize("is_whole", [False, True], ids=["routers", "all"])
def test_float32_stays_where_few_tensors_have_it(tmp_path, is_whole):
    router = "mlp.gate.weight"
    weights = weights_of(QWEN3_MOE)
    stored = {
        key: tensor if is_whole or key.endswith(router) else tensor.to(torch.bfloat16)
        for key, tensor in split_experts(weights).items()
    }
    save(tmp_path, stored)
    masters = {
        f"master.{name}": tensor
        for name, tensor in weights.items()
        if not name.endswith(("expert_bias", router))
    }
    save(tmp_path, masters, "titanlite/weights.safetensors")
    source = hf_checkpoint(tmp_path, QWEN3_MOE, exact=True)
    entries = build_plan(build_decoder(QWEN3_MOE), [source]).entries
    params = [entry for entry in entries if entry.info.kind == "parameter"]
    kept = [entry.fqn for entry in params if entry.saved_dtype(torch.bfloat16) == torch.float32]
    assert kept == [name for name in weights if name.endswith(router) and not is_whole]


def test_exact_reads_what_the_run_had(tmp_path):
    weights = weights_of(QWEN3_MOE)
    save(
        tmp_path, {key: tensor.to(torch.bfloat16) for key, tensor in split_experts(weights).items()}
    )
    names = sorted(name for name in weights if not name.endswith("expert_bias"))
    for i in range(2):
        save(
            tmp_path,
            {f"master.{name}": weights[name] for name in names[i::2]},
            f"titanlite/weights-0000{i + 1}-of-00002.safetensors",
        )
    assert_equal(load(tmp_path, QWEN3_MOE, exact=True), weights, but=["expert_bias"])
    source = hf_checkpoint(tmp_path, QWEN3_MOE, exact=True)
    entries = build_plan(build_decoder(QWEN3_MOE), [source]).entries
    params = [entry for entry in entries if entry.info.kind == "parameter"]
    assert {entry.saved_dtype(torch.bfloat16) for entry in params} == {torch.bfloat16}
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in weights.items()}
    assert_equal(load(tmp_path, QWEN3_MOE), rounded, but=["expert_bias"])
