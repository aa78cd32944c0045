"""Logits and every parameter gradient equal transformers' own implementation, in float32."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from titanlite.config import RopeScaling
from titanlite.models.families import check_model_config, families

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
    ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    ("qwen3_moe", {"top_k": 8, "tie_word_embeddings": True}),
    ("dots1", {"num_dense_layers": 0, "num_shared_experts": 2}),
    ("dots1", {"norm_topk_prob": False, "top_k": 1, "routed_scaling_factor": 1.0}),
    (
        "dots1",
        {"num_expert_groups": 2, "num_limited_groups": 1, "top_k": 4, "attention_bias": True},
    ),
    ("dots1", {"num_experts": 9, "num_expert_groups": 3, "num_limited_groups": 2, "top_k": 5}),
    ("qwen2", {"tie_word_embeddings": True, "num_kv_heads": 1}),
    ("glm4_moe", {"qk_norm": False, "num_dense_layers": 0, "num_shared_experts": 2}),
    ("glm4_moe", {"attention_bias": False, "partial_rotary_factor": 0.25}),
    ("glm4_moe", {"partial_rotary_factor": 1.0, "norm_topk_prob": False, "top_k": 3}),
    ("deepseek_v3", {"q_lora_rank": 0, "rope_interleave": False, "attention_bias": True}),
    (
        "deepseek_v3",
        {
            "num_dense_layers": 0,
            "num_expert_groups": 1,
            "num_limited_groups": 1,
            "num_shared_experts": 2,
        },
    ),
    ("deepseek_v3", {"rope_scaling": None, "v_head_dim": 24, "rms_norm_eps": 1e-4}),
    ("deepseek_v3", {"rope_scaling": YARN, "attention_bias": True}),
    ("glm4_moe_lite", {}),
    ("glm4_moe_lite", {"num_dense_layers": 2, "q_lora_rank": 0, "rope_scaling": YARN}),
    ("qwen3_next", {}),
    ("qwen3_next", {"full_attention_interval": 3, "norm_topk_prob": False}),
    ("qwen3_next", {"linear_num_key_heads": 2, "linear_value_head_dim": 5, "attention_bias": True}),
    *((family, {}) for family in ("qwen3_5_text", "qwen3_5_moe_text")),
    *(
        (
            family,
            {"linear_num_key_heads": 2, "linear_value_head_dim": 5, "tie_word_embeddings": True},
        )
        for family in ("qwen3_5_text", "qwen3_5_moe_text")
    ),
    ("qwen3_5_text", {"full_attention_interval": 3, "attention_bias": True, "num_layers": 4}),
    *(("mistral", {"sliding_window": window, "num_kv_heads": 1}) for window in (0, 2, 5, 16)),
    ("mistral", {"sliding_window": 6, "rope_scaling": YARN}),
    ("ministral", {"sliding_window": 5}),
    ("ministral", {"sliding_window": 4, "window_pattern": "sf", "num_layers": 3}),
    ("ministral", {"sliding_window": 4, "window_pattern": "s", "tie_word_embeddings": True}),
    ("olmo3", {"sliding_window": 5, "rope_scaling": YARN}),
    ("olmo3", {"sliding_window": 6, "window_pattern": "sf", "num_kv_heads": 4}),
    ("olmo3", {"attention_bias": True, "rope_scaling": None, "tie_word_embeddings": True}),
    ("minimax_m2", {"num_kv_heads": 1}),
    ("minimax_m2", {"partial_rotary_factor": 0.25, "top_k": 4, "rope_scaling": YARN}),
    ("gpt_oss", {"sliding_window": 5}),
    ("gpt_oss", {"attention_bias": False, "top_k": 4, "num_kv_heads": 1, "window_pattern": "fss"}),
    ("gpt_oss", {"tie_word_embeddings": True, "rope_scaling": None, "sliding_window": 3}),
    ("solar_open", {}),
    ("solar_open", {"attention_bias": True, "num_shared_experts": 2, "norm_topk_prob": False}),
    *(
        (family, {"rope_scaling": YARN})
        for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "dots1", "glm4_moe")
    ),
    (
        "qwen3_moe",
        {"rope_scaling": replace(YARN, attention_factor=1.5, beta_fast=8.0, truncate=False)},
    ),
]


def compare(tiny, config, batch=2, seq_len=17, seed=0):
    assert check_model_config(config) == []
    ours = tiny.ours(config, seed)
    theirs = tiny.theirs(config, ours)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, seq_len), generator=generator)
    labels = torch.randint(config.vocab_size, (batch, seq_len), generator=generator)
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


@pytest.mark.parametrize(
    ("family", "changes"), VARIATIONS, ids=[f"{f}-{'-'.join(c) or 'debug'}" for f, c in VARIATIONS]
)
def test_logits_and_gradients(tiny, family, changes):
    compare(tiny, tiny.config(family, **changes))


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_sizes(tiny, data):
    family = data.draw(st.sampled_from(sorted(families())))
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    changes = {
        "num_layers": data.draw(st.integers(1, 2)),
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * data.draw(st.integers(1, 3)),
        "head_dim": data.draw(st.sampled_from([4, 8, 12 if family == "glm4_moe" else 10])),
        "hidden_size": data.draw(st.sampled_from([12, 24, 40])),
        "intermediate_size": data.draw(st.sampled_from([20, 33])),
        "tie_word_embeddings": data.draw(st.booleans()),
        "attention_bias": data.draw(st.booleans()),
        "rms_norm_eps": data.draw(st.sampled_from([1e-5, 1e-6])),
        "rope_theta": data.draw(st.sampled_from([1e4, 1e6])),
    }
    if families()[family].presets["debug"].num_experts:
        groups = (
            data.draw(st.sampled_from([1, 2]))
            if family in ("deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "solar_open")
            else 1
        )
        changes |= {
            "num_experts": groups * data.draw(st.integers(2, 5)),
            "num_expert_groups": groups,
            "num_limited_groups": data.draw(st.integers(1, groups)),
            "top_k": data.draw(st.integers(1, 2)),
            "moe_intermediate_size": data.draw(st.sampled_from([5, 16])),
            "norm_topk_prob": data.draw(st.booleans()),
        }
    if families()[family].presets["debug"].full_attention_interval:
        changes["rms_norm_eps"] = 1e-3
    if family in ("deepseek_v3", "glm4_moe_lite"):
        changes |= {
            "num_kv_heads": changes["num_heads"],
            "kv_lora_rank": data.draw(st.integers(1, 20)),
            "q_lora_rank": data.draw(st.sampled_from([0, 7, 16])),
            "qk_nope_head_dim": data.draw(st.integers(1, 12)),
            "v_head_dim": data.draw(st.integers(1, 24)),
            "rope_interleave": data.draw(st.booleans()),
            "norm_topk_prob": True,
        }
    if families()[family].presets["debug"].sliding_window:
        changes["sliding_window"] = data.draw(st.integers(2, 13))
    fixed = families()[family].fixed
    changes |= {key: fixed[key] for key in fixed.keys() & changes.keys()}
    config = tiny.config(family, **changes)
    assume(not families()[family].check(config))
    compare(tiny, config, seq_len=data.draw(st.integers(4, 12)))


@pytest.mark.parametrize("family", sorted(families()))
def test_a_wrong_model_is_noticed(tiny, family):
    # The comparison itself must be able to fail: one part in a thousand in one norm.
    config = tiny.config(family)
    ours = tiny.ours(config)
    theirs = tiny.theirs(config, ours)
    with torch.no_grad():
        ours.model.layers[1].post_attention_layernorm.weight.mul_(1.001)
    tokens = torch.arange(20).view(2, 10)
    expected = theirs(tokens, use_cache=False).logits
    assert (ours(tokens) - expected).norm() > BOUND * expected.norm()


@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize("tied", [False, True])
def test_the_row_of_the_padding_has_the_gradient_of_transformers(family, tied, tiny):
    """None from the lookup; what a tied head has of it stays."""
    config = tiny.config(family, tie_word_embeddings=tied, pad_token_id=3)
    ours = tiny.ours(config)
    theirs = tiny.theirs(config, ours)
    assert theirs.config.pad_token_id == 3
    tokens = torch.tensor([[3, 5, 3, 9, 11, 3, 2, 7]])
    ours(tokens, tokens).cross_entropy.backward()
    logits = theirs(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.flatten(), reduction="sum"
    ).backward()
    actual, expected = (
        model.get_parameter("model.embed_tokens.weight").grad for model in (ours, theirs)
    )
    assert actual is not None and expected is not None
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
    assert bool(actual[3].count_nonzero()) == tied
