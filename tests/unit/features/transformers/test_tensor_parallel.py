"""The plans of transformers' classes as styles of modules, and what is refused before anything is sharded."""

from typing import Any

import pytest
from tiny_transformers import ALL_MODELS

from titanlite.base.errors import ConfigError
from titanlite.features.transformers.build import build_transformers
from titanlite.features.transformers.model import TransformersModel
from titanlite.features.transformers.tensor_parallel import resolve_tensor_parallel_plan
from titanlite.models.families.config_json import transformers_config


def build(name: str, **changes: Any) -> TransformersModel:
    return build_transformers(transformers_config(ALL_MODELS[name]().to_dict() | changes, "test"))


def styles(name: str) -> dict[str, str]:
    """Of the first layers and of what lies outside."""
    found = resolve_tensor_parallel_plan(build(name), 2)
    return {key: style for key, style in found.items() if "layers" not in key or "layers.0." in key}


def test_a_plan_becomes_styles_of_modules() -> None:
    found = styles("phi")
    # The embedding is split where transformers' plan says so; it is not in that of version 5.17.
    assert found.pop("model.embed_tokens", "embedding_rows") == "embedding_rows"
    assert found == {
        "lm_head": "colwise_gather",
        "model.layers.0.self_attn.q_proj": "colwise",
        "model.layers.0.self_attn.k_proj": "colwise",
        "model.layers.0.self_attn.v_proj": "colwise",
        "model.layers.0.self_attn.dense": "rowwise",
        "model.layers.0.mlp.fc1": "colwise",
        "model.layers.0.mlp.fc2": "rowwise",
    }
    assert styles("phi3")["model.layers.0.self_attn.qkv_proj"] == "colwise_gather"
    assert styles("phi3")["model.layers.0.mlp.down_proj"] == "rowwise_split"


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_experts_are_never_split_inside(name: str) -> None:
    found = resolve_tensor_parallel_plan(build(name), 2)
    assert found and not [key for key in found if ".experts" in key]


def test_experts_that_the_plan_splits_by_parameter_stay_whole() -> None:
    """Llama 4 computes its experts itself, and its plan names their parameters."""
    from transformers import Llama4TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 48, "num_hidden_layers": 2}
    config = Llama4TextConfig(
        **sizes, vocab_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4
    )
    model = build_transformers(transformers_config(config.to_dict(), "test"))
    assert any(".experts.gate_up_proj" in pattern for pattern in model.transformers_model.tp_plan)
    found = resolve_tensor_parallel_plan(model, 2)
    assert not [name for name in found if ".experts" in name]
    assert found["model.layers.1.feed_forward.shared_expert.down_proj"] == "rowwise"


def test_what_shares_a_weight_is_split_with_it() -> None:
    """A head that the plan forgets would otherwise take the embedding's part for the whole."""
    model = build("qwen3")
    del model.transformers_model._tp_plan["lm_head"]
    assert resolve_tensor_parallel_plan(model, 2)["lm_head"] == "colwise_gather"
    model.transformers_model._tp_plan["lm_head"] = "rowwise_split_input"
    with pytest.raises(ConfigError, match=r"lm_head and model\.embed_tokens share a weight, which .* in two ways"):
        resolve_tensor_parallel_plan(model, 2)


@pytest.mark.parametrize(
    ("name", "size", "changes", "plan", "message"),
    [
        ("llama", 4, {}, {}, r"model\.layers\.\*\.self_attn\.k_proj has 2 heads of width 8, which do not go round"),
        ("llama", 3, {}, {}, r"mlp\.down_proj\.weight \(32, 48\)|k_proj\.weight \(16, 32\): dim 0 does not go into 3"),
        ("llama", 2, {}, {"model.norm": "sequence_parallel"}, "model.norm has style 'sequence_parallel' in the plan"),
        ("llama", 2, {}, {"model.layers.*.mlp.up_proj": "packed_colwise"}, "up_proj has style 'packed_colwise'"),
        ("llama", 2, {}, {"model.norm.weight": "colwise"}, r"model\.norm\.weight has style 'colwise'"),
        ("llama", 2, {}, {"model.norm": "colwise"}, "model.norm is a LlamaRMSNorm, and its style .* splits Linears"),
    ],
)
def test_what_cannot_be_split_is_said_once(
    name: str, size: int, changes: dict[str, Any], plan: dict[str, str], message: str
) -> None:
    model = build(name, **changes)
    model.transformers_model._tp_plan.update(plan)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_tensor_parallel_plan(model, size)
    lines = str(caught.value).splitlines()
    assert len(set(lines)) == len(lines)
    assert "LlamaForCausalLM cannot be split over tensor_parallel_degree" in lines[0]
    assert lines[-1].endswith("Set another degree, or 1 to shard by FSDP alone.")


def test_a_class_without_a_plan_is_refused() -> None:
    model = build("llama")
    model.transformers_model._tp_plan.clear()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM carries no tensor-parallel plan\. Set it to 1"):
        resolve_tensor_parallel_plan(model, 2)
