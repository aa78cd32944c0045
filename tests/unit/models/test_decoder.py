"""The decoder: packed documents, meta building, dtypes, names, ties, checkpointing."""

from dataclasses import replace

import pytest
import torch

from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families


def test_a_large_preset_has_its_parameters_and_takes_no_memory():
    model = build_decoder(families()["qwen3_moe"].presets["235B-A22B"], torch.bfloat16)
    assert sum(param.numel() for param in model.parameters()) == 235_093_634_560
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_build_does_not_change_the_default_dtype():
    build_decoder(families()["llama"].presets["debug"], torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(RuntimeError):  # a negative size
        build_decoder(replace(families()["llama"].presets["debug"], hidden_size=-1), torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("family", ["dots1", "gpt_oss", "qwen3_next"])
def test_buffers_stay_float32_in_a_bfloat16_model(tiny, family):
    model = build_decoder(tiny.config(family), torch.bfloat16)
    materialize(model, "cpu")
    kept = model.float32_parameters()
    assert {param.dtype for param in model.parameters() if param not in kept} == {torch.bfloat16}
    assert {param.dtype for param in kept} <= {torch.float32}
    for name, buffer in model.named_buffers():
        assert buffer.dtype == (
            torch.int64 if name.endswith("tokens_per_expert") else torch.float32
        ), name


def test_hooks_see_projections_and_norms_that_are_fused_without_them(tiny):
    model = build_decoder(tiny.config("qwen3"))
    materialize(model, "cpu")
    tokens, seen = torch.arange(8)[None], {}
    expected = model(tokens)
    names = ("q_proj", "v_proj", "q_norm", "k_norm", "gate_proj", "up_proj")
    for name, module in model.named_modules():
        if name.endswith(names):
            module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out}))
    torch.testing.assert_close(model(tokens), expected, rtol=1e-6, atol=1e-6)
    layers = range(len(model.model.layers))
    parts = ["self_attn." + name for name in names[:4]] + ["mlp." + name for name in names[4:]]
    assert seen.keys() == {f"model.layers.{i}.{part}" for i in layers for part in parts}


def pack(config, lengths, padding):
    """Tokens and labels of documents, and the packed row: tokens, labels, positions, document
    ids.
    """
    documents = [torch.randint(config.vocab_size, (2, n)) for n in lengths]
    tokens = torch.cat([d[0] for d in documents] + [torch.zeros(padding, dtype=torch.int64)])
    labels = torch.cat([d[1] for d in documents] + [torch.full((padding,), -100)])
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding)])
    numbers = torch.tensor([*range(len(lengths)), -1])
    ids = numbers.repeat_interleave(torch.tensor([*lengths, padding]))
    return documents, [x[None] for x in (tokens, labels, positions, ids)]


@pytest.mark.parametrize("family", families())
def test_packed_documents_equal_separate_documents(tiny, family):
    config = tiny.config(family)
    model = tiny.ours(config).double()
    documents, packed = pack(config, [5, 1, 9], 4)
    tokens, labels, positions, ids = packed
    loss = model(tokens, labels, positions, ids).cross_entropy
    packed_counts = {
        name: moe.gate.tokens_per_expert.clone() for name, moe in model.moe_layers().items()
    }
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    total, counts = 0.0, dict.fromkeys(packed_counts, 0)
    for document in documents:
        total = total + model(document[0][None], document[1][None]).cross_entropy
        counts = {
            name: counts[name] + moe.gate.tokens_per_expert
            for name, moe in model.moe_layers().items()
        }
    # The router computes its logits in float32 whatever the model's dtype, so float64 does not
    # reach further than that.
    bound = 1e-6 if config.num_experts else 1e-12
    assert abs(loss - total) <= bound * total
    for actual, expected in zip(
        gradients, torch.autograd.grad(total, list(model.parameters())), strict=True
    ):
        assert (actual - expected).norm() <= bound * 100 * expected.norm()
    for name in counts:
        assert torch.equal(packed_counts[name], counts[name])


def test_balance_losses_are_summed_over_layers(tiny):
    model = tiny.ours(tiny.config("qwen3_moe"))
    tokens = torch.arange(16).view(2, 8)
    assert model(tokens, tokens).aux.item() == 0.0
    parts = []
    for moe in model.moe_layers().values():
        moe.gate.aux_loss_coeff = 0.1
        moe.gate.register_forward_hook(lambda _m, _a, out: parts.append(out.aux_loss))
    torch.testing.assert_close(model(tokens, tokens).aux, sum(parts), rtol=1e-6, atol=0)
    assert parts[0] > 0
