"""Weights & Biases, with a stand-in for the package that writes down how it is called."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from files import read_lines

from titanlite.config.schema import JobConfig
from titanlite.features.record import publish
from titanlite.features.record.publish import configure_wandb, finish_wandb, open_wandb
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.point import MoEState, StepPoint


class StandIn:
    """The package `wandb`, and its one run.

    Attributes:
        calls: (name, argument) of each call so far.
        errors: what to raise, by name of the call.
    """

    def __init__(self):
        self.calls = []
        self.errors = {}
        self.config = SimpleNamespace(
            update=lambda values, allow_val_change: self.note("config", values)
        )
        self.url, self.dir = "https://wandb.example/run", "/x/files"

    def note(self, name, *values):
        self.calls.append((name, *values))
        if name in self.errors:
            raise self.errors[name]

    def Settings(self, **settings):  # noqa: N802 - wandb's name
        return settings

    def setup(self, settings):
        self.applied = settings

    def init(self, config, **given):
        self.note("init", self.applied | given, config)
        return self

    def define_metric(self, name, step_metric):
        self.note("define_metric", name, step_metric)

    def log(self, point):
        self.note("log", point)

    def finish(self, exit_code):
        self.note("finish", exit_code)

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


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
    standin = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", standin)
    yield standin
    publish._opened.clear()


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
        metrics.log_validation(1, 2.25)
        log(metrics, 2, loss=float("nan"))
    finish_wandb(0)
    points = [point for (point,) in wandb.of("log")]
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
    assert wandb.of("define_metric") == [("*", "step")]
    assert wandb.calls[-1] == ("finish", 0)


def test_a_folder_is_a_run_with_its_name(job, tmp_path, wandb):
    job.job.description = "lr 1e-3 and/or 2e-3"
    for folder in ("first", "first", "second"):
        with build(job, tmp_path / "runs" / folder):
            pass
        finish_wandb(0)
    first, again, second = (settings for settings, _ in wandb.of("init"))
    assert first == again and second["id"] != first["id"]
    assert first["id"] == (tmp_path / "runs/first/wandb_id").read_text().strip()
    assert (first["name"], first["notes"]) == ("first", "lr 1e-3 and/or 2e-3")
    assert (first["resume"], first["x_disable_meta"], first["disable_git"]) == ("allow", True, True)


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
    config = wandb.of("init")[0][1]
    assert config["data"]["path"] == "chats.jsonl"
    assert config["model"]["hf_assets_path"] == "Qwen/Qwen3-0.6B@c1899de289"
    assert config["job"]["dump_folder"] == "run"
    assert config["training"]["steps"] == job.training.steps
    assert wandb.of("config") == [({"environment": {"world_size": 4}},)]
    assert "/home/me" not in json.dumps([config, wandb.of("config")])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ("init", SystemExit(1), "SystemExit: 1"),
        ("log", TimeoutError(), "TimeoutError"),
    ],
)
def test_the_first_error_is_one_warning_and_its_end(
    job, tmp_path, wandb, console, call, error, text
):
    wandb.errors[call] = error
    with build(job, tmp_path / "run") as metrics:
        log(metrics, 1)
        log(metrics, 2)
    finish_wandb(3)
    assert console.getvalue().count(f"W&B: {text}. It gets no more points") == 1
    assert wandb.calls[-1][0] == call
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
