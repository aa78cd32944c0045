"""The folder of a launcher and its ranks: nobody else's, gone when it is; and ranks that end with
their launcher.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from titanlite.base.errors import NOTICE_FOLDER
from titanlite.launch.protocol import forget_last_start, shared_folder

ROOT = Path(__file__).parents[3]
RANK = """
import os, time
from titanlite.launch.protocol import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(100)
"""
# A launcher with one rank.
LAUNCHER = f"""
import os, subprocess, sys
from titanlite.launch.protocol import shared_folder
with shared_folder() as folder:
    os.environ.update({NOTICE_FOLDER}=folder, TORCHELASTIC_RUN_ID="run")
    rank = subprocess.Popen([sys.executable, "-c", {RANK!r}])
    print(rank.pid, flush=True)
    rank.wait()
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def launcher():
    """`launcher()` -> a launcher whose rank tells its pid."""
    started = []

    def start():
        command = [sys.executable, "-c", LAUNCHER]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_launcher_takes_its_rank_along(launcher):
    process = launcher()
    pids = {int(process.stdout.readline()) for _ in range(2)}
    assert len(pids) == 1
    os.kill(process.pid, signal.SIGKILL)  # not waited for: it stays a zombie
    end, rank = time.monotonic() + 2, Path(f"/proc/{pids.pop()}")
    while rank.exists():
        assert time.monotonic() < end, f"{rank} is left"
        time.sleep(0.02)


def test_a_rank_of_a_launcher_that_has_removed_its_folder_ends_and_other_processes_go_on(tmp_path):
    script = (
        "from titanlite.launch.protocol import end_with_launcher; end_with_launcher(); print('goes "
        "on')"
    )
    for variables, expected in (
        (
            {NOTICE_FOLDER: str(tmp_path / "gone"), "TORCHELASTIC_RUN_ID": "run"},
            (128 + signal.SIGKILL, ""),
        ),
        ({"TORCHELASTIC_RUN_ID": "run"}, (0, "goes on\n")),  # torchrun's
    ):
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True
        )
        assert (done.returncode, done.stdout) == expected, variables


def test_the_folder_is_private_and_goes_with_those_of_killed_launchers(tmp_path, launcher):
    killed, living = launcher(), launcher()
    for process in (killed, living):
        process.stdout.readline()
    assert len(list(tmp_path.iterdir())) == 2
    killed.kill()
    killed.wait()
    (tmp_path / "titanlite-launch-empty").mkdir()  # no launcher has finished making it
    (tmp_path / "titanlite-other").mkdir()
    with shared_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        Path(folder, "beat-0").touch()
        Path(folder, "torchelastic").mkdir()
        forget_last_start(folder)
        assert {path.name for path in Path(folder).iterdir()} == {"launcher", "torchelastic"}
        assert len(list(tmp_path.iterdir())) == 4, (
            "of the living launcher, this one's, and two that are no leftovers"
        )
    assert {path.name for path in tmp_path.iterdir()} >= {
        "titanlite-launch-empty",
        "titanlite-other",
    }
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_of_another_user_stays(tmp_path, monkeypatch):
    with shared_folder() as folder:
        kept = shutil.copytree(folder, tmp_path / "titanlite-launch-other")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with shared_folder():
        assert kept.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with shared_folder():
        assert not kept.exists()
