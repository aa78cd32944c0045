import os

import numpy as np
import pytest
import torch
from files import read_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titanlite.config.schema import JobConfig
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
        metrics.log_validation(10, 2.25, {})
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
    largest = {"grad_norm_max": Largest(float("nan"), 17)}
    idle = moe(torch.zeros(1, 4))
    with build(job, tmp_path, moe_layers=[0]) as metrics:
        log(metrics, 20, float("nan"), extra={"x": float("-inf")}, moe=idle, largest=largest)
    (line,) = read_points(tmp_path)
    assert (line["grad_norm_max"], line["grad_norm_max_step"]) == (None, 17)
    assert (line["loss/train"], line["x"], line["moe/load_max_over_mean"]) == (None, None, [None])
    assert np.isnan(read_events(tmp_path / "tb").Scalars("loss/train")[0].value)


def test_each_line_is_on_disk_before_close(job, tmp_path):
    with build(job, tmp_path) as metrics:
        log(metrics, 1)
        assert len(read_points(tmp_path)) == 1
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


def test_mfu_of_a_known_gpu(job, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    metrics = MetricsLogger(job, tmp_path, 989 * 10**9, num_ranks=2, device=torch.device("cuda", 0))
    with metrics:
        ranks = {"data_s": [0.0, 0.0], "memory/max_reserved_gib": [3.0, 2.0]}
        metrics.log_step(StepPoint(1, 2.5, 0.9, 1e-3, tokens=1000, seconds=1.0, ranks=ranks))
    (line,) = read_points(tmp_path)
    assert line["throughput/mfu"] == pytest.approx(0.5)
    assert line["memory/max_reserved_gib"] == 3.0


def test_a_full_disk_is_one_warning_and_the_points_come_later(
    job, tmp_path, console, full_disk, capfd
):
    job.metrics.enable_tensorboard = False
    full_disk(0)
    with build(job, tmp_path, moe_layers=[0, 1]) as metrics:
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
