"""`check` is the preflight of a run, and says which mesh the run has."""

from pathlib import Path

import pytest

from titanlite import preflight
from titanlite.features.tools import check
from titanlite.models.families import families

NEW = '[model]\nname = "qwen3_moe"\nflavor = "debug"\n'


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Check a configuration; gives what is printed. The preflight alone prints errors only."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(NEW)

    def run_check(*overrides, code):
        arguments = ["--world-size=4", "--config=mine.toml", "--training.seq_len=64", *overrides]
        assert check.main(arguments) == code
        said = capsys.readouterr()
        assert preflight.main(arguments) == code
        assert capsys.readouterr().out == ""
        return said.out + said.err

    return run_check


def test_a_configuration_that_passes(run):
    said = run("--parallelism.tensor_parallel_degree=2", code=0)
    assert said.startswith(
        "OK on 4 ranks: dp_replicate 1 x dp_shard 2 x tp 2, ep 1\nNot checked: rows"
    )


# Sizes that the native decoder could train, and transformers' class refuses.
UNSAVABLE = """
from dataclasses import replace
from titanlite.models.families.llama import LLAMA
SMALL = replace(LLAMA.presets["debug"], family="odd", hidden_size=90)
FAMILY = replace(LLAMA, name="odd", rules=(), presets={"small": SMALL})
"""


def test_a_model_that_cannot_be_saved_is_refused(
    tmp_path,
    monkeypatch,
    capsys,
    request,
):
    request.addfinalizer(families.cache_clear)  # the family below joins them
    monkeypatch.chdir(tmp_path)
    Path("unsavable.py").write_text(UNSAVABLE)
    Path("mine.toml").write_text('[model]\nname = "unsavable:FAMILY"\nflavor = "small"\n')
    assert check.main(["--config=mine.toml"]) == 2
    said = capsys.readouterr().err
    assert "refuses the config.json to be saved: " in said and "hidden size (90)" in said
    assert "Its values are from [model]" in said and len(said) < 1000
    assert check.main(["--config=mine.toml", "--checkpoint.enable=false"]) == 0
    assert check.main(["--config=mine.toml", "--model.overrides.hidden_size=88"]) == 0


def test_tokenizer_and_embedding_are_compared(
    make_tokenizer,
    tmp_path,
    monkeypatch,
    caplog,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    make_tokenizer().save_pretrained("tokenizer")
    Path("book.txt").write_text("one two " * 99)
    Path("rows.jsonl").write_text('{"text": "one two"}\n' * 9)
    Path("mine.toml").write_text(NEW + '[data]\ntokenizer_path = "tokenizer"\n')
    few = "--model.overrides.vocab_size=64"
    said = "model's vocab_size is 64. Use the model's own tokenizer, or set model.overrides."
    for path, code in (("book.txt", 2), ("rows.jsonl", 0)):  # rows may have few of the tokens
        arguments = ["--config=mine.toml", f"--data.path={path}"]
        assert check.main(arguments) == 0
        caplog.clear()
        assert check.main([*arguments, few]) == code
        assert said in (capsys.readouterr().err if code else caplog.text)
