"""ERNIE 4.5 with mixture of experts: softmax scores with a selection bias, shared experts. Rotated
pairs are neighbours in checkpoints.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import COMMON_KEYS, DEBUG_EXPERTS, Family, preset, without

_ERNIE = ModelConfig(
    family="ernie4_5_moe",
    vocab_size=103424,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=True,
    num_experts=64,
    top_k=6,
    moe_intermediate_size=1536,
    num_dense_layers=1,
    num_shared_experts=2,
    qk_norm=False,
)


def _find_lacking(config: Any, _table: Mapping[str, Any]) -> Iterator[str]:
    last = config.num_hidden_layers - 1
    if config.moe_layer_end_index != last:
        yield (
            f"moe_layer_end_index = {config.moe_layer_end_index!a} is not supported by the native "
            f"decoder, only the last layer, {last}, is."
        )


def _interleave(heads: str, config: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield the rows of a projection, each with the row that it is rotated with after it. In memory
    they are half a head apart.
    """
    half = config.head_dim // 2
    for head in range(getattr(config, heads)):
        first = head * config.head_dim
        for row in range(first, first + half):
            yield row, 1
            yield row + half, 1


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    keys={
        **without(COMMON_KEYS, "attention_bias"),
        "num_experts": "moe_num_experts",
        "top_k": "moe_k",
        "moe_intermediate_size": "moe_intermediate_size",
        "num_shared_experts": "moe_num_shared_experts",
        "num_dense_layers": "moe_layer_start_index",
    },
    required={"use_bias": (False,), "moe_layer_interval": (1,), "moe_norm_min": (1e-12,)},
    written={"moe_layer_end_index": -1, "pad_token_id": None},
    find_lacking=_find_lacking,
    expert_bias_key="moe_statics.e_score_correction_bias",
    expert_bias_dims=2,
    stored_names={r"\.gate\.moe_statics\.": ".moe_statics."},
    row_orders={
        r"\.q_proj\.": partial(_interleave, "num_heads"),
        r"\.k_proj\.": partial(_interleave, "num_kv_heads"),
    },
    presets={
        "debug": replace(_ERNIE, **DEBUG_EXPERTS),
        "21B-A3B": preset(_ERNIE, (2560, 28, 20, 4, 12288)),
        "300B-A47B": preset(
            _ERNIE,
            (8192, 54, 64, 8, 28672),
            tie_word_embeddings=False,
            top_k=8,
            moe_intermediate_size=3584,
            num_dense_layers=3,
            num_shared_experts=0,
        ),
    },
)
