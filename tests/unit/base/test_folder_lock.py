"""One run at a time writes into a folder."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from files import read_json, write_json

from titanlite.base.errors import ConfigError
from titanlite.base.files import FolderLock
from titanlite.config.schema import JobConfig
from titanlite.metrics.run_folder import hold_folders

HOLD = """
import sys, time
from pathlib import Path
from titanlite.base.files import FolderLock
lock = FolderLock.take(Path(sys.argv[1]))
print("holds", flush=True)
time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds `tmp_path`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def test_one_process_at_a_time_writes_into_a_folder(tmp_path, holder):
    with pytest.raises(ConfigError, match=f"process {holder.pid} on {os.uname().nodename}, since "):
        FolderLock.take(tmp_path, wait_s=0)
    with pytest.raises(ConfigError):  # one machine more or less makes no difference on this one
        FolderLock.take(tmp_path, rendezvous="node0:29400/run7", wait_s=0)
    job = JobConfig()
    job.comm.timeout_seconds = 1
    text = (
        rf"another run writes into .*: process {holder.pid} on .*, since 20\d\d-.* Remove "
        r".*/\.run\.lock if that"
    )
    with pytest.raises(ConfigError, match=text):
        hold_folders(job, tmp_path)
    holder.kill()
    lock = FolderLock.take(tmp_path)
    assert lock is not None and FolderLock.take(tmp_path / ".") is lock, (
        "the same process has it already"
    )
    del lock
    fd = os.open(tmp_path / ".run.lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has it
    os.close(fd)


def test_checkpoints_elsewhere_are_held_too(tmp_path, holder):
    job = JobConfig()
    job.comm.timeout_seconds, job.checkpoint.folder = 1, str(tmp_path)
    with pytest.raises(
        ConfigError, match=f"another run writes into {tmp_path}: process {holder.pid}"
    ):
        hold_folders(job, tmp_path / "run")
    job.checkpoint.enable = False
    assert hold_folders(job, tmp_path / "run") != []


def test_a_machine_that_is_gone_loses_its_folder_to_those_of_the_same_rendezvous(tmp_path, holder):
    """A file server keeps the lock of a machine without power."""
    path = tmp_path / ".run.lock"
    write_json(
        path, {"pid": 12, "host": "node1", "since": "noon", "rendezvous": "node0:29400/run7"}
    )
    with pytest.raises(ConfigError, match="process 12 on node1, since noon"):
        FolderLock.take(tmp_path, rendezvous="node0:29400/run8", wait_s=0)
    assert FolderLock.take(tmp_path, rendezvous="node0:29400/run7", wait_s=0) is not None
    assert read_json(path)["pid"] == os.getpid()


def test_a_lock_whose_file_was_removed_holds_nothing(tmp_path, holder):
    (tmp_path / ".run.lock").unlink()  # as the message says of a machine that is gone
    assert FolderLock.take(tmp_path, wait_s=0) is not None


def test_a_folder_of_which_nothing_was_used_is_removed_by_its_holder_alone(tmp_path, holder):
    unused, used = tmp_path / "unused", tmp_path / "used"
    for folder in (unused, used):
        folder.mkdir()
    locks = [FolderLock.take(folder) for folder in (unused, used)]
    (used / "config.toml").touch()
    FolderLock.remove_unused()
    assert all(locks) and not unused.exists()
    assert (used / ".run.lock").exists() and (tmp_path / ".run.lock").exists()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert hold_folders(JobConfig(), tmp_path) == [None]
    (said,) = caplog.messages
    assert "has no locks. Start no other run in" in said


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"cannot write to .*/file/run: .* Choose another folder\."
    ):
        hold_folders(JobConfig(), tmp_path / "file/run")
