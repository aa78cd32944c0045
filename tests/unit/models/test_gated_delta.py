"""Gated delta net in a decoder: packed documents do not see one another, first values, dtypes."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from titanlite.config import ModelConfig
from titanlite.materialize import materialize
from titanlite.models.decoder import Decoder, build_decoder

LENGTHS = [3, 70, 1, 29, 66]  # within and across chunks of 64
PADDING = 7
BOUND = 1e-5


def with_slow_decay(model: Decoder) -> Decoder:
    """A state that lasts for hundreds of tokens: with the usual decay a leak hides in rounding."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("A_log"):
                param.copy_(torch.empty_like(param).uniform_(0.01, 0.05, generator=generator).log())
    return model


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, documents and positions of one row that ends with padding."""
    sizes = torch.tensor([*LENGTHS, PADDING])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(97, (1, int(sizes.sum())), generator=generator)
    documents = torch.arange(len(sizes)).repeat_interleave(sizes)
    documents[-PADDING:] = -1
    positions = torch.cat([torch.arange(int(size)) for size in sizes])
    return tokens, documents[None], positions[None]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_packed_documents_are_those_of_transformers_one_by_one(tiny, family):
    """As near to float64 as transformers, which computes the rule in float32 only, is: rounding
    alone makes them differ by more than the bound.
    """
    config = tiny.config(family)
    ours = with_slow_decay(tiny.ours(config))
    theirs = tiny.theirs(config, ours)
    wide = copy.deepcopy(ours).double()
    tokens, documents, positions = packed()
    total = sum(LENGTHS)
    exact, logits = (
        model(tokens, positions_BS=positions, document_ids_BS=documents)[:, :total]
        for model in (wide, ours)
    )
    expected = torch.cat(
        [theirs(part, use_cache=False).logits for part in tokens[:, :total].split(LENGTHS, 1)], 1
    )
    for out in (logits, expected):
        assert (out - exact).norm() <= BOUND * exact.norm()
    leaking = ours(tokens, positions_BS=positions)[:, :total]
    assert (leaking - expected).norm() > 0.1 * expected.norm(), "a leak would show"
    for out in (exact, logits, expected):
        F.cross_entropy(out.flatten(0, 1), tokens[0, :total], reduction="sum").backward()
    reference, actual, wanted = gradients(wide), gradients(ours), gradients(theirs)
    assert actual.keys() == wanted.keys() == reference.keys()
    floor = 1e-3 * torch.stack([grad.norm() for grad in reference.values()]).norm()
    for name, grad in reference.items():
        _, exact = tiny.as_stored(name, grad, config)
        _, ours_as_stored = tiny.as_stored(name, actual[name], config)
        error, theirs_error = (
            (one - exact).norm() / torch.maximum(exact.norm(), floor)
            for one in (ours_as_stored, wanted[name])
        )
        assert theirs_error <= 2 * BOUND, f"{name}: {theirs_error:.1e}"
        assert error <= max(BOUND, 1.5 * theirs_error), f"{name}: {error:.1e}"


def test_first_values_are_those_of_transformers(tiny):
    config: ModelConfig = tiny.config("qwen3_next", linear_num_value_heads=256)
    model = build_decoder(config, torch.bfloat16)
    materialize(model, "cpu", seed=1)
    layer = model.get_submodule("model.layers.0.linear_attn")
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert layer.out_proj.weight.dtype == torch.bfloat16
    decay = layer.A_log.detach().exp()
    assert 0.01 <= decay.min() < 1 and 15 < decay.max() <= 16
    assert decay.mean() == pytest.approx(8, abs=1)
    assert (layer.dt_bias == 1).all() and (layer.norm.weight == 1).all()
    assert layer.conv1d.weight.detach().float().std() == pytest.approx(0.02, rel=0.1)
    for name in ("input_layernorm", "post_attention_layernorm"):
        assert not model.get_submodule(f"model.layers.0.{name}").weight.any()
    assert not model.model.norm.weight.any()


def test_a_zero_centred_norm_keeps_what_bfloat16_has_no_place_for(tiny):
    model = build_decoder(tiny.config("qwen3_next"), torch.bfloat16)
    materialize(model, "cpu", seed=1)
    norm = model.model.norm
    x = torch.full((1, norm.weight.numel()), 64.0, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(0.00390625)  # half of the step after 1
        assert norm(x).float().mean() == pytest.approx(1 / math.sqrt(1 + norm.eps / 4096), rel=0.01)
        norm.weight.fill_(0.005)
        assert norm(x).float().mean() > 1
