"""`check` is the preflight of a run, and says which mesh the run has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite import preflight
from titanlite.features.tools import check

NEW = '[model]\nname = "qwen3_moe"\nflavor = "debug"\n'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Check a configuration; gives what is printed. The preflight alone prints errors only."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(NEW)

    def run_check(*overrides: str, code: int) -> str:
        arguments = ["--world-size=4", "--config=mine.toml", "--training.seq_len=64", *overrides]
        assert check.main(arguments) == code
        said = capsys.readouterr()
        assert preflight.main(arguments) == code
        assert capsys.readouterr().out == ""
        return said.out + said.err

    return run_check


def test_a_configuration_that_passes(run: Callable[..., str]) -> None:
    said = run("--parallelism.tensor_parallel_degree=2", code=0)
    assert said.startswith("OK on 4 ranks: dp_replicate 1 x dp_shard 2 x tp 2, ep 1\nNot looked at: rows")


def test_all_paths_that_are_missing_are_said_at_once(run: Callable[..., str]) -> None:
    said = run("--model.path=gone", "--data.path=lost.jsonl", "--data.dataset=examples", code=2)
    assert said.startswith("titanlite: error: ")
    assert "model.path: gone does not exist." in said and "data.path: lost.jsonl does not exist." in said
