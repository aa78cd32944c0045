"""Weights & Biases, with a stand-in for the package that writes down how it is called, and once with the package."""

import io
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from titanlite.base.log import logger
from titanlite.config.schema import JobConfig
from titanlite.metrics import MoEState, StepPoint, finish_wandb
from titanlite.metrics import wandb as wandb_module
from titanlite.metrics.logger import MetricsLogger

STANDIN = """
import json, os, time
def note(name, *values):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([name, *values]) + "\\n")
class Config:
    def update(self, values, allow_val_change=False):
        note("config", values, allow_val_change)
class Settings:
    mode = os.environ.get("WANDB_MODE", "online")
class Run:
    config, settings, url, dir = Config(), Settings(), "https://wandb.example/run", "/x/files"
    def define_metric(self, *args, **options):
        note("define_metric", args, options)
    def log(self, point):
        note("log", point)
    def finish(self, exit_code):
        note("finish", exit_code)
def init(config):
    note("init", {name: text for name, text in os.environ.items() if name.startswith("WANDB_")}, config)
    time.sleep(float(os.environ.get("INIT_S", "0")))
    if Settings.mode == "online" and "FAIL" in os.environ:
        raise RuntimeError("no such host.\\nretrying")
    return Run()
"""
OPTIONS = ("mode", "project", "name", "run_id", "api_key", "dir", "notes", "silent")


@pytest.fixture
def job() -> JobConfig:
    job = JobConfig()
    job.metrics.enable_wandb = True
    job.metrics.enable_tensorboard = False
    return job


@pytest.fixture
def calls(tmp_path: Path, monkeypatch) -> Iterator[Callable[[], list]]:
    """What was called in the stand-in so far."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(STANDIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in OPTIONS:
        monkeypatch.delenv(f"WANDB_{name.upper()}", raising=False)
    yield lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    for run in [*wandb_module._runs.values()]:
        run._process.kill()
        run._process.wait()
    wandb_module._runs.clear()


@pytest.fixture
def console() -> Iterator[io.StringIO]:
    """Collects the package's log lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def build(job: JobConfig, folder: Path, **options) -> MetricsLogger:
    return MetricsLogger(job, folder, flops_per_token=1000, num_ranks=1, device=torch.device("cpu"), **options)


def log(metrics: MetricsLogger, step: int, loss: float = 2.5, **options) -> None:
    metrics.log_step(StepPoint(step, loss, 0.91, 1e-3, tokens=8000, seconds=4.0, phases={}, **options))


def of(kind: str, calls: list) -> list:
    return [call[1:] for call in calls if call[0] == kind]


def test_points_have_the_names_and_steps_of_metrics_jsonl(job: JobConfig, tmp_path: Path, calls):
    folder = tmp_path / "runs" / "first"
    moe = MoEState(torch.tensor([[10, 10], [0, 20]]), torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64))
    with build(job, folder, moe_layers=[1, 3]) as metrics:
        log(metrics, 1, moe=moe)
        metrics.log_validation(1, 2.25)
        log(metrics, 2, loss=float("nan"))
    with build(job, folder, start_step=1) as metrics:  # steps done again
        log(metrics, 2)
    finish_wandb(0)
    points = [point for (point,) in of("log", calls())]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points] == [line["step"] for line in lines] == [1, 1, 2, 2]
    for point, line in zip(points, lines, strict=True):
        for name, value in line.items():
            if name in ("time", "moe/first_layer", "moe/layers") or name.endswith("_step"):
                assert name not in point
            elif isinstance(value, list):
                assert value == [point[f"{name}/layer_01"], point[f"{name}/layer_03"]]
            else:
                assert point[name] == value or value is None
    assert points[1] == {"step": 1, "loss/validation": 2.25}
    assert of("define_metric", calls()) == [[["*"], {"step_metric": "step"}]]
    assert len(of("init", calls())) == 1
    assert calls()[-1] == ["finish", 0]


def test_a_folder_is_a_run_with_its_name(job: JobConfig, tmp_path: Path, calls):
    job.job.description = "lr 1e-3 and/or 2e-3"
    for _ in range(2):
        with build(job, tmp_path / "runs" / "first") as metrics:
            log(metrics, 1)
        finish_wandb(0)
    first, second = (environment for environment, _ in of("init", calls()))
    assert first["WANDB_RUN_ID"] == second["WANDB_RUN_ID"] == (tmp_path / "runs/first/wandb_id").read_text().strip()
    assert first["WANDB_PROJECT"] == "titanlite"
    assert first["WANDB_NAME"] == "first"
    assert first["WANDB_RESUME"] == "allow"
    assert first["WANDB_DIR"] == str(tmp_path / "runs" / "first")
    assert first["WANDB_NOTES"] == "lr 1e-3 and/or 2e-3"
    with build(job, tmp_path / "runs" / "second"):
        pass
    finish_wandb(0)
    assert of("init", calls())[-1][0]["WANDB_RUN_ID"] != first["WANDB_RUN_ID"]


def test_variables_of_wandb_go_before(job: JobConfig, tmp_path: Path, calls, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_CONSOLE", "wrap")
    with build(job, tmp_path / "run"):
        pass
    finish_wandb(0)
    environment = of("init", calls())[0][0]
    assert environment["WANDB_PROJECT"] == "mine"
    assert environment["WANDB_CONSOLE"] == "wrap"


def test_the_configuration_is_whole_and_has_no_local_paths(job: JobConfig, tmp_path: Path, calls):
    job.job.dump_folder = str(tmp_path / "run")
    job.data.path = "/home/me/secret/chats.jsonl"
    job.model.hf_assets_path = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289"
    with build(job, tmp_path / "run") as metrics:
        metrics.log_environment({"command": "train --data.path=/home/me/secret/chats.jsonl", "world_size": 4})
    finish_wandb(0)
    config = of("init", calls())[0][1]
    assert config["data"]["path"] == "chats.jsonl"
    assert config["model"]["hf_assets_path"] == "Qwen/Qwen3-0.6B@c1899de289"
    assert config["job"]["dump_folder"] == "run"
    assert config["training"]["steps"] == job.training.steps
    assert of("config", calls()) == [[{"environment": {"world_size": 4}}, True]]
    assert "/home/me" not in json.dumps(calls()[:2])


def test_without_a_network_it_records_offline(job: JobConfig, tmp_path: Path, calls, monkeypatch, capfd):
    monkeypatch.setenv("FAIL", "1")
    with build(job, tmp_path / "run") as metrics:
        log(metrics, 1)
    run = wandb_module.open_wandb(job, tmp_path / "run")
    finish_wandb(3)
    assert run._process.wait(30) == 0
    assert calls()[-1] == ["finish", 3]
    online, offline = of("init", calls())
    assert offline == [online[0] | {"WANDB_MODE": "offline"}, online[1]]
    assert [call[0] for call in calls()] == ["init", "init", "define_metric", "log", "finish"]
    assert "titanlite: W&B: recording offline, because no such host." in capfd.readouterr().err


def test_training_does_not_wait_for_it(job: JobConfig, tmp_path: Path, calls, monkeypatch, console):
    monkeypatch.setenv("INIT_S", "600")
    monkeypatch.setattr(wandb_module, "_FINISH_S", 0.2)
    level = logger.level
    logger.setLevel(logging.INFO)
    begin = time.monotonic()
    with build(job, tmp_path / "run"):
        run = wandb_module.open_wandb(job, tmp_path / "run")
        for step in range(200):
            run.log(step, {f"name/{number}": 0.5 for number in range(1000)})  # 4 MB, a pipe has 64 KiB
        assert not run._failed
        finish_wandb(0)
    assert time.monotonic() - begin < 30
    logger.setLevel(level)
    assert "it takes longer to upload the last points" in console.getvalue()
    run._process.kill()
    run._process.wait()


def test_a_process_that_does_not_read_is_given_up_once(job: JobConfig, tmp_path: Path, calls, monkeypatch, console):
    monkeypatch.setattr(wandb_module, "_MOST_BYTES", 100_000)
    with build(job, tmp_path / "run"):
        run = wandb_module.open_wandb(job, tmp_path / "run")
        os.kill(run._process.pid, signal.SIGSTOP)
        for step in range(100):
            run.log(step, {f"name/{number}": 0.5 for number in range(500)})
        assert run._failed
    assert console.getvalue().count("does not read") == 1
    os.kill(run._process.pid, signal.SIGCONT)


def test_its_end_is_one_warning_and_no_error(job: JobConfig, tmp_path: Path, calls, console):
    with build(job, tmp_path / "run") as metrics:
        run = wandb_module.open_wandb(job, tmp_path / "run")
        run._process.kill()
        run._process.wait()
        log(metrics, 1)
        log(metrics, 2)
    finish_wandb(0)
    assert console.getvalue().count("W&B: its process has ended") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_rank_that_is_killed_has_failed_with_all_its_points(job: JobConfig, tmp_path: Path, calls):
    with build(job, tmp_path / "run") as metrics:
        log(metrics, 1)
        run = wandb_module._runs.pop(tmp_path / "run")
        os.close(run._pipe)  # what the kernel does
    assert run._process.wait(30) == 0
    assert [call[0] for call in calls()] == ["init", "define_metric", "log", "finish"]
    assert calls()[-1] == ["finish", 1]


def test_off_there_is_no_process(job: JobConfig, tmp_path: Path):
    job.metrics.enable_wandb = False
    with build(job, tmp_path) as metrics:
        log(metrics, 1)
    assert not wandb_module._runs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_with_the_package_offline(job: JobConfig, tmp_path: Path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in OPTIONS:
        monkeypatch.delenv(f"WANDB_{name.upper()}", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PYTHONPATH", str(Path(wandb.__file__).parents[1]))
    with build(job, tmp_path / "run") as metrics:
        log(metrics, 1, loss=2.625)
    finish_wandb(0)
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    data = file.read_bytes()  # records of protobuf messages, whose strings are as they are
    assert b"loss/train" in data and b"2.625" in data and b"global_batch_size" in data
    assert str(tmp_path).encode() not in data
