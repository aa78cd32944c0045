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
SLOW_STEP, SLOW_RANK = 2, 2  # where the data are late


def disturb(trainer, degrees):
    """Make this rank's data late once. Row r of a batch ends 2 r tokens early, and in the first
    step 8 tokens more.
    """
    loader = trainer.parts.loader
    load = loader.micro_batches

    def micro_batches(step):
        if dist.get_rank() == SLOW_RANK and step + 1 == SLOW_STEP:
            time.sleep(SLEEP_S)
        batches = []
        for batch in load(step):
            documents, labels = batch.document_ids.clone(), batch.labels.clone()
            for row in range(len(labels)):
                end = labels.shape[1] - 2 * (row * degrees.dp + loader.dp_rank) - 8 * (step == 0)
                documents[row, end:], labels[row, end:] = -1, -100
            batches.append(Batch(batch.tokens, labels, batch.positions, documents))
        return batches

    loader.micro_batches = micro_batches  # type: ignore[method-assign]


def test_metrics_show_who_waits_for_data_and_leave_out_padding_once(
    run_ranks, checked, meshes, tmp_path
):
    options = ("--checkpoint.enable=false", "--training.steps=3", "--training.local_batch_size=4")
    job = checked(meshes["TP2xEP2"], *options)
    rows, length = job.job.training.global_batch_size, job.job.training.seq_len

    def rank_main():
        trainer = assemble(job)
        disturb(trainer, job.degrees)
        trainer.train()

    run_ranks(4, rank_main)
    folder = tmp_path / "run"
    points = {point["step"]: point for point in read_lines(folder / "metrics.jsonl")}
    assert points.keys() == {1, 2, 3}
    for step, point in points.items():
        phases = [
            point[f"time/{name}_s"]
            for name in ("data", "forward", "backward", "optimizer", "other")
        ]
        assert all(seconds >= 0 for seconds in phases) and point["time/other_s"] > 0
        # The phases leave out only a few lines of Python between steps.
        assert sum(phases) == pytest.approx(point["time/step_s"], abs=0.02, rel=0.02)
        norms = {
            name.removeprefix("grad_norm/"): value
            for name, value in point.items()
            if name.startswith("grad_norm/")
        }
        assert norms.keys() == {"embedding", "attention", "experts", "router", "norm", "head"}
        assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(
            point["grad_norm"], rel=1e-6
        )
        assert point["memory/host_peak_rss_gib"] == pytest.approx(
            max(point["ranks/memory_gib"]), abs=1e-4
        )
        assert 0 < point["memory/host_rss_gib"] <= point["memory/host_peak_rss_gib"]
        assert len(point["moe/load_entropy"]) == 2
        assert all(0 < value <= 1 for value in point["moe/load_entropy"])
        padding = (56 + 64 * (step == 1)) / (rows * length)
        assert point["data/padding"] == pytest.approx(padding, rel=1e-12)
        tokens = point["throughput/tokens_per_s"] * point["time/step_s"]
        assert tokens == pytest.approx(rows * length * (1 - padding), rel=1e-9)
    flops = [point["throughput/tflops_per_gpu"] * point["time/step_s"] for point in points.values()]
    assert flops == pytest.approx([flops[0]] * 3, rel=1e-9), "padding is computed, too"
    slow = points[SLOW_STEP]["ranks/data_s"]
    assert slow[SLOW_RANK] > SLEEP_S > 2 * slow[0]

    environment = read_json(folder / "environment.json")
    assert environment["world_size"] == 4 and environment["versions"]["torch"] == torch.__version__
    (machine,) = environment["machines"].values()
    assert machine["ranks"] == [0, 1, 2, 3] and sum(machine["devices"].values()) == 4
    assert [event["kind"] for event in read_lines(folder / "events.jsonl")] == ["start", "end"]
