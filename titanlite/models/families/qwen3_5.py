"""Text models of Qwen3.5 and 3.6: Qwen3-Next's layers, dense or with experts; the gated delta net
has separate projections instead of fused ones.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from titanlite.config.model import ModelConfig
from titanlite.models.families.family import (
    COMMON_KEYS,
    DEBUG_EXPERTS,
    DEBUG_SIZES,
    MOE_KEYS,
    Family,
    Larger,
    preset,
    without,
)
from titanlite.models.families.parts import SEPARATE_GATED_DELTA
from titanlite.models.families.qwen3_next import (
    DEBUG_DELTA,
    DELTA_KEYS,
    HAS_EXPERTS,
    HAS_GATE,
    HAS_INTERVAL,
    NEXT,
    SHARED_EXPERT_KEYS,
    mixed_layer,
)


def _rows_by_kind(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield the rows of all queries, all keys and all values; in memory rows are grouped by key
    head.
    """
    heads = config.linear_num_key_heads
    key = config.linear_key_head_dim
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    for start, width in ((0, key), (key, key), (2 * key, value)):
        for head in range(heads):
            yield head * (2 * key + value) + start, width


_DENSE = replace(NEXT, family="qwen3_5_text", vocab_size=248320, shared_expert_intermediate_size=0)
_MOE = replace(_DENSE, family="qwen3_5_moe_text", shared_expert_intermediate_size=512)

QWEN3_5 = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    keys={**COMMON_KEYS, **DELTA_KEYS},
    required=HAS_GATE,
    rules=(HAS_INTERVAL,),
    layer=partial(mixed_layer, SEPARATE_GATED_DELTA),
    larger=Larger("qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model."),
    row_orders={r"\.linear_attn\.in_proj_qkv\.weight$": _rows_by_kind},
    presets={
        "debug": replace(_DENSE, **DEBUG_SIZES, **DEBUG_DELTA),
        "27B": preset(_DENSE, (5120, 64, 24, 4, 17408), linear_num_value_heads=48),
    },
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    larger=Larger("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "model.language_model."),
    keys={
        **without(QWEN3_5.keys, "intermediate_size"),
        **without(MOE_KEYS, "norm_topk_prob"),
        **SHARED_EXPERT_KEYS,
    },
    rules=(HAS_INTERVAL, HAS_EXPERTS),
    keeps_fused_experts=True,
    presets={
        "debug": replace(
            _MOE,
            # There are no dense layers, so the configuration has no width for them.
            **{
                **DEBUG_EXPERTS,
                **DEBUG_DELTA,
                "intermediate_size": _MOE.intermediate_size,
            },
            shared_expert_intermediate_size=48,
        ),
        "35B-A3B": preset(
            _MOE,
            (2048, 40, 16, 2, _MOE.intermediate_size),
            num_experts=256,
            top_k=8,
            moe_intermediate_size=512,
        ),
    },
)
