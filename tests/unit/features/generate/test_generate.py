"""What ends a text, how tokens are chosen by logits and one uniform number, and what the cache
hides; the tokens themselves: tests/functional/test_generate.py.
"""

from types import SimpleNamespace

import pytest
import torch
from files import write_json
from tiny_transformers import word_tokenizer

from titanlite.features.generate.generate import (
    build_cache,
    choose_tokens,
    generate,
    get_end_of_turn_ids,
    get_eos_token_ids,
)

CPU = torch.device("cpu")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 5, 7]}, {"eos_token_id": 4}, [3, 5, 7]),
        ({"top_k": 1}, {"eos_token_id": 4}, [4, 7]),
        ({"eos_token_id": None}, {}, [7]),
    ],
)
def test_eos_tokens_of_tokenizer_and_model(tmp_path, generation, config, expected):
    for name, table in (("generation_config.json", generation), ("config.json", config)):
        if table is not None:
            write_json(tmp_path / name, table)
    assert get_eos_token_ids(SimpleNamespace(eos_token_id=7), tmp_path) == expected
    assert get_eos_token_ids(SimpleNamespace(eos_token_id=7)) == [7]
    assert get_eos_token_ids(SimpleNamespace(eos_token_id=None)) == []


def make_tokenizer(template):
    tokenizer = word_tokenizer(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = template
    return tokenizer


def test_the_end_of_a_turn():
    tokenizer = make_tokenizer(CHATML)
    assert get_end_of_turn_ids(tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert get_end_of_turn_ids(make_tokenizer(None)) == []


@pytest.fixture
def tiny_model():
    """Always says the token after the last one, of 5."""

    class Counting(torch.nn.Module):
        def forward(self, tokens):
            return torch.nn.functional.one_hot((tokens + 1) % 5, 5).float()

    return Counting()


def test_limits_and_ends(tiny_model):
    found = generate(
        tiny_model, [[0], [0, 1], [3]], max_new_tokens=4, device=CPU, eos_token_ids=[4]
    )
    assert [(c.tokens, c.ended) for c in found] == [([1, 2, 3], True), ([2, 3], True), ([], True)]
    (found,) = generate(tiny_model, [[0]], max_new_tokens=2, device=CPU, eos_token_ids=[4])
    assert (found.tokens, found.ended) == ([1, 2], False)
    (found,) = generate(tiny_model, [[1]], max_new_tokens=3, device=CPU, vocab_size=3)
    assert max(found.tokens) < 3, "ids that the tokenizer does not know are never chosen"
    assert generate(tiny_model, [], max_new_tokens=3, device=CPU) == []


# --- sampling


# Probabilities 0.5, 0.25, 0.15, 0.1 of tokens 2, 0, 3, 1.
LOGITS = torch.tensor([[0.25, 0.1, 0.5, 0.15]]).log()


def draw(uniform, logits=LOGITS, **options):
    return choose_tokens(logits, torch.tensor([uniform], dtype=torch.float64), **options).item()


def test_temperature_0_takes_the_most_likely_token():
    logits = torch.randn(5, 40)
    assert torch.equal(choose_tokens(logits, torch.rand(5), temperature=0), logits.argmax(-1))


@pytest.mark.parametrize("options", [{"top_k": 7}, {"temperature": 1.7, "top_k": 20, "top_p": 0.9}])
def test_distribution_is_that_of_transformers(options):
    """The set of tokens that can be drawn, and their shares, against transformers' own logit
    processors.
    """
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 50) * 2
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
    logits = torch.randn(6, 30).bfloat16()
    uniform = torch.rand(6, dtype=torch.float64)
    together = choose_tokens(logits, uniform, top_p=0.9)
    alone = torch.cat(
        [choose_tokens(logits[i : i + 1], uniform[i : i + 1], top_p=0.9) for i in range(6)]
    )
    assert torch.equal(together, alone) and together.dtype == torch.int64
    assert torch.equal(choose_tokens(logits.float(), uniform, top_p=0.9), together)


# --- the cache


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_padding_of_the_prompts_is_never_seen(tiny, family):
    model = tiny.ours(tiny.config(family)).eval()
    prompts = torch.arange(2 * 8).view(2, 8)
    results = []
    for filler in (0, 96):
        padded = prompts.clone()
        padded[0, 3:] = filler
        cache = build_cache(model, [3, 8], 12, CPU)
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
