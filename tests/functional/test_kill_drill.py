"""A drill to run by hand: the real launcher alone is killed, in the middle of saves, and the same command goes on.

`TITANLITE_KILLS=25 python -m pytest tests/functional/test_kill_drill.py`: so many kills for each way to save. In every
suite, `test_fault_drill.py` does it a few times, with ranks that start faster.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.checkpoint.commit import check_folder, list_steps, step_folder

KILLS = int(os.environ.get("TITANLITE_KILLS", "0"))
WAIT_S = 240  # for what takes 10 s on idle cores
ORPHANS_END_S = 2
TWO_STARTS_EVERY = 5

pytestmark = [
    pytest.mark.skipif(KILLS == 0, reason="by hand: TITANLITE_KILLS is not set"),
    pytest.mark.timeout(0),  # hours on busy cores
]


def wait_for(what: str, condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"no {what} within {timeout_s} s"
        time.sleep(0.02)


def processes_of(dump: Path) -> list[int]:
    """All that have the run's folder in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"--job.dump_folder={dump}".encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue  # gone since
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_launcher_that_is_killed_takes_its_ranks_along_and_the_next_one_goes_on(launch, tmp_path, mode):
    """Of two that start at once, one goes on and the other is refused."""
    rng, scratch, dump = random.Random(KILLS), tmp_path / "scratch", tmp_path / "a/run"
    scratch.mkdir()
    checkpoints = dump / "checkpoint"
    settings = [f"--checkpoint.async_mode={mode}", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=3"]

    def start(name: str):
        dump_folder = f"--job.dump_folder={dump}"
        return launch(name, dump_folder, *settings, "--comm.timeout_seconds=60", variables={"TMPDIR": str(scratch)})

    run, other, orphans_s, refused = start("a"), None, [], 0
    for kill in range(KILLS + 1):
        first = max(list_steps(checkpoints), default=0)
        if other is not None:
            both = [run, other]
            wait_for("end of one", lambda both=both: any(each.process.poll() is not None for each in both))
            run, loser = sorted(both, key=lambda each: each.process.poll() is not None)
            assert loser.process.poll() == 2 and "another run writes into" in "".join(loser.errors), loser.errors
            refused += 1
        run.wait_for(run.steps)
        assert run.steps()[0] == first + 1, (first, run.out)
        assert (f"resuming from {step_folder(checkpoints, first)}" in run.out) == (first > 0)
        target = run.steps()[-1] + rng.randint(1, 6)
        run.wait_for(lambda run=run, target=target: run.steps()[-1] >= target)
        if kill == KILLS:
            break
        time.sleep(rng.random() * 0.2)
        assert len(list(scratch.iterdir())) == 1, "what the one before left is gone"
        os.kill(run.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_for("end of the ranks", lambda: not processes_of(dump), ORPHANS_END_S)
        orphans_s.append(round(time.monotonic() - killed, 2))
        print(f"{mode}: kill {kill + 1} after step {run.steps()[-1]}, ranks gone after {orphans_s[-1]} s", flush=True)
        run.process.wait()
        if saved := list_steps(checkpoints):
            assert check_folder(step_folder(checkpoints, saved[-1]), checksums=True) == []
        assert not list(checkpoints.glob("*.damaged*")) and len(list(checkpoints.iterdir())) <= 5
        run, other = start(f"a{kill}"), start(f"b{kill}") if kill % TWO_STARTS_EVERY == 0 else None
    run.process.terminate()
    assert run.end(60) == 0 and list(scratch.iterdir()) == []
    assert {path.name for path in checkpoints.iterdir()} == {f"step-{step}" for step in list_steps(checkpoints)}
    print(f"{mode}: {KILLS} kills, {refused} second starts refused, seconds until all ranks were gone: {orphans_s}")
