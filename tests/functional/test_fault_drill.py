"""Fault drill: a 4-rank run has a fault every few steps, and ends with the weights of an
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

import pytest
import torch
from files import read_lines
from safetensors.torch import load_file

from titanlite.checkpoint.commit import check_folder, list_steps, step_folder

RANKS, SEED = 4, 6
EVERY = 2  # steps of progress between two faults
ROUNDS = ["kill", "nan", "corrupt", "disk", "stop", "term"]
STEPS = EVERY * len(ROUNDS) + 6
TIMEOUT_S = 5
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
    "term": r"stopped after step \d+ of \d+, saved",
}
POINTS_WAIT = "the unwritten points wait for the next one"


class Drill:
    """One run on 4 ranks, its command, its output and its faults."""

    def __init__(self, server, config, dump):
        self.server, self.dump, self.checkpoints = server, dump, dump / "checkpoint"
        self.folder = dump.with_name(f"{dump.name}-pids")
        self.folder.mkdir()
        self.command = [
            *(
                "--standalone",
                f"--nproc-per-node={RANKS}",
                "--max-restarts=100",
                "-m",
                "titanlite.rank",
            ),
            *("--config", str(config), f"--job.dump_folder={dump}", f"--training.steps={STEPS}"),
            *("--parallelism.tensor_parallel_degree=2", "--parallelism.expert_parallel_degree=2"),
            *("--checkpoint.interval=2", "--checkpoint.on_save_error=continue"),
            "--training.local_batch_size=4",  # one micro-batch
            f"--comm.timeout_seconds={TIMEOUT_S}",
            # A fault may come when a save begins.
            f"--checkpoint.timeout_seconds={TIMEOUT_S}",
        ]
        self.said_before = ""  # by earlier launches, which ended in good order
        self.launched = server.launch(*self.command, folder=self.folder)

    def go_on(self):
        """Start again after an end in good order."""
        self.said_before = self.out
        self.launched = self.server.launch(*self.command, folder=self.folder)

    @property
    def out(self):
        return self.said_before + self.launched.out

    def step(self):
        """Return the step of the latest metrics point, which goes back when a run is resumed."""
        try:
            return json.loads((self.dump / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        except (OSError, ValueError, IndexError):
            return 0

    def wait_for(self, what, condition):
        self.launched.wait_for(what, condition)

    def said(self, kind):
        return len(re.findall(SAID[kind], self.out))

    # --- faults

    def fault(self, kind, rng):
        """Cause the fault, and wait until the run has noticed it."""
        before, rank = self.said(kind), rng.randrange(RANKS)
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
            (self.folder / f"nan-{rank}").touch()
        elif kind == "disk":
            self.fill_disk()
        elif kind == "term":
            self.launched.process.terminate()  # the stub forwards it to the launcher
            assert self.launched.end() == 0, self.out[-6000:]
            assert self.said(kind) == before + 1
            self.go_on()
            return
        self.wait_for(f"message about {kind}", lambda: self.said(kind) > before)

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
def test_a_run_with_six_faults_ends_with_the_weights_of_a_quiet_one(server, config_file, tmp_path):
    quiet = Drill(server, config_file, tmp_path / "quiet")
    assert quiet.launched.end() == 0, quiet.out[-6000:]

    rng = random.Random(SEED)
    rounds = rng.sample(ROUNDS, len(ROUNDS))
    drill = Drill(server, config_file, tmp_path / "drill")
    times = {}
    for number, kind in enumerate(rounds):
        target = EVERY * number + rng.randint(1, EVERY)
        drill.wait_for(f"step {target}", lambda target=target: drill.step() >= target)
        began = time.monotonic()
        drill.fault(kind, rng)
        times.setdefault(kind, []).append(round(time.monotonic() - began, 1))
    assert drill.launched.end() == 0, drill.out[-6000:]
    print(f"rounds: {rounds}\nseconds until noticed: {times}")

    assert set(rounds) == set(SAID)
    for kind in SAID:
        assert drill.said(kind) >= ROUNDS.count(kind) >= 1, kind
    assert drill.said("corrupt") == ROUNDS.count("corrupt")
    assert "Traceback" not in drill.out
    assert POINTS_WAIT in drill.out
    assert "File too large" in drill.out
    last, expected = (
        step_folder(folder, STEPS) for folder in (drill.checkpoints, quiet.checkpoints)
    )
    names = sorted(str(path.relative_to(expected)) for path in expected.rglob("*.safetensors"))
    assert "model.safetensors" in names and "titanlite/expert_bias.safetensors" in names
    for name in names:
        one, other = load_file(expected / name), load_file(last / name)
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == [], name
    assert events_of(drill.dump, "save failed") >= ROUNDS.count("disk"), (
        "also these come once there is space"
    )
    losses = [{p["step"]: p["loss/train"] for p in read_points(d.dump)} for d in (quiet, drill)]
    assert losses[0] == losses[1] and sorted(losses[0]) == list(range(1, STEPS + 1)), (
        "to the last bit, every step"
    )


def read_points(dump):
    return read_lines(dump / "metrics.jsonl")


def events_of(dump, kind):
    return [
        json.loads(line)["kind"] for line in (dump / "events.jsonl").read_text().splitlines()
    ].count(kind)
