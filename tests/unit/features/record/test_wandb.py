"""Weights & Biases, with a stand-in for the package that writes down how it is called."""

import json
import os
import sys
from unittest.mock import Mock, call

import pytest
import torch
from files import read_lines

from titanlite.config.schema import JobConfig
from titanlite.features.record import publish
from titanlite.features.record.publish import configure_wandb, finish_wandb, open_wandb
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.point import MoEState, StepPoint


@pytest.fixture
def job():
    job = JobConfig()
    job.metrics.enable_wandb = True
    job.metrics.enable_tensorboard = False
    return job


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)


@pytest.fixture
def wandb(monkeypatch):
    """The package, which is its one run, too."""
    standin = Mock(["Settings", "setup", "init", "define_metric", "log", "finish", "config"])
    standin.init.return_value = standin
    standin.Settings.side_effect = dict
    standin.url, standin.dir = "https://wandb.example/run", "/x/files"
    monkeypatch.setitem(sys.modules, "wandb", standin)
    yield standin
    publish._runs.clear()


def build(job, folder, **options):
    folder.mkdir(parents=True, exist_ok=True)
    options |= {"flops_per_token": 1000, "num_ranks": 1, "device": torch.device("cpu")}
    return MetricsLogger(job, folder, sink=open_wandb(job, folder), **options)


def log(metrics, step, loss=2.5, **options):
    metrics.log_step(
        StepPoint(step, loss, 0.91, 1e-3, tokens=8000, seconds=4.0, phases={}, **options)
    )


def test_points_have_the_names_and_steps_of_metrics_jsonl(job, tmp_path, wandb):
    folder = tmp_path / "runs" / "first"
    moe = MoEState(torch.tensor([[10, 10], [0, 20]]), torch.zeros(2, 2))
    with build(job, folder, moe_layers=[1, 3]) as metrics:
        log(metrics, 1, moe=moe)
        metrics.log_validation(1, 2.25, {})
        log(metrics, 2, loss=float("nan"))
    finish_wandb(3)
    points = [logged.args[0] for logged in wandb.log.mock_calls]
    lines = read_lines(folder / "metrics.jsonl")
    assert [point["step"] for point in points] == [line["step"] for line in lines] == [1, 1, 2]
    for point, line in zip(points, lines, strict=True):
        for name, value in line.items():
            if name in ("time", "moe/layers") or name.endswith("_step"):
                assert name not in point
            elif isinstance(value, list):
                assert value == [point[f"{name}/layer_01"], point[f"{name}/layer_03"]]
            else:
                assert point[name] == value or value is None
    assert points[1] == {"step": 1, "loss/validation": 2.25}
    wandb.define_metric.assert_called_once_with("*", step_metric="step")
    assert wandb.mock_calls[-1] == call.finish(exit_code=3)


def test_a_folder_is_a_run_with_its_name(job, tmp_path, wandb):
    job.job.description = "lr 1e-3 and/or 2e-3"
    for folder in ("first", "first", "second"):
        with build(job, tmp_path / "runs" / folder):
            pass
        finish_wandb(0)
    first, again, second = (begun.kwargs for begun in wandb.init.mock_calls)
    assert first == again and second["id"] != first["id"]
    assert first["id"] == (tmp_path / "runs/first/wandb_id").read_text().strip()
    assert (first["name"], first["notes"]) == ("first", "lr 1e-3 and/or 2e-3")
    settings = wandb.setup.call_args.args[0]
    assert (first["resume"], settings["x_disable_meta"], settings["disable_git"]) == (
        "allow",
        True,
        True,
    )


def test_the_configuration_is_whole_and_has_no_local_paths(job, tmp_path, wandb):
    job.job.dump_folder = str(tmp_path / "run")
    job.data.path = "/home/me/secret/chats.jsonl"
    job.model.hf_assets_path = (
        "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289"
    )
    with build(job, tmp_path / "run"):
        configure_wandb(
            {"command": "train --data.path=/home/me/secret/chats.jsonl", "world_size": 4}
        )
    finish_wandb(0)
    config, updated = wandb.init.call_args.kwargs["config"], wandb.config.update.call_args
    assert config["data"]["path"] == "chats.jsonl"
    assert config["model"]["hf_assets_path"] == "Qwen/Qwen3-0.6B@c1899de289"
    assert config["job"]["dump_folder"] == "run"
    assert config["training"]["steps"] == job.training.steps
    assert updated == call({"environment": {"world_size": 4}}, allow_val_change=True)
    assert "/home/me" not in json.dumps(config)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("init", SystemExit(1), "SystemExit: 1"),
        ("log", TimeoutError(), "TimeoutError"),
    ],
)
def test_the_first_error_is_one_warning_and_its_end(
    job, tmp_path, wandb, console, name, error, text
):
    getattr(wandb, name).side_effect = error
    with build(job, tmp_path / "run") as metrics:
        log(metrics, 1)
        log(metrics, 2)
    finish_wandb(3)
    assert console.getvalue().count(f"W&B: {text}. It gets no more points") == 1
    assert wandb.mock_calls[-1][0] == name
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
