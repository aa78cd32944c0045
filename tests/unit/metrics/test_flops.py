from dataclasses import replace

import pytest
import torch
from files import read_table
from tiny_transformers import save_tiny_llava

from titanlite.assemble import build_model
from titanlite.config.model import ModelSection
from titanlite.config.schema import LoRASection, OptimizerSection
from titanlite.features.estimate.tracker import StepRecorder
from titanlite.features.lora.layers import apply_lora
from titanlite.materialize import materialize
from titanlite.metrics.flops import peak_flops, train_flops_per_token
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families, resolve_model_config
from titanlite.optim.optimizer import freeze_parameters


def flops_of_config(config, seq_len):
    return train_flops_per_token(build_decoder(config), seq_len)


SEQ_LEN = 16
DENSE = replace(
    families()["qwen3"].presets["debug"], num_layers=3, vocab_size=64, tie_word_embeddings=False
)
TIED = replace(DENSE, tie_word_embeddings=True)
MOE = replace(families()["dots1"].presets["debug"], num_layers=3, vocab_size=64, num_dense_layers=1)


def recorded_flops(config, freeze):
    """What the products of a training step of one row compute, by the recorder of the planner, per
    token.
    """
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
        (DENSE, "model.embed_tokens*, model.layers.0.*, model.layers.1.*", 2),
        (TIED, "model.embed_tokens*, model.layers.0.*", 1),
        (MOE, "*.experts.*", 0),
        (MOE, "model.embed_tokens*, model.layers.0.*, *.self_attn.*, *.mlp.shared_experts.*", 1),
    ],
)
def test_what_frozen_parameters_save_is_what_backward_leaves_out(config, freeze, unreached_layers):
    model = build_decoder(config)
    freeze_parameters(model, OptimizerSection(freeze=freeze))
    saved = flops_of_config(config, SEQ_LEN) - train_flops_per_token(model, SEQ_LEN)
    recorded = recorded_flops(config, "") - recorded_flops(config, freeze)
    # Backward of attention has a fifth product, of the scores, which a kernel computes again.
    recorded -= unreached_layers * config.num_heads * config.head_dim * SEQ_LEN
    below = tuple(f"model.layers.{layer}." for layer in range(unreached_layers))
    if unreached_layers == config.num_layers:
        below += ("model.norm.",)
    # we count norms as matrices, the recorder does not count them
    for name, param in model.named_parameters():
        if "norm" in name:
            saved -= 2 * param.numel() * ((not param.requires_grad) + name.startswith(below))
    assert saved == recorded


@pytest.mark.parametrize("changes", [{"q_lora_rank": 0}, {"v_head_dim": 30}])
def test_flops_of_latent_attention(changes):
    """The recorder's, but for norms, which count as matrices; on the CPU no causal kernel takes
    such heads.
    """
    config = replace(
        families()["deepseek_v3"].presets["debug"], num_layers=2, vocab_size=64, **changes
    )
    norms = 6 * sum(
        p.numel() for name, p in build_decoder(config).named_parameters() if "norm" in name
    )
    width = config.qk_head_dim + config.value_head_dim
    above_diagonal = 6 * config.num_layers * config.num_heads * width * SEQ_LEN // 2
    assert recorded_flops(config, "") == flops_of_config(config, SEQ_LEN) - norms + above_diagonal


def flops_of(section, freeze):
    model = build_model(resolve_model_config(section))
    freeze_parameters(model, OptimizerSection(freeze=freeze))
    return train_flops_per_token(model, SEQ_LEN)


@pytest.mark.parametrize("window", [1, 16, 512])
def test_flops_of_a_window_are_those_of_the_pairs_in_it(window):
    """Two products of 2 FLOPs for each pair and width; half a token per query apart, as without."""
    config = replace(families()["ministral"].presets["debug"], sliding_window=window)
    full, windowed, _ = build_decoder(config).core_flops(512)
    pairs = sum(min(query + 1, window) for query in range(512))
    width = config.num_heads * config.head_dim
    assert windowed == pytest.approx(4 * width * pairs / 512, abs=2 * width)
    assert full == build_decoder(replace(config, window_pattern="f")).core_flops(512)[1]
    assert (windowed == full) == (window >= 512)


def test_a_frozen_vision_tower_has_no_backward(tmp_path):
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
    total = sum(param.numel() for param in build_decoder(config).parameters())
    matrices = total - config.vocab_size * config.hidden_size
    layer = (
        matrices - config.vocab_size * config.hidden_size - config.hidden_size
    ) // config.num_layers
    attention = config.num_heads * config.head_dim * SEQ_LEN
    for targets, unreached in (
        ("*.q_proj", 0),
        ("model.layers.1.*.q_proj, model.layers.2.mlp.*", 1),
    ):
        model = build_decoder(config)
        apply_lora(model, LoRASection(rank=2, targets=targets), torch.float32)
        flops = train_flops_per_token(model, SEQ_LEN)
        assert flops == 4 * matrices + 6 * 3 * attention - unreached * (2 * layer + 4 * attention)


@pytest.mark.parametrize(("name", "tflops"), read_table("plans")["peak_tflops"].items())
def test_peak_flops_is_none_rather_than_wrong(name, tflops):
    assert peak_flops(name, torch.bfloat16) == (tflops * 1e12 or None)
    assert peak_flops(name, torch.float32) is None
