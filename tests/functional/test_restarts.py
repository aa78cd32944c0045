"""The launcher's response to ranks that fail or hang: one message with the cause and the next
action.
"""

import signal
import time

import pytest
from files import read_lines

from titanlite.checkpoint.commit import list_steps

# Each script runs in every rank before the rank trains; `rank` is its number.
RAISE_ON_1 = """
from titanlite.train_step import TrainStep
original = TrainStep.train_step
def train_step(self, batches):
    if rank == 1 and self.step == 3:
        raise ValueError("a bug in the model")
    return original(self, batches)
TrainStep.train_step = train_step
"""
GATHER_FAILS_ON_1 = """
from torch.distributed.tensor import DTensor
from titanlite.features.transformers import checkpoint
from titanlite.launch.protocol import current_beat
checkpoint.parts_of = lambda tensor: ()  # so that tensors are gathered
original = DTensor.full_tensor
def full_tensor(self, **options):
    if rank == 1 and current_beat().step >= 4:
        raise ValueError("a bug in saving")
    return original(self, **options)
DTensor.full_tensor = full_tensor
"""
LONG_STEP = """
import time
from titanlite.train_step import TrainStep
original = TrainStep.train_step
def train_step(self, batches):
    if self.step == 3:
        print("long step", flush=True)
        time.sleep(20)
    return original(self, batches)
TrainStep.train_step = train_step
"""
NAN_ALWAYS = """
from titanlite.train_step import TrainStep
original = TrainStep.scaled_loss
def scaled_loss(self, *arguments):
    return original(self, *arguments) * (float("nan") if self.step == 3 or self.step == 4 else 1)
TrainStep.scaled_loss = scaled_loss
"""
SLOW_START = """
import time
from titanlite.trainer import Trainer
original = Trainer.train
def train(self):
    print("loaded", flush=True)
    time.sleep(60)
    original(self)
Trainer.train = train
"""


@pytest.fixture
def run(launch):
    """`run(misbehaviour, *overrides, restarts=, signal_after=)` -> (exit code, output, seconds
    after the signal).

    When the output contains the string `signal_after`, the launcher gets SIGTERM.
    """

    def start(misbehaviour, *overrides, restarts=0, signal_after=None):
        launched = launch(
            "run",
            "--training.steps=6",
            "--training.local_batch_size=4",
            "--checkpoint.interval=2",
            *overrides,
            restarts=restarts,
            misbehave=misbehaviour,
        )
        if signal_after is not None:
            launched.wait_for(signal_after, lambda: signal_after in launched.out)
            launched.process.terminate()
        asked = time.monotonic()
        return launched.end(), launched.output, time.monotonic() - asked

    return start


def said_by_launcher(out):
    return [
        line
        for line in out.splitlines()
        if line.startswith(("titanlite: ", "  The others", "  Stacks", "  All"))
    ]


def test_exception_on_one_rank_is_one_traceback_and_a_new_start_goes_on_from_the_checkpoint(
    run, tmp_path
):
    code, out, _ = run(RAISE_ON_1, restarts=1)
    assert code == 1
    assert out.count("Traceback") == 2, "one for each start"
    assert out.count("\nValueError: a bug in the model\n") == 2
    assert out.count("titanlite: rank 1 failed in step 4 (data):\nTraceback") == 2
    assert [line for line in said_by_launcher(out) if "failed in" not in line] == [
        "titanlite: rank 1 ended with exit code 1; all ranks were stopped. Starting all ranks "
        "again: restart 1 of 1.",
        "titanlite: rank 1 ended with exit code 1; all ranks were stopped. The same command "
        f"resumes from the newest checkpoint in {tmp_path / 'run'}, or begins anew without one.",
    ]
    assert "1 of 1, because rank 1 ended with exit code 1; training continues from step 2" in out
    events = read_lines(tmp_path / "run/events.jsonl")
    # Rank 0 may or may not have time to record that rank 1 ended.
    kinds = [(event["kind"], event["step"]) for event in events if event["kind"] != "error"]
    assert kinds == [("start", 0), ("save", 2), ("restart", 2)], "of a new start, one event"


def test_a_rank_that_misses_a_gather_while_saving_ends_the_run_with_its_error(run, tmp_path):
    transformers = ["--model.implementation=transformers", "--moe.expert_bias_update_rate=none"]
    code, out, _ = run(GATHER_FAILS_ON_1, "--comm.timeout_seconds=4", *transformers)
    assert code == 124 and list_steps(tmp_path / "run/checkpoint") == [2], out
    assert (
        "[rank 1] ERROR Traceback" in out
        and "ValueError: a bug in saving" in out
        and out.count("Traceback") == 1
    )


def test_an_error_that_would_come_again_is_not_restarted(run, tmp_path):
    code, out, _ = run(NAN_ALWAYS, "--metrics.log_freq=3", restarts=3)
    assert "the loss or gradient of step 4 is not finite" in out
    assert "those of step 3, saved in" in out
    assert list_steps(tmp_path / "run/checkpoint") == [2, 3]
    events = read_lines(tmp_path / "run/events.jsonl")
    kinds = [(event["kind"], event["step"]) for event in events]
    assert kinds == [("start", 0), ("save", 2), ("save", 3), ("error", 4)]
    assert code == 2 and out.count("titanlite: error: ") == 1
    assert "Starting all ranks again" not in out and "Traceback" not in out


def test_sigterm_while_loading_and_in_a_step_longer_than_the_grace(run, tmp_path):
    code, out, seconds = run(SLOW_START, restarts=3, signal_after="loaded")
    assert (
        code == 128 + signal.SIGTERM
        and seconds < 15
        and "stopped by SIGTERM, with all ranks." in out
    ), out
    assert not list_steps(tmp_path / "run/checkpoint") and "Starting all ranks again" not in out

    code, out, seconds = run(
        LONG_STEP, "--job.stop_grace_seconds=2", restarts=3, signal_after="long step"
    )
    assert code == 128 + signal.SIGTERM and 2 <= seconds < 15, (seconds, out)
    assert (
        "titanlite: job.stop_grace_seconds (2 s) are over and the ranks are still in step 4 (data)"
        in out
    )
    assert list_steps(tmp_path / "run/checkpoint") == [2] and "Starting all ranks again" not in out
