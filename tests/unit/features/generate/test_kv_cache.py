"""The cache: same logits as without it, whatever is in slots that no query may see."""

import pytest
import torch

from titanlite.features.generate.generate import build_cache


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_padding_of_the_prompts_is_never_seen(tiny, family):
    model = tiny.ours(tiny.config(family)).eval()
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
        torch.testing.assert_close(a, b, rtol=0, atol=3e-6)
