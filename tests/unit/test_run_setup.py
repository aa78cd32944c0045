"""What is looked at when a run is set up."""

from dataclasses import replace

import pytest
import torch

from titanlite import run_setup
from titanlite.config import JobConfig
from titanlite.errors import ConfigError, DataError
from titanlite.models.families import families
from titanlite.run_setup import check_device, check_vocabulary, turn_off_dropout

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


@pytest.mark.parametrize(
    ("backend", "dtype", "device", "text"),
    [
        ("flex", "auto", "cpu", r"'flex' has no backward pass on the CPU\. Set it to 'sdpa'\.$"),
        ("varlen", "bfloat16", "cpu", r"and activations are bfloat16 on cpu\. Set it to 'sdpa'\.$"),
        ("varlen", "float32", "cuda", r"float32 on cuda\. Set it to 'sdpa', or training\..*_param to 'bfloat16'\.$"),
    ],
)
def test_attention_that_a_device_does_not_have(backend, dtype, device, text):
    job = JobConfig()
    job.model.attention_backend, job.training.mixed_precision_param = backend, dtype
    with pytest.raises(ConfigError, match=r"^model\.attention_backend: .*" + text):
        check_device(job, torch.device(device))


def test_a_token_without_a_row_is_an_error():
    with pytest.raises(DataError, match=r"has 1001 tokens, but the model's vocab_size is 1000"):
        check_vocabulary(1001, CONFIG)


def test_dpo_turns_off_dropout_wherever_it_is(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(run_setup.logger, "info", lambda text, *values: said.append(text % values))

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_dropout, self.p, self.inner = 0.1, 7.0, torch.nn.Dropout(0.2)

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.dropout, self.resid_dropout = Attention(), 0.05, 0.0

    model = Adapted()
    turn_off_dropout(model)
    attention = model.attention
    assert (model.dropout, attention.attention_dropout, attention.inner.p, attention.p) == (0.0, 0.0, 0.0, 7.0)
    assert said == ["dpo: dropout of 0.05, 0.1, 0.2 is off, as in the reference"]
