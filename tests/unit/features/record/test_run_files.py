"""Whether the first checkpoint fits on the disk. Its size is tests/functional/test_resume.py's."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from titanlite.base.errors import CheckpointError
from titanlite.config import JobConfig
from titanlite.features.record import run_files
from titanlite.features.record.run_files import check_space

Usage = namedtuple("Usage", "total used free")
SIZE = 10_000_000_000


@pytest.fixture
def check(monkeypatch, tmp_path: Path):
    """`check(free, step, **settings of the checkpoint)` -> what was logged, by level."""

    def run(free: int, step: int = 0, **settings) -> list[str]:
        said: list[str] = []
        for level in ("info", "warning"):
            monkeypatch.setattr(
                run_files.logger, level, lambda text, *values, level=level: said.append(f"{level} {text % values}")
            )

        def disk_usage(path: Path) -> Usage:
            assert path == tmp_path, "the folder of the checkpoints is not there yet"
            return Usage(100 * SIZE, 0, free)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        monkeypatch.setattr(run_files, "count_bytes", lambda plan, job, muon: SIZE - 5)
        job = JobConfig()
        job.checkpoint.enable, job.training.steps = True, 100
        for name, value in settings.items():
            setattr(job.checkpoint, name, value)
        check_space(job, None, (), tmp_path / "not/there/yet", step, carried_bytes=5)  # type: ignore[arg-type]
        return said

    return run


@pytest.mark.parametrize(("free", "step"), [(SIZE, 0), (SIZE, 99), (10 * SIZE, 0)])
def test_one_checkpoint_is_enough(check, tmp_path, free, step):
    """However many are to be kept: a later one is a save that fails."""
    (said,) = check(free, step, keep_latest_k=0, interval=1)
    assert said.startswith("info checkpoint: each takes 10.00 GB, ") and said.endswith(
        f"are free in {tmp_path}/not/there/yet"
    )


@pytest.mark.parametrize("step", [0, 50, 99])
@pytest.mark.parametrize("free", [0, SIZE - 1])
def test_too_little_space_is_an_error(check, tmp_path, free, step):
    with pytest.raises(CheckpointError) as error:
        check(free, step)
    shown = "10.00 GB" if free else "0 B"
    sizes = f"takes 10.00 GB ({SIZE:,} bytes), and {shown} ({free:,} bytes) are free in {tmp_path}/not/there/yet."
    assert sizes in str(error.value)
    said = check(free, step, on_save_error="continue")
    assert len(said) == 2 and said[1] == f"warning {error.value}"


def test_nothing_is_checked_where_nothing_is_saved(check):
    assert check(0, enable=False) == check(0, step=100) == []
