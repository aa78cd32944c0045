"""Logits and every parameter gradient equal transformers' own implementation, in float32."""

from dataclasses import replace

import pytest
import torch
from files import read_table

from titanlite.config import RopeScaling
from titanlite.models.families import check_model_config

# Both compute in float32 (6e-8) through 3 layers, in a different order of operations.
BOUND = 1e-5

# So short a length in pretraining that 17 positions are many.
YARN = RopeScaling(
    "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.5
)
ROPES = {
    "none": None,
    "yarn": YARN,
    "other yarn": replace(YARN, attention_factor=1.5, beta_fast=8.0, truncate=False),
}
VARIATIONS = read_table("model_variations")["variations"]


@pytest.mark.parametrize("changes", VARIATIONS)
def test_logits_and_gradients(tiny, changes):
    given = {k: ROPES[v] if k == "rope_scaling" else v for k, v in changes.items()}
    config = tiny.config(given.pop("family"), pad_token_id=3, **given)
    assert check_model_config(config) == []
    ours = tiny.ours(config)
    theirs = tiny.theirs(config, ours)
    tokens, labels = torch.randint(config.vocab_size, (2, 2, 17))
    tokens[:, ::4] = 3
    labels[0, 3:5] = -100

    logits = ours(tokens)
    expected = theirs(tokens, use_cache=False).logits
    assert (logits - expected).norm() <= BOUND * expected.norm()

    loss = ours(tokens, labels).cross_entropy
    expected_loss = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    assert abs(loss - expected_loss) <= BOUND * expected_loss
    loss.backward()
    expected_loss.backward()
    gradients = {
        name: param.grad for name, param in theirs.named_parameters() if param.requires_grad
    }
    # A gradient that is zero by nature (the router's with top_k = 1 normalized to 1, the query's at
    # a single position) holds rounding errors only: it is measured against a thousandth of the
    # total norm.
    floor = 1e-3 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, param in ours.named_parameters():
        key, actual = tiny.as_stored(name, param.grad, config)
        expected = gradients.pop(key)
        error = (actual - expected).norm() / torch.maximum(expected.norm(), floor)
        assert error <= BOUND, f"{name}: {error:.1e}"
    assert not gradients
    padding_row = ours.model.embed_tokens.weight.grad[3]
    assert bool(padding_row.any()) == config.tie_word_embeddings, "the lookup gives it no gradient"
