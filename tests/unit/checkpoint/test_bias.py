"""The router's selection bias in a checkpoint: absent, or rounded until experts share values."""

import logging

import pytest
import torch
import transformers
from tensors import changed
from tiny_transformers import TEXT_MODELS

from tests.loading import load, refusal

KINDS = [
    ("glm4_moe", "native"),
    ("deepseek_v3", "native"),
    ("glm4_moe", "transformers"),
]


@pytest.fixture(params=KINDS, ids=" ".join)
def mixture(request, tmp_path):
    """Return (implementation, `change(function of a bias)`) for a folder whose model has experts in
    layers 1 to 3.
    """
    name, implementation = request.param
    config = TEXT_MODELS[name](num_hidden_layers=4, n_routed_experts=8)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"

    def change(function):
        with changed(path) as stored:
            names = [key for key in stored if key.endswith("e_score_correction_bias")]
            assert len(names) == 3
            biases = {key: function(key) for key in names}
            kept = {key: bias for key, bias in biases.items() if bias is not None}
            for key in names:
                del stored[key]
            stored |= kept
        return kept

    return implementation, change


@pytest.mark.parametrize("lost", [(1, 2, 3), (1, 3)])
def test_an_absent_bias_is_one_error_unless_it_is_allowed(mixture, tmp_path, caplog, lost):
    implementation, change = mixture
    kept = change(lambda key: None if int(key.split(".")[2]) in lost else torch.arange(8.0))
    text = refusal(tmp_path, implementation)
    name = f"model.layers.*.mlp.gate.e_score_correction_bias (layers {', '.join(map(str, lost))})"
    assert text.startswith(
        f"materialize: {name}: missing, checkpoint {tmp_path} does not have {len(lost)} of 3 "
        "expert biases;"
    )
    assert "checkpoint.allow_missing_expert_bias = true" in text and "\n" not in text

    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, implementation, allow_missing_expert_bias=True)
    (line,) = [text for text in caplog.messages if "expert biases" in text]
    assert f"does not have {len(lost)} of 3 expert biases, which begin with zeros: {name}" in line
    found = {key: value for key, value in loaded.state_dict().items() if key.endswith("_bias")}
    assert len(found) == 3
    for key, value in found.items():
        stored = next(
            (bias for name, bias in kept.items() if name.split(".")[2] in key.split(".")),
            torch.zeros(8),
        )
        assert torch.equal(value, stored), key


def spread(low, high, dtype):
    """Return biases of 8 experts as they are read back from a checkpoint in `dtype`."""
    return torch.linspace(low, high, 8).to(dtype)


ROUNDED = [
    (
        spread(6.98, 7.04, torch.bfloat16),
        True,
    ),
    (spread(6.8, 7.06, torch.float32), False),  # not rounded
    (torch.zeros(8, dtype=torch.bfloat16), False),  # as before the first step
    (torch.tensor([-1.0, 0, 1, 1, 0, -1, 1, 1]).bfloat16() * 1e-3, False),  # after the first step
]


def test_a_bias_rounded_until_experts_share_values_is_named(mixture, tmp_path, caplog):
    implementation, change = mixture
    for bias, expected in ROUNDED:
        change(lambda key, bias=bias: bias.clone())
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(tmp_path, implementation)
        lines = [text for text in caplog.messages if "expert biases" in text]
        assert len(lines) == expected
        if expected:
            assert lines[0].startswith(
                f"checkpoint {tmp_path}: 3 of 3 expert biases were rounded to two bytes until "
                "experts share their values: model.layers.*.mlp.gate.e_score_correction_bias "
                "(layers 1, 2, 3). "
            )
