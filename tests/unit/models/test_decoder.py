"""The decoder: packed documents, meta building, dtypes, names, ties, checkpointing."""

import time
from dataclasses import replace

import pytest
import torch

from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families

TOTALS = {
    ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "32B"): 32_762_123_264,
    ("llama", "3.1-8B"): 8_030_261_248,
    ("llama", "3.1-70B"): 70_553_706_496,
    ("llama", "3.2-1B"): 1_235_814_400,
}


def test_presets_have_their_parameters_and_take_no_memory():
    start = time.process_time()
    for (family, flavor), total in TOTALS.items():
        model = build_decoder(families()[family].presets[flavor], torch.bfloat16)
        assert sum(param.numel() for param in model.parameters()) == total
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    # about 0.5 s; a real allocation of 470 GB would not end at all
    assert time.process_time() - start < 10


def test_build_does_not_change_the_default_dtype():
    build_decoder(families()["llama"].presets["debug"], torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(RuntimeError):  # a negative size
        build_decoder(replace(families()["llama"].presets["debug"], hidden_size=-1), torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("family", families())
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


def pack(config, lengths, padding, generator):
    """Tokens and labels of documents, and the packed row: tokens, labels, positions, document
    ids.
    """
    documents = [torch.randint(config.vocab_size, (2, n), generator=generator) for n in lengths]
    tokens = torch.cat([d[0] for d in documents] + [torch.zeros(padding, dtype=torch.int64)])
    labels = torch.cat([d[1] for d in documents] + [torch.full((padding,), -100)])
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding)])
    ids = torch.cat(
        [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)]
    )
    return documents, [x[None] for x in (tokens, labels, positions, ids)]


@pytest.mark.parametrize("family", families())
def test_packed_documents_equal_separate_documents(tiny, family):
    config = tiny.config(family)
    model = tiny.ours(config).double()
    documents, packed = pack(config, [5, 1, 9], 4, torch.Generator().manual_seed(0))
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


def test_loss_sums(tiny):
    model = tiny.ours(tiny.config("qwen3_moe"))
    tokens = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    sums = model(tokens, labels)
    expected = torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(sums.cross_entropy, expected, rtol=1e-6, atol=0)
    assert sums.aux.item() == 0.0
    for moe in model.moe_layers().values():
        moe.gate.aux_loss_coeff = 0.1
    parts = []
    for moe in model.moe_layers().values():
        moe.gate.register_forward_hook(lambda _m, _a, out: parts.append(out.aux_loss))
    torch.testing.assert_close(model(tokens, labels).aux, sum(parts[:3]), rtol=1e-6, atol=0)
    assert parts[0] > 0
