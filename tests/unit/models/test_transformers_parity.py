"""Logits and every parameter gradient equal transformers' own implementation, in float32."""

from dataclasses import replace

import pytest
import torch

from titanlite.config import RopeScaling
from titanlite.models.families import check_model_config

# Both compute in float32 (6e-8) through 3 layers, in a different order of operations.
BOUND = 1e-5

# So short a length in pretraining that 17 positions are many.
YARN = RopeScaling(
    "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.5
)
VARIATIONS = [
    ("llama", {"num_kv_heads": 1, "attention_bias": True}),
    ("llama", {"tie_word_embeddings": True, "rope_scaling": None}),
    ("qwen3", {"attention_bias": True, "num_kv_heads": 4}),
    ("qwen3_moe", {"norm_topk_prob": False, "top_k": 8, "attention_bias": True}),
    ("dots1", {"num_dense_layers": 0, "num_shared_experts": 2}),
    (
        "dots1",
        {"num_expert_groups": 2, "num_limited_groups": 1, "top_k": 4, "attention_bias": True},
    ),
    ("dots1", {"num_experts": 9, "num_expert_groups": 3, "num_limited_groups": 2, "top_k": 5}),
    ("qwen2", {"tie_word_embeddings": True, "num_kv_heads": 1}),
    ("glm4_moe", {"qk_norm": False, "num_dense_layers": 0, "num_shared_experts": 2}),
    ("glm4_moe", {"attention_bias": False, "partial_rotary_factor": 0.25, "top_k": 3}),
    ("deepseek_v3", {"q_lora_rank": 0, "rope_interleave": False, "attention_bias": True}),
    ("deepseek_v3", {"rope_scaling": None, "v_head_dim": 24, "num_dense_layers": 0}),
    ("deepseek_v3", {"rope_scaling": YARN, "attention_bias": True}),
    ("glm4_moe_lite", {"num_dense_layers": 2, "q_lora_rank": 0, "rope_scaling": YARN}),
    ("qwen3_next", {"full_attention_interval": 3, "norm_topk_prob": False}),
    ("qwen3_next", {"linear_num_key_heads": 2, "linear_value_head_dim": 5, "attention_bias": True}),
    *(
        (
            family,
            {"linear_num_key_heads": 2, "linear_value_head_dim": 5, "tie_word_embeddings": True},
        )
        for family in ("qwen3_5_text", "qwen3_5_moe_text")
    ),
    ("qwen3_5_text", {"full_attention_interval": 3, "attention_bias": True, "num_layers": 4}),
    *(("mistral", {"sliding_window": window, "num_kv_heads": 1}) for window in (0, 5, 16)),
    ("ministral", {"sliding_window": 6, "rope_scaling": YARN}),
    ("ministral", {"sliding_window": 4, "window_pattern": "sf", "num_layers": 3}),
    ("olmo3", {"sliding_window": 6, "window_pattern": "sf", "rope_scaling": YARN}),
    ("olmo3", {"attention_bias": True, "rope_scaling": None, "tie_word_embeddings": True}),
    ("minimax_m2", {"num_kv_heads": 1}),
    ("minimax_m2", {"partial_rotary_factor": 0.25, "top_k": 4, "rope_scaling": YARN}),
    ("gpt_oss", {"attention_bias": False, "top_k": 4, "num_kv_heads": 1, "window_pattern": "fss"}),
    ("gpt_oss", {"tie_word_embeddings": True, "rope_scaling": None, "sliding_window": 3}),
    ("solar_open", {"attention_bias": True, "num_shared_experts": 2, "norm_topk_prob": False}),
    (
        "qwen3_moe",
        {"rope_scaling": replace(YARN, attention_factor=1.5, beta_fast=8.0, truncate=False)},
    ),
]


@pytest.mark.parametrize(
    ("family", "changes"), VARIATIONS, ids=[f"{f}-{'-'.join(c)}" for f, c in VARIATIONS]
)
def test_logits_and_gradients(tiny, family, changes):
    config = tiny.config(family, pad_token_id=3, **changes)
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
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
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
