"""The cache: same logits as without it, whatever is in slots that no query may see."""

from dataclasses import replace

import pytest
import torch

from titanlite.features.generate.generate import build_cache, cached_attention
from titanlite.ops.attention import attention, build_attention_mask

LENGTHS = [5, 2, 9]
STEPS = 4
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "dots1", "glm4_moe", "deepseek_v3"]
# Float32 through 3 layers, sums in another order.
TOLERANCE = {"rtol": 0, "atol": 2e-5}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_step_are_those_of_a_full_forward(tiny, family):
    config = tiny.config(family)
    model = tiny.ours(config).eval()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(config.vocab_size, (n + STEPS,), generator=generator) for n in LENGTHS]
    prompts = torch.stack([torch.cat([t[:n], t.new_full((9 - n,), 50)]) for t, n in zip(texts, LENGTHS, strict=True)])
    with torch.no_grad():
        full = [model(text[None])[0] for text in texts]
        cache = build_cache(model, LENGTHS, 9 + STEPS, torch.device("cpu"))
        logits = model(prompts, cache=cache)
        for step in range(STEPS):
            expected = torch.stack([f[n + step - 1] for f, n in zip(full, LENGTHS, strict=True)])
            torch.testing.assert_close(logits, expected, **TOLERANCE)
            new = torch.stack([t[n + step] for t, n in zip(texts, LENGTHS, strict=True)])
            # Padding behind the rows changes nothing, whatever its tokens are.
            logits = model(torch.cat([new, new.new_full((step,), 7)])[None], cache=cache)
    assert cache.lengths_B.tolist() == [n + STEPS for n in LENGTHS]


def test_padding_of_the_prompts_is_never_seen(tiny):
    model = tiny.ours(tiny.config("qwen3_moe")).eval()
    prompts = torch.arange(2 * 8).view(2, 8)
    results = []
    for filler in (0, 96):
        padded = prompts.clone()
        padded[0, 3:] = filler
        cache = build_cache(model, [3, 8], 12, torch.device("cpu"))
        with torch.no_grad():
            results.append(
                [model(padded, cache=cache), *(model(torch.tensor([[5, 6]]), cache=cache) for _ in range(4))]
            )
    for a, b in zip(*results, strict=True):
        # The experts' rows are grouped with those of the padding: sums may be blocked otherwise.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_slots_are_the_only_memory_and_allocated_once(tiny):
    config = tiny.config("llama")
    model = tiny.ours(config).eval()
    cache = build_cache(model, [2, 3], 10, torch.device("cpu"))
    assert all(layer._keys is None for layer in cache.layers)
    with torch.no_grad():
        model(torch.ones(2, 3, dtype=torch.int64), cache=cache)
        places = [(layer._keys.data_ptr(), layer._values.data_ptr()) for layer in cache.layers]
        model(torch.ones(1, 2, dtype=torch.int64), cache=cache)
    assert [(layer._keys.data_ptr(), layer._values.data_ptr()) for layer in cache.layers] == places
    assert cache.layers[0]._keys.shape == (2, config.num_kv_heads, 10, config.head_dim)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_cached_attention_is_the_last_row_of_attention(heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 7, h, 8, generator=generator, dtype=torch.float64) for h in (heads[0], heads[1], heads[1])
    )
    expected = attention(q, k, v, build_attention_mask(None), 0.3)
    slots_k, slots_v = (torch.cat([x.transpose(1, 2), torch.full_like(x.transpose(1, 2), 9.0)], dim=2) for x in (k, v))
    for last in (0, 3, 6):
        visible = (torch.arange(14) <= last).expand(2, -1)
        out = cached_attention(q[:, last], slots_k, slots_v, visible, 0.3)
        # float64 sums of at most 7 terms in another order.
        torch.testing.assert_close(out, expected[:, last], rtol=0, atol=1e-12)


def test_rows_see_different_numbers_of_slots(tiny):
    """The short row must not see the slots that only the long one has filled."""
    config = replace(tiny.config("qwen3"), num_layers=1)
    model = tiny.ours(config).eval()
    cache = build_cache(model, [1, 6], 8, torch.device("cpu"))
    with torch.no_grad():
        model(torch.arange(12).view(2, 6), cache=cache)
        assert cache.visible().int().sum(1).tolist() == [2, 7]
