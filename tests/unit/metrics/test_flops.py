from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_transformers import save_tiny_llava

from titanlite.assemble import build_model
from titanlite.config.model import ModelConfig, ModelSection
from titanlite.config.schema import LoRASection, OptimizerSection
from titanlite.features.estimate.tracker import StepRecorder
from titanlite.features.lora.layers import apply_lora
from titanlite.materialize import materialize
from titanlite.metrics.flops import peak_flops, train_flops_per_token
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families, resolve_model_config
from titanlite.models.moe import is_routed
from titanlite.optim.optimizer import freeze_parameters

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


def num_parameters(config: ModelConfig) -> tuple[int, int]:
    """All parameters, and those that are active for one token."""
    sizes = {name: param.numel() for name, param in build_decoder(config).named_parameters()}
    total, routed = sum(sizes.values()), sum(size for name, size in sizes.items() if is_routed(name))
    return total, total - (routed * (config.num_experts - config.top_k) // config.num_experts if routed else 0)


def flops_of_config(config: ModelConfig, seq_len: int) -> int:
    return train_flops_per_token(build_decoder(config), seq_len)


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


@pytest.mark.parametrize(
    ("family", "flavor", "total", "active"),
    [
        ("glm4_moe", "4.5-Air-106B-A12B", 106e9, 12e9),
        ("glm4_moe", "4.5-355B-A32B", 355e9, 32e9),
        ("deepseek_v3", "Moonlight-16B-A3B", 15.96e9, 2.24e9),
    ],
)
def test_published_sizes(family: str, flavor: str, total: float, active: float):
    config = families()[family].presets[flavor]
    found, found_active = num_parameters(config)
    assert found == pytest.approx(total, rel=0.01)
    # Published without embedding and head.
    assert found_active - 2 * config.vocab_size * config.hidden_size == pytest.approx(active, rel=0.03)


def test_train_flops_per_token_by_hand():
    matrices = num_parameters(TINY_DENSE)[0]  # tied: the one matrix is the output projection, so it multiplies
    assert flops_of_config(TINY_DENSE, 32) == 6 * matrices + 6 * 2 * 2 * 2 * 32
    # Untying adds a table that is only looked up: no FLOPs.
    untied = replace(TINY_DENSE, tie_word_embeddings=False)
    assert flops_of_config(untied, 32) == flops_of_config(TINY_DENSE, 32)


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
    assert flops_of_config(config, 0) == matmul_flops + norms


SEQ_LEN = 16
DENSE = replace(families()["qwen3"].presets["debug"], num_layers=3, vocab_size=64, tie_word_embeddings=False)
TIED = replace(DENSE, tie_word_embeddings=True)
MOE = replace(families()["dots1"].presets["debug"], num_layers=3, vocab_size=64, num_dense_layers=1)


def recorded_flops(config: ModelConfig, freeze: str) -> int:
    """What the products of a training step of one row compute, by the recorder of the planner, per token."""
    model = build_decoder(config)
    freeze_parameters(model, OptimizerSection(freeze=freeze))
    materialize(model, "cpu")
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    with StepRecorder(model.parameters()) as recorder:
        model(tokens, tokens).cross_entropy.backward()
    return sum(work.flops for work in recorder.work.values()) // SEQ_LEN


@pytest.mark.parametrize(
    ("config", "freeze", "unreached_layers"),
    [
        (DENSE, "model.embed_tokens*", 0),  # only looked up
        (DENSE, "*.mlp.*", 0),
        (DENSE, "*.self_attn.*_proj.weight, lm_head*", 0),
        (DENSE, "model.layers.0.*, model.layers.1.*", 0),  # the embedding lies before them
        (DENSE, "model.embed_tokens*, model.layers.0.*, model.layers.1.*", 2),
        (DENSE, "model.embed_tokens*, model.layers.*", 3),
        (DENSE, "model.*", 3),
        (TIED, "model.embed_tokens*", 0),
        (TIED, "model.embed_tokens*, model.layers.0.*", 1),
        (MOE, "*.experts.*", 0),
        (MOE, "model.embed_tokens*, model.layers.0.*, *.self_attn.*, *.mlp.shared_experts.*", 1),
        (MOE, "*.down_proj, *.mlp.gate.*", 0),
    ],
)
def test_what_frozen_parameters_save_is_what_backward_leaves_out(
    config: ModelConfig, freeze: str, unreached_layers: int
):
    model = build_decoder(config)
    freeze_parameters(model, OptimizerSection(freeze=freeze))
    saved = flops_of_config(config, SEQ_LEN) - train_flops_per_token(model, SEQ_LEN)
    recorded = recorded_flops(config, "") - recorded_flops(config, freeze)
    # Backward of attention has a fifth product, of the scores, which a kernel computes again.
    recorded -= unreached_layers * config.num_heads * config.head_dim * SEQ_LEN
    below = tuple(f"model.layers.{layer}." for layer in range(unreached_layers))
    if unreached_layers == config.num_layers:
        below += ("model.norm.",)
    for name, param in model.named_parameters():  # we count norms as matrices, the recorder does not count them
        if "norm" in name:
            saved -= 2 * param.numel() * ((not param.requires_grad) + name.startswith(below))
    assert saved == recorded


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 0}, {"v_head_dim": 30}])
def test_flops_of_latent_attention(changes: dict[str, int]):
    """The recorder's, but for norms, which count as matrices; on the CPU no causal kernel takes such heads."""
    config = replace(families()["deepseek_v3"].presets["debug"], num_layers=2, vocab_size=64, **changes)
    norms = 6 * sum(p.numel() for name, p in build_decoder(config).named_parameters() if "norm" in name)
    width = config.qk_head_dim + config.value_head_dim
    above_diagonal = 6 * config.num_layers * config.num_heads * width * SEQ_LEN // 2
    assert recorded_flops(config, "") == flops_of_config(config, SEQ_LEN) - norms + above_diagonal


def flops_of(section: ModelSection, freeze: str) -> int:
    model = build_model(resolve_model_config(section))
    freeze_parameters(model, OptimizerSection(freeze=freeze))
    return train_flops_per_token(model, SEQ_LEN)


@pytest.mark.parametrize("freeze", ["", "model.embed_tokens*, model.layers.0.*", "*.experts.*", "model.*"])
def test_a_model_of_transformers_has_the_flops_of_the_native_one(freeze: str):
    native = ModelSection(name="qwen3_moe", flavor="debug", implementation="native")
    other = replace(native, implementation="transformers")
    assert flops_of(native, freeze) == flops_of(other, freeze)


def test_a_frozen_vision_tower_has_no_backward(tmp_path: Path):
    save_tiny_llava(tmp_path)
    section = ModelSection(hf_assets_path=str(tmp_path))
    model = build_model(resolve_model_config(section))
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    tower = sum(size for name, size in sizes.items() if "vision_tower" in name)
    (first,) = (size for name, size in sizes.items() if name.endswith("projector.linear_1.weight"))
    saved = flops_of(section, "") - flops_of(section, "*vision_tower*")
    assert saved == 4 * tower + 2 * first  # what goes into the projector needs no gradient either


def test_flops_of_adapters_are_four_sixths_and_backward_ends_at_the_first():
    config = DENSE
    matrices = num_parameters(config)[0] - config.vocab_size * config.hidden_size
    layer = (matrices - config.vocab_size * config.hidden_size - config.hidden_size) // config.num_layers
    attention = config.num_heads * config.head_dim * SEQ_LEN
    for targets, unreached in (("*.q_proj", 0), ("model.layers.1.*.q_proj, model.layers.2.mlp.*", 1)):
        model = build_decoder(config)
        apply_lora(model, LoRASection(rank=2, targets=targets), torch.float32)
        flops = train_flops_per_token(model, SEQ_LEN)
        assert flops == 4 * matrices + 6 * 3 * attention - unreached * (2 * layer + 4 * attention)


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
