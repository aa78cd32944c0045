"""The link `best` leads to a complete checkpoint, or it does not exist."""

import os

import pytest
from files import write_manifest

from titanlite.checkpoint.commit import point_best, read_best, remove_old, step_folder


@pytest.fixture
def run(tmp_path):
    """A folder with complete checkpoints of steps 1 to 5."""
    for step in range(1, 6):
        folder = step_folder(tmp_path, step)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * step)
        write_manifest(folder)
    return tmp_path


def leads_to(folder):
    assert (folder / "best").exists(), "the link must not dangle"
    return (folder / "best/model.safetensors").stat().st_size


def test_it_leads_to_the_step_and_moves(run):
    assert read_best(run) is None
    for step in (2, 4, 3):
        point_best(run, step)
        assert read_best(run) == step == leads_to(run)
        assert os.readlink(run / "best") == f"step-{step}", "relative: the folder may be moved"
    assert not (run / ".best.tmp").is_symlink()


def test_it_never_leads_to_what_is_not_complete(run):
    point_best(run, 2)
    (step_folder(run, 4) / "model.safetensors").unlink()
    point_best(run, 4)
    point_best(run, 17)
    assert read_best(run) == 2


def test_a_half_made_link_of_a_killed_process_is_no_obstacle(run):
    (run / ".best.tmp").symlink_to("step-1")
    point_best(run, 2)
    assert leads_to(run) == 2


def test_what_it_leads_to_is_not_removed(run):
    point_best(run, 2)
    remove_old(run, 1, 0, 5, read_best(run))
    assert sorted(p.name for p in run.iterdir()) == ["best", "step-2", "step-5"]
    point_best(run, 5)
    remove_old(run, 1, 0, 5, read_best(run))
    assert sorted(p.name for p in run.iterdir()) == ["best", "step-5"]


def test_what_a_user_calls_best_is_left_alone(run):
    (run / "best").mkdir()
    with pytest.raises(OSError):
        point_best(run, 3)
    assert read_best(run) is None and (run / "best").is_dir()
