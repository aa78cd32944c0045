"""sft_arithmetic.toml runs on any machine: a short run learns, and plain transformers gives the
saved model the same score.
"""

import runpy
import sys
from pathlib import Path

import pytest
from files import read_lines

from titanlite.assemble import assemble
from titanlite.config import load_config
from titanlite.preflight import check

ROOT = Path(__file__).parents[2]
SAMPLES = 100


@pytest.mark.slow
@pytest.mark.full
def test_the_saved_model_scores_the_same_in_transformers(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [
        f"--evaluation.samples={SAMPLES}",
        "--training.steps=200",
        "--evaluation.freq=1000",
    ]
    # These settings give the same training on one rank.
    overrides += ["--training.local_batch_size=8", "--parallelism.expert_parallel_degree=1"]
    recipe = ROOT / "configs" / "recipes" / "sft_arithmetic.toml"
    make = str(ROOT / "scripts/arithmetic/make_arithmetic.py")
    monkeypatch.setattr(sys, "argv", [make])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(make, run_name="__main__")
    job = load_config(
        ["--config", str(recipe), f"--data.cache_folder={tmp_path / 'cache'}", *overrides]
    )
    checked = check(job, 1)
    run_ranks(1, lambda: assemble(checked).train())

    run = tmp_path / job.job.dump_folder
    lines = read_lines(run / "metrics.jsonl")
    scores = [line["eval/exact_match"] for line in lines if "eval/exact_match" in line]
    assert scores[0] == 0.0 and scores[-1] > 0.01

    folder = run / "checkpoint" / "step-200"
    rows = read_lines(run / "made" / "heldout.jsonl")
    # The evaluation used these rows.
    rows = [rows[i * len(rows) // SAMPLES] for i in range(SAMPLES)]
    score = runpy.run_path(str(ROOT / "scripts/arithmetic" / "score_arithmetic.py"))["score"]
    assert score(folder, rows) == pytest.approx(scores[-1], abs=1e-9)
