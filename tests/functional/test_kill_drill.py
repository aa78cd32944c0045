"""One machine: the addresses where its processes listen, and the state after the launcher alone is
killed during saves.

Ranks are forked from a server, so that a start takes a second. This command runs more kills:
`TITANLITE_KILLS=25 python -m pytest tests/functional/test_kill_drill.py`
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from titanlite.checkpoint.commit import check_folder, list_steps, step_folder

KILLS = int(os.environ.get("TITANLITE_KILLS", "2"))
RANKS = 2
ORPHANS_END_S = 10  # 0.2 on idle cores; the drill prints the longest
TWO_STARTS_EVERY = 5

pytestmark = pytest.mark.timeout(900 if KILLS <= 2 else 0)


@pytest.fixture
def start(server, config_file, tmp_path):
    """`start(name, *settings)` starts or continues the run of `tmp_path / "run"`."""

    def launch(name, *settings):
        folder = tmp_path / name
        folder.mkdir()
        launcher = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1"]
        training = ["-m", "titanlite.rank", "--config", str(config_file)]
        training += [f"--job.dump_folder={tmp_path / 'run'}", "--training.steps=100000", *settings]
        return server.launch(*launcher, *training, folder=folder, TMPDIR=str(tmp_path))

    return launch


def pids_of(run):
    """Return the processes of the launcher and its ranks."""
    return [run.pid("launcher"), *(run.pid(f"rank-{rank}") for rank in range(RANKS))]


def stop(run):
    run.process.terminate()
    assert run.end() == 0, run.out


def is_over(run):
    return run.process.poll() is not None


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.full), "async"])
def test_a_killed_launcher_takes_its_ranks_along_and_the_next_one_goes_on(start, tmp_path, mode):
    """If two launchers start at once, one of them continues the run, and the other is refused."""
    rng, checkpoints = random.Random(KILLS), tmp_path / "run/checkpoint"
    settings = [
        f"--checkpoint.async_mode={mode}",
        "--checkpoint.interval=1",
        "--checkpoint.keep_latest_k=3",
    ]
    runs, gone_s = [start("first", *settings)], []
    for kill in range(KILLS + 1):
        before = max(list_steps(checkpoints), default=0)
        while len(runs) > 1:
            while not any(map(is_over, runs)):
                time.sleep(0.02)
            runs.sort(key=is_over)
            refused = runs.pop()
            assert refused.end() == 2 and "another run writes into" in refused.out, refused.out
        (run,) = runs
        run.wait_for("steps", run.steps)
        assert run.steps()[0] == before + 1, (before, run.out)
        resumed = f"resuming from {step_folder(checkpoints, before)}" in run.out
        assert resumed == (before > 0)
        run.wait_for_step(run.steps()[-1] + rng.randint(1, 6))
        if kill == KILLS:
            break
        time.sleep(rng.random() * 0.2)
        gone_s.append(kill_launcher(run))
        if saved := list_steps(checkpoints):
            assert check_folder(step_folder(checkpoints, saved[-1]), checksums=True) == []
        assert len(list(checkpoints.iterdir())) <= 5
        left = [*tmp_path.glob("titanlite-*"), *tmp_path.glob("torchelastic_*")]
        assert len(left) == 1, "each start removes what the one before left"
        names = ["a", "b"] if kill % TWO_STARTS_EVERY == 0 else ["a"]
        runs = [start(f"{name}{kill}", *settings) for name in names]
    stop(run)
    assert not list(tmp_path.glob("titanlite-*"))
    steps = {f"step-{step}" for step in list_steps(checkpoints)}
    assert {path.name for path in checkpoints.iterdir()} == steps
    print(f"{mode}: {KILLS} kills, all ranks were gone after {max(gone_s)} s at most")


def kill_launcher(run):
    """Kill the launcher alone; return the seconds until its ranks have ended."""
    pids = pids_of(run)
    os.kill(pids[0], signal.SIGKILL)
    killed = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - killed < ORPHANS_END_S, "ranks are left"
        time.sleep(0.01)
    run.process.wait()
    return round(time.monotonic() - killed, 2)
