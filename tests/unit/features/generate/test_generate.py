"""What ends a text, and what generation refuses; the tokens themselves:
tests/functional/test_generate.py.
"""

from types import SimpleNamespace

import pytest
import torch
from files import write_json
from tiny_transformers import word_tokenizer

from titanlite.features.generate.generate import generate, get_end_of_turn_ids, get_eos_token_ids

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
