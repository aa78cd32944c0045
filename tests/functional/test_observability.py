"""A run reports true figures: time, slow ranks, norms, memory, and further files next to the
metrics.
"""

import time

import pytest
import torch
import torch.distributed as dist
from files import read_json, read_lines

from titanlite.assemble import assemble
from titanlite.data.dataset import Batch

SLEEP_S = 0.8
DATA = 2  # the step of the disturbance
SLOW_DATA = 2  # the rank of the disturbance


def read(folder, name):
    return read_lines(folder / name)


def disturb(trainer):
    """Make this rank misbehave in the step above."""
    rank, load = dist.get_rank(), trainer.parts.loader.micro_batches

    def slow_micro_batches(step):
        if rank == SLOW_DATA and step + 1 == DATA:
            time.sleep(SLEEP_S)
        return load(step)

    trainer.parts.loader.micro_batches = slow_micro_batches  # type: ignore[method-assign]


def test_metrics_show_who_waits_for_data(run_ranks, checked, meshes, tmp_path):
    options = ("--checkpoint.enable=false", "--training.steps=4", "--training.local_batch_size=4")
    job = checked(meshes["TP2xEP2"], *options)

    def rank_main():
        trainer = assemble(job)
        disturb(trainer)
        trainer.train()

    run_ranks(4, rank_main)
    folder = tmp_path / "run"
    points = {point["step"]: point for point in read(folder, "metrics.jsonl")}

    for step, point in points.items():
        phases = [
            point[f"time/{name}_s"]
            for name in ("data", "forward", "backward", "optimizer", "other")
        ]
        assert all(seconds >= 0 for seconds in phases) and point["time/other_s"] > 0
        # The phases leave out only a few lines of Python between steps.
        assert sum(phases) == pytest.approx(point["time/step_s"], abs=0.02, rel=0.02)
        norms = [point[name] for name in point if name.startswith("grad_norm/")]
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(
            point["grad_norm"], rel=1e-6
        ), step
        assert {
            name.removeprefix("grad_norm/") for name in point if name.startswith("grad_norm/")
        } == {*("embedding", "attention", "experts", "router", "norm", "head")}
        assert point["memory/host_peak_rss_gib"] == pytest.approx(
            max(point["ranks/memory_gib"]), abs=1e-4
        )
        assert 0 < point["memory/host_rss_gib"] <= point["memory/host_peak_rss_gib"]
        assert all(0 < value <= 1 for value in point["moe/load_entropy"])

    slow = points[DATA]["ranks/data_s"]
    assert slow[SLOW_DATA] > SLEEP_S > 2 * slow[0]

    assert all(len(point["moe/load_entropy"]) == 2 for point in points.values())
    environment = read_json(folder / "environment.json")
    assert environment["world_size"] == 4 and environment["versions"]["torch"] == torch.__version__
    (machine,) = environment["machines"].values()
    assert machine["ranks"] == [0, 1, 2, 3] and sum(machine["devices"].values()) == 4
    assert [event["kind"] for event in read(folder, "events.jsonl")] == ["start", "end"]


def test_tokens_per_second_leave_out_the_padding_of_every_rank_once(
    run_ranks, checked, meshes, tmp_path
):
    options = ("--checkpoint.enable=false", "--training.steps=4", "--metrics.log_freq=2")
    job = checked(meshes["TP2xEP2"], *options)
    rows, length = job.job.training.global_batch_size, job.job.training.seq_len

    def rank_main():
        trainer = assemble(job)
        load = trainer.parts.loader.micro_batches

        def padded(step):
            """Make row r of a batch end 2 r tokens early, in the first step 8 more."""
            batches = []
            for number, batch in enumerate(load(step)):
                end = (
                    length
                    - 2 * (number * job.degrees.dp + trainer.parts.loader.dp_rank)
                    - 8 * (step == 0)
                )
                documents, labels = batch.document_ids.clone(), batch.labels.clone()
                documents[:, end:], labels[:, end:] = -1, -100
                batches.append(Batch(batch.tokens, labels, batch.positions, documents))
            return batches

        trainer.parts.loader.micro_batches = padded  # type: ignore[method-assign]
        trainer.train()

    run_ranks(4, rank_main)
    points = {point["step"]: point for point in read(tmp_path / "run", "metrics.jsonl")}
    assert set(points) == {1, 2, 4}
    shares = {
        1: (56 + 64) / (rows * length),
        2: 56 / (rows * length),
        4: 2 * 56 / (2 * rows * length),
    }
    for step, point in points.items():
        assert point["data/padding"] == pytest.approx(shares[step], rel=1e-12)
        tokens = point["throughput/tokens_per_s"] * point["time/step_s"]
        assert tokens == pytest.approx(rows * length * (1 - shares[step]), rel=1e-9)
    flops = [point["throughput/tflops_per_gpu"] * point["time/step_s"] for point in points.values()]
    assert flops == pytest.approx([flops[0]] * 3, rel=1e-9), "padding is computed, too"
