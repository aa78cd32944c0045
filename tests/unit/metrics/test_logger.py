import io
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from files import read_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titanlite.base.log import logger
from titanlite.config.schema import JobConfig
from titanlite.metrics import logger as metrics_module
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.point import Largest, MoEState, StepPoint

CPU = torch.device("cpu")
RANKS = {
    "data_s": [0.0, 0.0, 0.75, 0.0],
    "memory/host_peak_rss_gib": [2.0, 2.5, 2.0, 2.0],
}
COUNTS = torch.tensor([[10, 10, 10, 10], [0, 0, 0, 40]])
IDLE = "moe: experts got no token, or less than 0.01 of an even share,"


@pytest.fixture
def job():
    job = JobConfig()
    job.training.steps = 300
    return job


@pytest.fixture
def console():
    """Collects the package's log lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield stream
    logger.setLevel(level)
    logger.removeHandler(handler)


def build(job, folder, **options):
    return MetricsLogger(job, folder, flops_per_token=1000, num_ranks=4, device=CPU, **options)


def moe(counts=COUNTS):
    layers = len(counts)
    return MoEState(counts, torch.tensor([[-0.5] * layers, [0.25] * layers]))


def log(metrics, step, loss=2.5, **options):
    phases = {"data": 0.5, "forward": 1.0, "backward": 1.5, "optimizer": 0.25}
    metrics.log_step(
        StepPoint(step, loss, 0.91, 1e-3, tokens=8000, seconds=4.0, phases=phases, **options)
    )


def read_points(folder):
    return read_lines(folder / "metrics.jsonl")


def read_events(folder):
    return EventAccumulator(str(folder)).Reload()


def test_values_reach_tensorboard_and_jsonl_under_the_same_names(job, tmp_path):
    with build(job, tmp_path, moe_layers=[3, 4]) as metrics:
        norms = {"experts": 0.5, "router": 0.76}
        log(metrics, 10, moe=moe(), group_norms=norms, extra={"loss/aux": 0.125})
        metrics.log_validation(10, 2.25)
        log(metrics, 20, moe=moe(), group_norms=norms, ranks=RANKS)
    expected = {
        "loss/train": 2.5,
        "grad_norm": 0.91,
        "lr": 1e-3,
        "throughput/tokens_per_s": 2000.0,
        "throughput/tflops_per_gpu": 2000 * 1000 / 4 / 1e12,
        "data/padding": 0.0,
        "time/step_s": 0.4,
        "time/data_s": 0.05,
        "time/forward_s": 0.1,
        "time/backward_s": 0.15,
        "time/optimizer_s": 0.025,
        "time/other_s": 0.0,
        "grad_norm/experts": 0.5,
        "grad_norm/router": 0.76,
    }
    layers = {
        "moe/load_max_over_mean": [1.0, 4.0],
        "moe/load_entropy": [1.0, 0.0],
        "moe/idle_experts": [0.0, 0.75],
        "moe/expert_bias_min": [-0.5, -0.5],
        "moe/expert_bias_max": [0.25, 0.25],
    }
    first, validation, second = read_points(tmp_path)
    assert {name: first[name] for name in expected} == pytest.approx(expected)
    assert first["loss/aux"] == 0.125
    assert {name: first[name] for name in layers} == layers and first["moe/layers"] == [3, 4]
    assert second["memory/host_peak_rss_gib"] == 2.5 and second["ranks/memory_gib"] == [
        2.0,
        2.5,
        2.0,
        2.0,
    ]
    assert second["ranks/data_s"] == [0.0, 0.0, 0.075, 0.0]
    assert {**validation, "time": 0} == {"step": 10, "time": 0, "loss/validation": 2.25}
    assert (first["step"], second["step"]) == (10, 20)
    assert "throughput/mfu" not in first  # a CPU has no known peak

    events = read_events(tmp_path / "tb")
    per_layer = {f"{name}/layer_{i:02d}" for name in layers for i in (3, 4)}
    written = {
        name
        for line in (first, second, validation)
        for name, value in line.items()
        if type(value) is float
    }
    assert set(events.Tags()["scalars"]) == (written | per_layer) - {"step", "time"}
    assert [point.value for point in events.Scalars("moe/load_max_over_mean/layer_04")] == [
        4.0,
        4.0,
    ]
    for name, value in expected.items():
        points = events.Scalars(name)
        assert [point.step for point in points] == [10, 20]
        assert points[0].value == pytest.approx(value, rel=1e-6)  # TensorBoard stores float32


def test_values_that_are_not_finite_stay_valid_json(job, tmp_path):
    with build(job, tmp_path) as metrics:
        log(metrics, 1, loss=float("nan"), extra={"x": float("-inf")}, moe=moe(torch.zeros(1, 4)))
    (line,) = read_points(tmp_path)
    assert (line["loss/train"], line["x"], line["moe/load_max_over_mean"]) == (None, None, [None])
    assert np.isnan(read_events(tmp_path / "tb").Scalars("loss/train")[0].value)


def test_largest_values_are_in_both_and_their_steps_in_the_lines(job, tmp_path):
    largest = {"loss/train_max": Largest(7.5, 13), "grad_norm_max": Largest(float("nan"), 17)}
    with build(job, tmp_path) as metrics:
        log(metrics, 20, largest=largest, slowest_s=1.25)
    (line,) = read_points(tmp_path)
    assert (line["loss/train_max"], line["loss/train_max_step"], line["time/step_max_s"]) == (
        7.5,
        13,
        1.25,
    )
    assert (line["grad_norm_max"], line["grad_norm_max_step"]) == (None, 17)
    events = read_events(tmp_path / "tb")
    assert [event.value for event in events.Scalars("loss/train_max")] == [7.5]
    assert np.isnan(events.Scalars("grad_norm_max")[0].value)
    assert not [name for name in events.Tags()["scalars"] if name.endswith("_step")]


def test_each_line_is_on_disk_before_close(job, tmp_path):
    metrics = build(job, tmp_path)
    log(metrics, 1)
    assert len(read_points(tmp_path)) == 1
    metrics.close()
    metrics.close()
    log(metrics, 2)
    assert len(read_points(tmp_path)) == 1


def test_a_resumed_run_appends_and_tensorboard_drops_the_steps_done_twice(job, tmp_path):
    with build(job, tmp_path) as metrics:
        for step in (10, 20, 30):
            log(metrics, step, loss=1.0)
    with build(job, tmp_path, start_step=10) as metrics:
        log(metrics, 20, loss=2.0)
    points = read_events(tmp_path / "tb").Scalars("loss/train")
    assert [(point.step, point.value) for point in points] == [(10, 1.0), (20, 2.0)]
    lines = read_points(tmp_path)
    assert [line["step"] for line in lines] == [10, 20, 30, 20]
    assert lines[-1]["time/step_s"] == pytest.approx(0.4)  # 10 steps since the resume, not 20


def test_console_line(job, tmp_path, console):
    with build(job, tmp_path) as metrics:
        log(metrics, 50, moe=moe())
        metrics.log_validation(50, 2.25)
    train, validation = console.getvalue().splitlines()
    assert train.startswith(
        "step    50/300  loss  2.5000  grad norm  0.91  lr 1.0e-03      2,000 tok/s  0.5 MFLOP/s"
    )
    assert "expert load max/mean 4.00  left 0:0" in train
    assert validation == "step    50/300  validation loss  2.2500"


def test_idle_experts_are_warned_of_when_they_become_more(job, tmp_path, console):
    """Over a whole interval, not in a step of it, by layer and once; the point of step 1 is part of
    the first one.
    """
    job.metrics.log_freq = 10
    busy = torch.tensor([[9000, 300, 5000, 5700], [4000, 8000, 4000, 4000]])
    lazy = torch.tensor([[9000, 0, 5000, 6000], [0, 9999, 9999, 2]])
    points = {1: busy, 10: lazy, 20: lazy, 30: lazy, 40: busy, 50: busy, 60: lazy, 66: lazy}

    def state(step):
        return MoEState(lazy, None, points[step], top_k=2)

    with build(job, tmp_path, moe_layers=[3, 7], if_idle="Set this.") as metrics:
        for step in points:
            log(metrics, step, moe=state(step))
    lines = console.getvalue().splitlines()
    said = [line for line in lines if line.startswith("moe: ")]
    assert said == [
        f"{IDLE} in steps 11 to 20: 1 of 4 in layer 3, 2 of 4 in layer 7. Set this.",
        f"{IDLE} in steps 51 to 60: 1 of 4 in layer 3, 2 of 4 in layer 7. Set this.",
    ]
    assert all(
        "expert load max/mean 2.00 of at most 2.00" in line
        for line in lines
        if line.startswith("step")
    )


def test_mfu_of_a_known_gpu(job, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    metrics = MetricsLogger(job, tmp_path, 989 * 10**9, num_ranks=2, device=torch.device("cuda", 0))
    with metrics:
        ranks = {"data_s": [0.0, 0.0], "memory/max_reserved_gib": [3.0, 2.0]}
        metrics.log_step(StepPoint(1, 2.5, 0.9, 1e-3, tokens=1000, seconds=1.0, ranks=ranks))
    (line,) = read_points(tmp_path)
    assert line["throughput/mfu"] == pytest.approx(0.5)
    assert line["memory/max_reserved_gib"] == 3.0


def test_other_ranks_write_nothing(job, tmp_path, monkeypatch, console):
    monkeypatch.setenv("RANK", "1")
    with build(job, tmp_path / "run") as metrics:
        log(metrics, 1, moe=moe())
        metrics.log_validation(1, 2.0)
    assert not (tmp_path / "run").exists()
    assert console.getvalue() == ""


def test_tensorboard_can_be_off_and_is_imported_only_when_on(tmp_path):
    script = (
        "import sys, torch\nfrom titanlite.config.schema import JobConfig\nfrom "
        "titanlite.metrics.logger import MetricsLogger\njob = JobConfig(); "
        "job.metrics.enable_tensorboard = False\nMetricsLogger(job, sys.argv[1], 1, 1, "
        "torch.device('cpu')).close()\nprint('tensorboard' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_one_warning_and_the_points_come_later(
    job, tmp_path, console, full_disk, capfd
):
    job.metrics.enable_tensorboard = False
    full_disk(0)
    with build(job, tmp_path) as metrics:
        log(metrics, 5, moe=moe())
        full_disk(None)
        log(metrics, 10, moe=moe())
        assert [point["step"] for point in read_points(tmp_path)] == [5, 10]
        full_disk(os.path.getsize(tmp_path / "metrics.jsonl") + 10)  # room for a torn line
        for step in (15, 20, 25):
            log(metrics, step, moe=moe())
        assert [point["step"] for point in read_points(tmp_path)] == [5, 10], "no half line"
        full_disk(None)
        log(metrics, 30, moe=moe())
    steps = [5, 10, 15, 20, 25, 30]
    assert [point["step"] for point in read_points(tmp_path)] == steps
    out = console.getvalue()
    assert out.count("metrics: cannot write") == 1
    assert "metrics.jsonl: File too large. Training continues" in out
    assert "Traceback" not in capfd.readouterr().err


def test_a_broken_progress_bar_falls_back_to_plain_lines(job, tmp_path, monkeypatch, console):
    class BrokenBar:
        def __init__(self, *_): ...

        def __enter__(self):
            return self

        def __exit__(self, *_):
            raise OSError("terminal gone")

        def show(self, step, values):
            raise ValueError("terminal gone")

    monkeypatch.setattr(metrics_module, "ProgressBar", BrokenBar)
    monkeypatch.setattr(metrics_module, "can_show_bar", lambda: True)
    with build(job, tmp_path) as metrics:
        log(metrics, 1)
        log(metrics, 2)
    out = console.getvalue()
    assert out.count("the progress bar failed (ValueError('terminal gone'))") == 1
    assert "step     1/300" in out
    assert "step     2/300" in out
    assert len(read_points(tmp_path)) == 2
