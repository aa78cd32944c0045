from dataclasses import replace

import pytest
import torch

from titanlite.config.model import ModelConfig
from titanlite.metrics import num_parameters, peak_flops, train_flops_per_token

QWEN3_30B_A3B = ModelConfig(
    family="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    num_experts=128,
    top_k=8,
    moe_intermediate_size=768,
)
TINY_DENSE = ModelConfig(
    vocab_size=10,
    hidden_size=4,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=8,
    qk_norm=False,
    tie_word_embeddings=True,
)


def test_qwen3_30b_a3b_has_the_published_sizes():
    total, active = num_parameters(QWEN3_30B_A3B)
    assert total == 30_532_122_624  # the model card's 30.5B, exact count of its checkpoint
    assert round(active / 1e9, 1) == 3.4  # the card rounds 3.35 down to 3.3B
    assert active == 3_353_032_704


def test_num_parameters_of_a_tiny_dense_model_by_hand():
    # q and o 4 * 4 each, k and v 4 * 2 each, SwiGLU 3 * 4 * 8, two norms of 4.
    layer = 2 * 16 + 2 * 8 + 96 + 8
    assert num_parameters(TINY_DENSE) == (40 + 2 * layer + 4, 40 + 2 * layer + 4)
    # Bias on q (4), k and v (2 each), o (4); two head norms of 2; a second 10 x 4 matrix.
    biased = replace(TINY_DENSE, attention_bias=True)
    normed = replace(TINY_DENSE, qk_norm=True)
    untied = replace(TINY_DENSE, tie_word_embeddings=False)
    base = num_parameters(TINY_DENSE)[0]
    assert [num_parameters(c)[0] - base for c in (biased, normed, untied)] == [2 * 12, 2 * 4, 40]


def test_num_parameters_counts_dense_leading_layers_and_shared_experts():
    moe = replace(TINY_DENSE, num_experts=4, top_k=2, moe_intermediate_size=3, num_dense_layers=1, num_shared_experts=1)
    expert = 3 * 4 * 3
    total, active = num_parameters(moe)
    # One of the two SwiGLUs gives way to a router, four experts and a shared one.
    assert total == num_parameters(TINY_DENSE)[0] - 96 + 4 * 4 + 5 * expert
    assert total - active == 2 * expert


def test_train_flops_per_token_by_hand():
    matrices = num_parameters(TINY_DENSE)[0]  # tied: the one matrix is the output projection, so it multiplies
    assert train_flops_per_token(TINY_DENSE, seq_len=32) == 6 * matrices + 6 * 2 * 2 * 2 * 32
    assert train_flops_per_token(TINY_DENSE, 32, frozen=True) == 4 * matrices + 6 * 2 * 2 * 2 * 32
    # Untying adds a table that is only looked up: no FLOPs.
    untied = replace(TINY_DENSE, tie_word_embeddings=False)
    assert train_flops_per_token(untied, 32) == train_flops_per_token(TINY_DENSE, 32)


def test_train_flops_per_token_matches_the_matmuls_that_torch_counts():
    """Forward of the tiny model's matmuls, counted by torch's own FLOP counter; training is three times forward."""
    from torch.utils.flop_counter import FlopCounterMode

    config, tokens = TINY_DENSE, 16
    x_TD = torch.zeros(tokens, config.hidden_size)
    shapes = [(4, 4), (2, 4), (2, 4), (4, 4), (8, 4), (8, 4), (4, 8)] * config.num_layers + [(10, 4)]
    with FlopCounterMode(display=False) as counter:
        for out_dim, in_dim in shapes:
            torch.nn.functional.linear(x_TD.new_zeros(tokens, in_dim), x_TD.new_zeros(out_dim, in_dim))
    matmul_flops = 3 * counter.get_total_flops() // tokens
    norms = 6 * (2 * config.num_layers + 1) * config.hidden_size  # counted by us like every other parameter
    assert train_flops_per_token(config, seq_len=0) == matmul_flops + norms


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_peak_flops_of_known_gpus(name: str, tflops: int):
    assert peak_flops(name, torch.bfloat16) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", torch.bfloat16),
        ("Some Future GPU", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3", torch.float32),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16),
    ],
)
def test_peak_flops_is_none_rather_than_wrong(name: str, dtype: torch.dtype):
    assert peak_flops(name, dtype) is None
