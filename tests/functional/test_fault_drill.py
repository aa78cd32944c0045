"""Fault drill: a run of 2 ranks has a fault every few steps, and ends with the weights of an
undisturbed run.

The test acts only as a scheduler would: after it asked the run to stop, and the run ended with 0,
it starts the same command again.
"""

import json
import os
import random
import re
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from files import read_lines
from safetensors.torch import load_file

from tests.functional.conftest import train_to_the_end, values_of
from titanlite.checkpoint.commit import check_folder, list_steps, step_folder
from titanlite.config.parallelism import Degrees

RANKS, SEED = 2, 6
SETTINGS = [
    "--lr_scheduler.min_lr_factor=1",  # the rate does not depend on the number of steps
    "--training.local_batch_size=4",  # one micro-batch
]
TIMEOUT_S = 5
FAULTY = [
    *SETTINGS,
    "--checkpoint.interval=2",
    "--parallelism.expert_parallel_degree=2",
    "--checkpoint.on_save_error=continue",
    f"--comm.timeout_seconds={TIMEOUT_S}",
    # A fault may come when a save begins.
    f"--checkpoint.timeout_seconds={TIMEOUT_S}",
]
ORPHANS_END_S = 10  # 0.2 on idle cores
# In bytes: more than the launcher's notes, which are in another folder, and less than any file of
# the run.
FILE_LIMIT = 4 << 10

# Output that the run itself must print for each kind of fault.
SAID = {
    "kill": r"titanlite: rank \d was ended by SIGKILL .*Starting all ranks again",
    "stop": r"titanlite: ranks? \d.* not moved for \d+ s since step \d+, \w+",
    "corrupt": r"step-\d+ is passed over: .*",
    "nan": r"the loss or gradient of step \d+ is not finite\. .*Computed again, the step is finite "
    r"on all ranks",
    "disk": r"cannot save to .*Training continues, and the next save tries again",
    "launcher": r"another run writes into",
    "term": r"stopped after step \d+ of \d+, saved",
}
POINTS_WAIT = "the unwritten points wait for the next one"


class Drill:
    """One run in `dump`, its output and its faults; `start` starts it."""

    def __init__(self, start, dump):
        self.start, self.dump, self.checkpoints = start, dump, dump / "checkpoint"
        self.said_before = ""  # by earlier launches, which ended in good order
        self.launched = start()

    def go_on(self):
        """Start again after an end in good order."""
        self.said_before = self.out
        self.launched = self.start()

    @property
    def out(self):
        return self.said_before + self.launched.output

    def step(self):
        """Return the step of the latest metrics point, which goes back when a run is resumed."""
        try:
            return json.loads((self.dump / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        except (OSError, ValueError, IndexError):
            return 0

    def wait_for(self, what, condition):
        self.launched.wait_for(what, condition)

    def train_on(self):
        """Wait until the run has trained a few steps further."""
        target = self.step() + 2
        self.wait_for(f"step {target}", lambda: self.step() >= target)

    def said(self, kind):
        return len(re.findall(SAID[kind], self.out))

    def starts(self):
        """Count how often ranks began to train."""
        return sum(events_of(self.dump, kind) for kind in ("start", "restart", "resume"))

    # --- faults

    def fault(self, kind, rng):
        """Cause the fault, and wait until the run has noticed it and trains again."""
        before, starts, rank = self.said(kind), self.starts(), rng.randrange(RANKS)
        if kind == "kill":
            os.kill(self.launched.pid(f"rank-{rank}"), signal.SIGKILL)
        elif kind == "stop":
            os.kill(self.launched.pid(f"rank-{rank}"), signal.SIGSTOP)
        elif kind == "corrupt":
            self.wait_for("two complete checkpoints", lambda: len(self.complete()) >= 2)
            # Otherwise a checkpoint newer than the damaged one could be complete before the kill.
            for each in range(RANKS):
                os.kill(self.launched.pid(f"rank-{each}"), signal.SIGSTOP)
            self.corrupt(rng)
            os.kill(self.launched.pid(f"rank-{rank}"), signal.SIGKILL)
        elif kind == "nan":
            (self.launched.folder / f"nan-{rank}").touch()
        elif kind == "disk":
            self.fill_disk()
        elif kind == "term":
            self.launched.process.terminate()  # the stub forwards it to the launcher
            assert self.launched.end() == 0, self.out[-6000:]
            self.go_on()
        elif kind == "launcher":
            self.kill_launcher()
        self.wait_for(f"message about {kind}", lambda: self.said(kind) > before)
        if kind != "disk":  # processes of the start before may be there until then
            self.wait_for("another start", lambda: self.starts() > starts)

    def kill_launcher(self):
        """Kill the launcher alone; its ranks end. Then start two at once: one of them continues the
        run, and the other one is refused.
        """
        pids = [self.launched.pid(name) for name in ("launcher", "rank-0", "rank-1")]
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + ORPHANS_END_S
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline, "ranks are left"
            time.sleep(0.01)
        self.launched.process.wait()
        self.go_on()
        runs = [self.launched, self.start()]
        while not any(run.process.poll() is not None for run in runs):
            time.sleep(0.02)
        runs.sort(key=lambda run: run.process.poll() is not None)
        self.launched, refused = runs
        assert refused.end() == 2, refused.output
        self.said_before += refused.output

    def corrupt(self, rng):
        """Flip one bit in the newest complete checkpoint."""
        folder = step_folder(self.checkpoints, self.complete()[-1])
        path = folder / rng.choice(["model.safetensors", "titanlite/optimizer.safetensors"])
        with path.open("r+b") as file:
            file.seek(rng.randrange(path.stat().st_size // 2, path.stat().st_size))
            at, byte = file.tell(), file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))

    def complete(self):
        return [
            s
            for s in list_steps(self.checkpoints)
            if not check_folder(step_folder(self.checkpoints, s))
        ]

    def fill_disk(self):
        """Let no file of rank 0, which writes almost all, grow until a save and metrics have
        failed.
        """
        before, waited = self.said("disk"), self.out.count(POINTS_WAIT)
        pid = self.launched.pid("rank-0")
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
        try:
            self.wait_for(
                "failed save",
                lambda: self.said("disk") > before and self.out.count(POINTS_WAIT) > waited,
            )
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.slow
def test_a_run_with_seven_faults_ends_with_the_weights_of_a_quiet_one(
    launch, run_warm, checked, tmp_path
):
    rng = random.Random(SEED)
    drill = Drill(lambda: launch("drill", *FAULTY, restarts=100), tmp_path / "drill")
    for kind in rng.sample(list(SAID), len(SAID)):
        drill.train_on()
        drill.fault(kind, rng)
    drill.train_on()
    drill.launched.process.terminate()
    assert drill.launched.end() == 0, drill.out[-6000:]

    steps = list_steps(drill.checkpoints)[-1]
    quiet = tmp_path / "quiet"
    ends = [f"--training.steps={steps}", "--checkpoint.interval=0", f"--job.dump_folder={quiet}"]
    run_warm(RANKS, train_to_the_end, checked(Degrees(dp_shard=RANKS, ep=2), *SETTINGS, *ends))

    assert all(drill.said(kind) for kind in SAID)
    assert drill.said("corrupt") == 1
    assert "Traceback" not in drill.out
    assert POINTS_WAIT in drill.out
    assert "File too large" in drill.out
    last, expected = (
        step_folder(folder, steps) for folder in (drill.checkpoints, quiet / "checkpoint")
    )
    names = sorted(str(path.relative_to(expected)) for path in expected.rglob("*.safetensors"))
    assert "model.safetensors" in names and "titanlite/expert_bias.safetensors" in names
    for name in names:
        one, other = load_file(expected / name), load_file(last / name)
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == [], name
    assert events_of(drill.dump, "save failed"), "also these come once there is space"
    losses = [values_of(dump, "loss/train") for dump in (quiet, drill.dump)]
    assert losses[0] == losses[1] and sorted(losses[0]) == list(range(1, steps + 1)), (
        "to the last bit, every step"
    )


def events_of(dump, kind):
    return [event["kind"] for event in read_lines(dump / "events.jsonl")].count(kind)
