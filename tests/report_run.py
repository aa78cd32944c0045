"""The folder of a run for tests of the report, written by the same code that writes a real one."""

import json
from pathlib import Path

import torch

from titanlite.config.load import save_resolved
from titanlite.config.schema import JobConfig
from titanlite.metrics import open_events, record_event
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.point import Largest, MoEState, StepPoint

LAYERS, EXPERTS, RANKS = 3, 8, 4
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"'"


def write_run(folder: Path, steps: int = 60, *, every: int = 1, loss: float = 8.0) -> Path:
    """A run of `steps` steps with everything that a run can have, and hostile texts where a text can come from outside.

    Loss is `loss` / step; rank 2 is slow in its data.
    """
    job = JobConfig()
    job.model.flavor = "debug"
    job.training.steps = steps
    job.job.description = NASTY
    job.metrics.enable_tensorboard = False
    folder.mkdir(parents=True, exist_ok=True)
    save_resolved(job, folder / "config.toml")
    generator = torch.Generator().manual_seed(0)
    with MetricsLogger(job, folder, 1000, RANKS, torch.device("cpu"), moe_layers=range(1, LAYERS + 1)) as metrics:
        for step in range(every, steps + 1, every):
            counts = torch.randint(1, 100, (LAYERS, EXPERTS), generator=generator)
            counts[0, 3] = 0
            bias = torch.tensor([[-0.25] * LAYERS, [0.5] * LAYERS])
            phases = {"data": 0.1, "forward": 0.2, "backward": 0.4, "optimizer": 0.1, "communication": 0.2}
            metrics.log_step(
                StepPoint(
                    step,
                    loss=loss / step,
                    grad_norm=1.5,
                    lr=1e-3,
                    tokens=4096 * every,
                    num_padding=1024 * every,
                    seconds=float(every),
                    slowest_s=1.5,
                    largest={"loss/train_max": Largest(2 * loss / step, step), "grad_norm_max": Largest(1.5, step)},
                    phases={phase: seconds * every for phase, seconds in phases.items()},
                    ranks={
                        "busy_s": [0.6 * every, 0.6 * every, 0.9 * every, 0.6 * every],
                        "data_s": [0.1 * every, 0.1 * every, 0.4 * every, 0.1 * every],
                        "memory/host_peak_rss_gib": [1.0, 1.0, 1.5, 1.0],
                    },
                    group_norms={"experts": 1.2, "head": 0.9},
                    moe=MoEState(counts, bias, torch.zeros(2, LAYERS, dtype=torch.int64)),
                    extra={"loss/aux": 0.1 + 1 / step},
                )
            )
            if step % (20 * every) == 0:
                metrics.log_validation(step, 1.1 * loss / step, {"math": loss / step, "web": 1.2 * loss / step})
                example = {"prompt": NASTY, "prediction": "4", "reference": "four", "score": 0.5}
                metrics.log_evaluation(step, {"eval/exact_match": step / steps, "eval/ended": 1.0}, [example])
    open_events(folder)
    record_event("start", "4 ranks", 0)
    record_event("end", f"ended after step {steps} of {steps} {NASTY}", steps)
    (folder / "log.txt").write_text(f"2026-01-01 00:00:00 fine\n2026-01-01 00:00:01 WARNING data: {NASTY}\n")
    environment = {
        "commit": "abc",
        "world_size": RANKS,
        "parameters": 12_345_678,
        "versions": {"torch": "2.13", "x": None},
    }
    environment["machines"] = {"host": {"ranks": [0, 1, 2, 3], "devices": {"H100": 4}}}
    (folder / "environment.json").write_text(json.dumps(environment))
    shown = {"name": "model.w", "count": 2, "shape": [8, 4], "dtype": "torch.float32", "placement": "fsdp Shard(0)"}
    plan = {"rank": 0, "world_size": 4, "tensors": [{**shown, "source": NASTY, "local_bytes": 2**20}]}
    plan |= {"memory": {"weights": 2**20, "gradients": 2**20, "optimizer": 2**21}, "read_bytes": 0}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder
