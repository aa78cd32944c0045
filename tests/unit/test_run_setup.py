"""What is looked at when a run is set up."""

from dataclasses import replace

import pytest

from titanlite import run_setup
from titanlite.errors import DataError
from titanlite.models.families import families
from titanlite.run_setup import check_vocabulary

CONFIG = replace(families()["qwen3_moe"].presets["debug"], vocab_size=1000)


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(run_setup.logger, "warning", lambda text, *values: said.append(text % values))
    return said


def test_a_tokenizer_far_smaller_than_the_embedding_is_a_warning_of_rank_0(warnings, monkeypatch):
    check_vocabulary(500, CONFIG)
    assert warnings == []
    monkeypatch.setenv("RANK", "1")
    check_vocabulary(499, CONFIG)
    assert warnings == []
    monkeypatch.setenv("RANK", "0")
    check_vocabulary(499, CONFIG)
    (text,) = warnings
    assert text.startswith("data: the tokenizer has 499 tokens, the embedding 1000 rows")
    assert text.endswith("model.overrides.vocab_size = 499.")


def test_a_token_without_a_row_is_an_error():
    with pytest.raises(DataError, match=r"has 1001 tokens, but the model's vocab_size is 1000"):
        check_vocabulary(1001, CONFIG)
