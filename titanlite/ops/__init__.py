"""Tensor operations: pure functions of tensors, without modules, collectives or knowledge of any
model.

A function that needs a collective (vocabulary-parallel cross entropy) gets it as a callable.
"""

from titanlite.ops.cross_entropy import IGNORE_INDEX, VocabShard, linear_cross_entropy
from titanlite.ops.elementwise import (
    add_rms_norm,
    apply_rope,
    clamped_swiglu,
    inverse_frequencies,
    rms_norm,
    rope_cos_sin,
    rotate_heads,
    swiglu,
    swiglu_apart,
)
from titanlite.ops.kernels import local_tensor
from titanlite.ops.matmul import grouped_gemm
from titanlite.ops.moe_experts import (
    add_expert_bias,
    permute_tokens,
    unpermute_sum,
)
from titanlite.ops.routing import group_by_expert
