"""Whether the first checkpoint fits on the disk. Its size is tests/functional/test_resume.py's."""

import shutil
from collections import namedtuple

import pytest

from titanlite.config import JobConfig
from titanlite.features.record import run_files
from titanlite.features.record.run_files import check_space

Usage = namedtuple("Usage", "total used free")
SIZE = 10_000_000_000


@pytest.fixture
def check(monkeypatch, tmp_path, caplog):
    """`check(free, step, **settings of the checkpoint)` -> what was logged, by level."""

    def run(free, step=0, **settings):
        caplog.set_level("INFO", "titanlite")
        caplog.clear()

        def disk_usage(path):
            assert path == tmp_path, "the folder of the checkpoints is not there yet"
            return Usage(100 * SIZE, 0, free)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        monkeypatch.setattr(run_files, "count_bytes", lambda *_: SIZE - 5)
        job = JobConfig()
        job.checkpoint.enable, job.training.steps = True, 100
        for name, value in settings.items():
            setattr(job.checkpoint, name, value)
        found = check_space(job, None, None, tmp_path / "not/there/yet", step, carried_bytes=5)  # type: ignore[arg-type]
        said = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        return said + [f"problem {text}" for text in found]

    return run


def test_a_checkpoint_that_does_not_fit_is_an_error(check, tmp_path):
    """However many are to be kept, one is enough: a later one is a save that fails."""
    (said,) = check(SIZE, 99, keep_latest_k=0, interval=1)
    assert said.startswith("INFO checkpoint: each takes 10.00 GB, ")
    _, problem = check(SIZE - 1, 50)
    assert problem.startswith("problem ")
    assert f"({SIZE:,} bytes)" in problem and f"({SIZE - 1:,} bytes)" in problem
    assert str(tmp_path / "not/there/yet") in problem
    said = check(SIZE - 1, 50, on_save_error="continue")
    assert len(said) == 2 and said[1] == problem.replace("problem", "WARNING", 1)
    assert check(0, enable=False) == check(0, step=100) == []
