"""Choosing tokens: greedy, temperature, top-k and top-p, as functions of logits and one uniform
number.
"""

import pytest
import torch

from titanlite.features.generate.generate import choose_tokens

# Probabilities 0.5, 0.25, 0.15, 0.1 of tokens 2, 0, 3, 1.
LOGITS = torch.tensor([[0.25, 0.1, 0.5, 0.15]]).log()


def draw(uniform, logits=LOGITS, **options):
    return choose_tokens(logits, torch.tensor([uniform], dtype=torch.float64), **options).item()


def test_temperature_0_takes_the_most_likely_token():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose_tokens(logits, torch.rand(5), temperature=0), logits.argmax(-1))


@pytest.mark.parametrize("options", [{"top_k": 7}, {"temperature": 1.7, "top_k": 20, "top_p": 0.9}])
def test_distribution_is_that_of_transformers(options):
    """The set of tokens that can be drawn, and their shares, against transformers' own logit
    processors.
    """
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 2
    expected = TemperatureLogitsWarper(options.get("temperature", 1.0))(None, logits)
    if "top_k" in options:
        expected = TopKLogitsWarper(options["top_k"])(None, expected)
    if "top_p" in options:
        expected = TopPLogitsWarper(options["top_p"])(None, expected)
    count = 4000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = choose_tokens(logits.expand(count, -1), uniform, **options)
    # A grid of uniform numbers hits every share to within one draw at either end.
    torch.testing.assert_close(
        drawn.bincount(minlength=50) / count, expected.softmax(-1)[0], rtol=0, atol=1.01 / count
    )


def test_rows_do_not_depend_on_each_other_or_on_the_dtype():
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(2)).bfloat16()
    uniform = torch.rand(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    together = choose_tokens(logits, uniform, top_p=0.9)
    alone = torch.cat(
        [choose_tokens(logits[i : i + 1], uniform[i : i + 1], top_p=0.9) for i in range(6)]
    )
    assert torch.equal(together, alone) and together.dtype == torch.int64
    assert torch.equal(choose_tokens(logits.float(), uniform, top_p=0.9), together)
