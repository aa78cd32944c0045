"""The cache: same logits as without it, whatever is in slots that no query may see."""

import pytest
import torch

from titanlite.features.generate.generate import build_cache

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
    prompts = torch.stack(
        [torch.cat([t[:n], t.new_full((9 - n,), 50)]) for t, n in zip(texts, LENGTHS, strict=True)]
    )
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
                [
                    model(padded, cache=cache),
                    *(model(torch.tensor([[5, 6]]), cache=cache) for _ in range(4)),
                ]
            )
    for a, b in zip(*results, strict=True):
        # The experts' rows are grouped with those of the padding: sums may be blocked otherwise.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
