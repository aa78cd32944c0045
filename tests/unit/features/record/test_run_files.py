"""How many checkpoints will be there at once, and who hears of it. Their size is tests/functional/test_resume.py's."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch.distributed as dist

from titanlite.config import JobConfig
from titanlite.features.record import run_files
from titanlite.features.record.run_files import check_space, count_coming

Usage = namedtuple("Usage", "total used free")


def job_of(steps: int, interval: int, keep: int, every: int = 0) -> JobConfig:
    job = JobConfig()
    job.checkpoint.enable, job.training.steps = True, steps
    job.checkpoint.interval, job.checkpoint.keep_latest_k, job.checkpoint.keep_every_n_steps = interval, keep, every
    return job


@pytest.mark.parametrize(
    ("steps", "interval", "keep", "every", "present", "step", "coming"),
    [
        (100, 10, 3, 0, 0, 0, 4),  # the fourth is written before the first goes
        (100, 10, 3, 0, 3, 50, 1),
        (100, 10, 3, 0, 2, 50, 2),
        (100, 10, 0, 0, 0, 0, 10),  # all are kept
        (105, 10, 0, 0, 4, 47, 7),  # 50, 60, ..., 100 and the last
        (20, 10, 3, 0, 0, 0, 2),  # there are no more
        (100, 0, 3, 0, 0, 0, 1),  # the last alone
        (100, 10, 3, 50, 0, 0, 6),  # and those of steps 50 and 100
        (100, 10, 3, 0, 3, 100, 0),  # nothing is left to train
    ],
)
def test_checkpoints_to_come(steps, interval, keep, every, present, step, coming):
    assert count_coming(job_of(steps, interval, keep, every), present, step) == coming


@pytest.mark.parametrize(("free", "warned"), [(40e9, False), (39e9, True)])
def test_too_little_room_is_a_warning(monkeypatch, tmp_path: Path, free, warned):
    said: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            run_files.logger, level, lambda text, *values, level=level: said.append(f"{level} {text % values}")
        )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100e9, 0, free))
    monkeypatch.setattr(run_files, "count_bytes", lambda plan, job, muon: int(10e9))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    job, folder = job_of(100, 10, 3), tmp_path / "not/there/yet"
    check_space(job, None, (), folder, 0)  # type: ignore[arg-type]
    assert said[0] == f"info checkpoint: each takes 10.00 GB, {free / 1e9:.2f} GB are free in {folder}"
    assert len(said) == 1 + warned
    if warned:
        assert said[1].startswith("warning checkpoint: 4 more of 10.00 GB each will be kept at once, and 39.00 GB are")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    check_space(job, None, (), folder, 0)  # type: ignore[arg-type]
    job.checkpoint.enable = False
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    check_space(job, None, (), folder, 0)  # type: ignore[arg-type]
    assert len(said) == 1 + warned
