"""Tensor operations: pure functions of tensors, no modules, no collectives, no knowledge of any model.

A function that needs a collective (vocabulary-parallel cross entropy) takes it as a callable.
"""

from titanlite.features.generate.sampling import choose_tokens
from titanlite.features.lowbit.formats import BLOCK_FORMATS, BlockFormat
from titanlite.features.lowbit.matmul import frozen_grouped_gemm, frozen_linear
from titanlite.ops.attention import AttentionMask, attention, build_attention_mask, cached_attention, leave_out_cudnn
from titanlite.ops.cross_entropy import IGNORE_INDEX, VocabShard, linear_cross_entropy
from titanlite.ops.grouped_gemm import grouped_gemm
from titanlite.ops.local import local_tensor
from titanlite.ops.matmul import linear
from titanlite.ops.moe_experts import moe_experts
from titanlite.ops.permute import group_by_expert, permute_tokens, unpermute_sum
from titanlite.ops.rms_norm import rms_norm
from titanlite.ops.rope import apply_rope, inverse_frequencies, rope_cos_sin
from titanlite.ops.swiglu import swiglu

__all__ = [
    "BLOCK_FORMATS",
    "IGNORE_INDEX",
    "AttentionMask",
    "BlockFormat",
    "VocabShard",
    "apply_rope",
    "attention",
    "build_attention_mask",
    "cached_attention",
    "choose_tokens",
    "frozen_grouped_gemm",
    "frozen_linear",
    "group_by_expert",
    "grouped_gemm",
    "inverse_frequencies",
    "leave_out_cudnn",
    "linear",
    "linear_cross_entropy",
    "local_tensor",
    "moe_experts",
    "permute_tokens",
    "rms_norm",
    "rope_cos_sin",
    "swiglu",
    "unpermute_sum",
]
