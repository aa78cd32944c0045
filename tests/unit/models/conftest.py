"""Fixtures: small configurations, the decoder with random values, and transformers' model with the
same values.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.loading import hf_config
from titanlite.checkpoint.pieces import Layout, checkpoint_pieces
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families, family_of


def small_config(family, **changes):
    """The debug preset with a small vocabulary."""
    return replace(families()[family].presets["debug"], vocab_size=97, **changes)


def build_ours(config, seed=0):
    """Decoder with random values that are not symmetric: norms and biases too, and a selection
    bias.
    """
    model = build_decoder(config)
    materialize(model, "cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            # small inputs of a norm would make rounding errors large
            std = 0.3 if param.dim() < 2 else 1.0 if "conv1d" in name else 0.1
            param.copy_(torch.randn(param.shape, generator=generator) * std)
            if name.endswith("norm.weight"):
                begins_at_zero = config.norm_offset and not name.endswith("linear_attn.norm.weight")
                param.add_(0.0 if begins_at_zero else 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias") and family_of(config).expert_bias_key:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.05)
    return model


def as_stored(name, values, config):
    """The tensor `name` under the name and in the form of transformers' model."""
    pieces = list(checkpoint_pieces(name, tuple(values.shape), config, Layout(is_fused=True)))
    parts = [values[piece.region.slices] for piece in pieces]
    found = torch.cat([part.mT for part in parts] if pieces[0].is_transposed else parts)
    key = pieces[0].key
    for stored, loaded in {
        "block_sparse_moe": "mlp",
        "mlp.moe_statics": "mlp.gate.moe_statics",
    }.items():
        key = key.replace(stored, loaded)
    return key, found.view(pieces[0].shape)


def values_of(ours):
    """All values of `ours` as transformers' model has them."""
    config = ours.config
    has_bias = bool(family_of(config).expert_bias_key)
    return dict(
        as_stored(name, value, config)
        for name, value in ours.state_dict().items()
        if has_bias or not name.endswith("expert_bias")
    )


def build_theirs(config, ours):
    """transformers' own model with the values of `ours`, plain attention and plain experts."""
    found = hf_config(config)
    found._experts_implementation = "eager"
    theirs = AutoModelForCausalLM.from_config(
        found, attn_implementation="eager", dtype=torch.float32
    )
    missing, unexpected = theirs.load_state_dict(values_of(ours), strict=False)
    assert unexpected == missing == []
    return theirs


@pytest.fixture(scope="session")
def tiny():
    """`tiny.config(family, **changes)`, `tiny.ours(config)`, `tiny.theirs(config, ours)`,
    `tiny.as_stored(name, values, config)`.
    """
    return SimpleNamespace(
        config=small_config, ours=build_ours, theirs=build_theirs, as_stored=as_stored
    )
