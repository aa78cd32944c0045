"""`check` says what would be trained, and looks at first rows, targets of adapters, objective and weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanlite import preflight
from titanlite.features.tools import check

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
NEW = ("--model.init=random",)
LORA = ("--model.path=model", "--model.name=", "--model.flavor=", "--lora.rank=2")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
SIZES |= {"num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 64, "model_type": "qwen3"}
SIZES |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
OK = {"question": "a", "answer": "b"}


@pytest.fixture
def run(make_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Check a configuration of these rows, none for text; gives what is printed."""
    monkeypatch.chdir(tmp_path)

    def run_check(rows: list[dict[str, Any]] | None, *overrides: str, code: int = 0, world_size: int = 1) -> str:
        Path("mine.toml").write_text('[model]\nname = "qwen3_moe"\nflavor = "debug"\n')
        if rows is not None:
            Path("model").mkdir(exist_ok=True)
            Path("model/config.json").write_text(json.dumps(SIZES | {"architectures": ["Qwen3ForCausalLM"]}))
            make_job(rows)
            overrides = ("--data.path=rows.jsonl", "--data.tokenizer_path=tokenizer", *overrides)
        arguments = [f"--world-size={world_size}", "--config=mine.toml", "--training.seq_len=64", *overrides]
        assert check.main(arguments) == code
        if rows is None:
            before = capsys.readouterr()
            assert preflight.main(arguments) == code
            assert capsys.readouterr().out == "", "run_train.sh asks too, and has more to say"
            return before.out + before.err
        said = capsys.readouterr()
        return said.out + said.err

    return run_check


def test_what_would_be_trained(run: Any) -> None:
    said = run(None, "--parallelism.tensor_parallel_degree=2", world_size=4)
    for line in (
        "OK on 4 ranks: dp_replicate 1 x dp_shard 2 x tp 2, ep 1\n  model      qwen3_moe, 0.4 M parameters, random wei",
        "  memory     about 1.7 MiB a rank for weights, gradients and optimizer states; more for activations\n",
        "  training   next_token, 1,000 steps, 128,000 tokens with padding\n  batch      2 sequences of 64 tokens\n",
        "  optimizer  AdamW, lr 0.0003, weight decay 0.1, beta2 0.95, warm-up 3% of the steps, at most 200\n",
        "\n  folder     outputs/mine\nNot looked at: the other rows",
    ):
        assert line in said


def test_the_first_rows(run: Any) -> None:
    said = run([OK] * 100, *LORA, "--lora.targets=q_proj")
    assert "data       rows.jsonl, form messages; its first 64 rows have" in said
    assert "M of them trained, weights of model, adapters of rank 2\n" in said
    said = run([{"text": "a"}], "--validation.enable=true")
    assert "form text; its first row has 2 tokens" in said
    assert "\n  held out   rows of these files (data.validation_share); data.validation_path names others\n" in said


def test_all_paths_that_are_missing_are_said_at_once(run: Any) -> None:
    said = run(None, "--model.path=gone", "--data.path=lost.jsonl", "--data.dataset=examples", code=2)
    assert "model.path: gone does not exist." in said and "data.path: lost.jsonl does not exist." in said


@pytest.mark.parametrize(
    ("rows", "overrides", "problem"),
    [
        ([OK] * 3 + [{"question": "a"}] * 2, NEW, "rows.jsonl, lines 4-5: no field 'messages'"),
        ([{"ask": "a"}], NEW, "line 1: the fields are 'ask', which is no known form"),
        ([OK], (), "the run would begin with random weights, and its data are rows of form 'messages'"),
        ([PAIR], NEW, 'Set training.objective = "dpo"'),
        ([OK], (*NEW, "--training.objective=dpo"), 'training.objective = "dpo" needs preference pairs'),
        ([{"text": "a" * 200}], (), "an example of the first row of rows.jsonl has"),
        ([OK], (*LORA, "--lora.targets=nothing"), "lora.targets"),
        ([OK], (*NEW, "--optimizer.freeze=nothing"), "optimizer.freeze"),
        ([OK], (*NEW, "--optimizer.lr_multipliers=nothing=2"), "optimizer.lr_multipliers"),
    ],
)
def test_what_a_run_would_refuse(
    run: Any, rows: list[dict[str, Any]], overrides: tuple[str, ...], problem: str
) -> None:
    said = run(rows, *overrides, code=2)
    assert said.startswith("titanlite: error: ") and problem in said, json.dumps(said)


def test_rows_that_may_be_left_out(run: Any) -> None:
    assert run([OK, {"question": "a"}], *NEW, "--data.bad_rows=skip").startswith("OK")
    run([{"question": "a"}, OK], *NEW, "--data.bad_rows=skip")
    run([{"question": "a"}], *NEW, "--data.bad_rows=skip", code=2)
