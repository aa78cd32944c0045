"""Runs are read as they were written: resumed, torn, broken, or not at all."""

import json
from pathlib import Path

import pytest
from report_run import write_run

from titanlite import metrics
from titanlite.base import log as logger
from titanlite.base.errors import TitanliteError
from titanlite.features.record import run_files
from titanlite.features.report import read
from titanlite.features.report.read import read_run
from titanlite.metrics import logger as metrics_logger


def write(folder: Path, *lines: dict | str) -> Path:
    folder.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(texts))
    return folder


def train(step: int, loss: float | None = 1.0, **values) -> dict:
    return {"step": step, "time": 1000.0 + step, "loss/train": loss, "grad_norm": 2.0, **values}


def points(run: read.Run, name: str) -> dict[int, float]:
    series = run.scalars[name]
    return dict(zip(series.steps, series.values, strict=True))


def test_file_names_are_those_that_a_run_writes():
    assert read.METRICS == "metrics.jsonl" and read.CONFIG == "config.toml" and read.PLAN == "plan.json"
    assert metrics_logger.EXPERT_LOAD_FILE == read.EXPERT_LOAD
    assert metrics.run_folder.EVENTS_FILE == read.EVENTS
    assert run_files.ENVIRONMENT_FILE == read.ENVIRONMENT
    assert logger.LOG_FILE == read.LOG


def test_a_whole_run(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", steps=40))
    assert run.problems == [] and run.name == "run"
    assert list(points(run, "loss/train").items())[:2] == [(1, 8.0), (2, 4.0)]
    assert list(points(run, "loss/validation")) == [20, 40]
    assert run.first_layer == 1 and len(run.lists["moe/load_entropy"].values[-1]) == 3
    assert len(run.loads) == 40 and len(run.loads[0][1]) == 3
    assert run.examples_step == 40 and run.examples[0]["reference"] == "four"
    assert [event["kind"] for event in run.events] == ["start", "end"]
    assert len(run.warnings) == 1 and run.plan["rank"] == 0
    assert run.config["training.steps"] == 40


def test_where_a_resumed_run_did_steps_again_the_later_lines_count(tmp_path: Path):
    held_out = [{"step": step, "time": 1.0, "loss/validation": value} for step, value in ((10, 0.1), (30, 0.3))]
    first = [train(10, 1.0), held_out[0], train(20, 2.0), train(30, 3.0), held_out[1]]
    run = read_run(write(tmp_path, *first, train(20, 2.5), train(25, 2.6)))
    assert points(run, "loss/train") == {10: 1.0, 20: 2.5, 25: 2.6}, "step 30 is of a past that was given up"
    assert points(run, "loss/validation") == {10: 0.1}


def test_a_validation_that_comes_again_drops_what_is_behind_it_but_not_its_own_step(tmp_path: Path):
    lines = [train(10, 1.0), {"step": 15, "loss/validation": 0.5}, train(20, 2.0)]
    run = read_run(write(tmp_path, *lines, {"step": 15, "loss/validation": 0.6}, train(20, 2.2)))
    assert points(run, "loss/train") == {10: 1.0, 20: 2.2}
    assert points(run, "loss/validation") == {15: 0.6}


def test_a_metric_all_of_whose_points_are_redone_is_gone(tmp_path: Path):
    run = read_run(write(tmp_path, train(10), {"step": 10, "loss/validation": 0.5}, train(20), train(5)))
    assert list(points(run, "loss/train")) == [5] and "loss/validation" not in run.scalars


def test_a_torn_last_line_is_left_out_in_silence_and_others_are_named(tmp_path: Path):
    run = read_run(write(tmp_path, train(1), '{"step": 2, "lo\n', "[1, 2]\n", train(3), '{"step": 4, "loss/tr'))
    assert list(points(run, "loss/train")) == [1, 3]
    assert run.problems == ["metrics.jsonl: 2 of 5 lines are broken and skipped (line 2, 3)."]


def test_values_that_are_not_finite_stay_as_gaps(tmp_path: Path):
    run = read_run(write(tmp_path, train(1), train(2, None), train(3)))
    assert [value == value for value in points(run, "loss/train").values()] == [True, False, True]


def test_broken_files_beside_the_metrics_are_named(tmp_path: Path):
    write(tmp_path, train(1))
    (tmp_path / "config.toml").write_text("[job\n")
    (tmp_path / "plan.json").write_text("{")
    run = read_run(tmp_path)
    assert [problem.split(" ")[0] for problem in run.problems] == ["config.toml", "plan.json"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            lambda folder: folder / "no",
            r".*/no is no run, there is no metrics\.jsonl in it\. Give the job\.dump_folder of a run",
        ),
        (lambda folder: folder, r"is no run, there is no metrics\.jsonl in it\. Give the job\.dump_folder"),
        (lambda folder: write(folder / "inner", train(1)).parent, r"It holds runs: inner\. Give one of them"),
        (
            lambda folder: write(folder) / "metrics.jsonl",
            r"is no run, there is no metrics\.jsonl in it\. Give the job\.dump_folder",
        ),
        (lambda folder: write(folder), r"has no logged step yet\. Wait for its first log step"),
        (lambda folder: write(folder, "{broken\n"), r"1 of 1 lines are broken and skipped \(line 1\)"),
    ],
)
def test_what_is_no_run_is_a_clear_error(tmp_path: Path, prepare, message: str):
    with pytest.raises(TitanliteError, match=f"^report: .*{message}"):
        read_run(prepare(tmp_path))
