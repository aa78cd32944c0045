"""The recipe that runs anywhere: a short run of it learns, and plain transformers scores the saved model the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from titanlite.config import load_config
from titanlite.preflight import check, prepare
from titanlite.trainer import Trainer

ROOT = Path(__file__).parents[2]
SAMPLES = 200


@pytest.mark.slow
def test_the_saved_model_scores_the_same_in_transformers(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [f"--evaluation.samples={SAMPLES}", "--training.steps=300", "--evaluation.freq=1000"]
    recipe = ROOT / "configs" / "recipes" / "sft_arithmetic.toml"
    script = f"--job.prepare={ROOT / 'scripts' / 'recipes' / 'make_arithmetic.py'}"
    job = load_config(["--config", str(recipe), script, f"--data.cache_folder={tmp_path / 'cache'}", *overrides])
    prepare(job)
    checked = check(job, 4)
    run_ranks(4, lambda: Trainer(checked.job, checked.model_config, checked.degrees).train())

    run = tmp_path / job.job.dump_folder
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [line["eval/exact_match"] for line in lines if "eval/exact_match" in line]
    assert scores[0] == 0.0 and scores[-1] > 0.02

    folder = run / "checkpoint" / "step-300"
    rows = [json.loads(line) for line in (run / "made" / "heldout.jsonl").read_text().splitlines()]
    rows = [rows[i * len(rows) // SAMPLES] for i in range(SAMPLES)]  # those that the evaluation took
    assert score(folder, rows) == pytest.approx(scores[-1], abs=1e-9)


@torch.no_grad()
def score(folder: Path, rows: list[dict[str, Any]]) -> float:
    """Share of `rows` that the model in `folder` answers right, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    right = 0
    for start in range(0, len(rows), 50):
        batch = rows[start : start + 50]
        prompts = [
            tokenizer.apply_chat_template(r["messages"][:1], tokenize=False, add_generation_prompt=True) for r in batch
        ]
        inputs = tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False
        )
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answers = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        right += sum(a.strip() == r["messages"][1]["content"] for a, r in zip(answers, batch, strict=True))
    return right / len(rows)
