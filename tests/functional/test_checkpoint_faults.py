"""Checkpoints under faults: killed ranks, full disks, damaged files. A complete checkpoint stays,
and loads.
"""

import errno
import math
import os
import random
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import Forked
from files import folder_digests, read_json
from safetensors.torch import load_file

import titanlite.rank
from tests.functional.conftest import weekly
from titanlite.assemble import assemble
from titanlite.base.errors import CheckpointError
from titanlite.checkpoint import commit, train_state
from titanlite.checkpoint.commit import check_folder, list_steps, step_folder
from titanlite.config.parallelism import Degrees
from titanlite.materialize.layout import local_of
from titanlite.train_step import TrainStep

FSDP2 = Degrees(dp_shard=2)
# The model has one layer, and the batch can be divided among 2, 3 and 4 ranks.
SMALL = [
    "--model.overrides.num_layers=1",
    "--training.steps=100000",
    "--training.global_batch_size=12",
    "--training.local_batch_size=1",
    "--checkpoint.interval=1",
]
HITS = 6  # kills per mode in the middle of a save; KILL_POINTS has each kind of moment
SECONDS = 20  # limit for an error to be on all ranks; 1 on idle cores
MODEL, OPTIMIZER = "model.safetensors", "titanlite/optimizer.safetensors"


def build_trainer(job):
    """Build a trainer whose optimizer has states."""
    trainer = assemble(job)
    if trainer.parts.run.start is None:
        for param in trainer.model.parameters():
            param.grad = torch.zeros_like(param)
        trainer.parts.stepper.optimizer.step()
        trainer.parts.stepper.optimizer.zero_grad()
    return trainer


def tensors_of(trainer):
    """Return this rank's part of all tensors that a checkpoint has."""
    found = [
        local_of(entry.tensor) for entry in trainer.parts.plan.entries if entry.info.persistent
    ]
    return found + [
        local_of(value)
        for state in trainer.parts.stepper.optimizer.state.values()
        for value in state.values()
    ]


@torch.no_grad()
def save_step(trainer, step):
    """Save `step` with every number set to `step`, so that a mixture of two steps shows."""
    for tensor in tensors_of(trainer):
        tensor.fill_(step)
    trainer.parts.stepper.step = step
    trainer.save()


def wrong_values(trainer, step):
    """Count the numbers on this rank that differ from `step`."""
    return sum(int((tensor != step).sum()) for tensor in tensors_of(trainer))


def assert_holds(folder, step):
    """Check that the checkpoint in `folder` is complete, its checksums match, and all its values
    were saved at `step`.
    """
    assert check_folder(folder, checksums=True) == []
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    listed = read_json(folder / commit.MANIFEST_FILE)["files"].keys()
    assert names == listed | {commit.MANIFEST_FILE} and {MODEL, OPTIMIZER, "config.json"} <= names
    assert read_json(folder / train_state.STATE_FILE)["step"] == step
    for name in sorted(names):
        if not name.endswith(".safetensors"):
            continue
        for key, tensor in load_file(folder / name).items():
            assert torch.equal(tensor, torch.full_like(tensor, step)), (
                f"{folder.name}/{name}: {key}"
            )


def hidden(folder):
    """Return the temporary names in `folder`."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("step-"))


# --- killed ranks


def rest_of(ranks):
    """Return the remaining messages of rank 0, which has ended."""
    messages = []
    with suppress(EOFError):
        while ranks.pipes[0].poll():
            messages.append(ranks.pipes[0].recv())
    return messages


def slow_down(monkeypatch):
    """Slow down every part of a save, above all the moments around a rename, so that kills hit
    them.
    """

    def slow(function, before_s, after_s):
        def slowed(*args, **kwargs):
            time.sleep(before_s)
            result = function(*args, **kwargs)
            time.sleep(after_s)
            return result

        return slowed

    monkeypatch.setattr(os, "pwritev", slow(os.pwritev, 0.001, 0.001))
    monkeypatch.setattr(os, "fsync", slow(os.fsync, 0.002, 0.002))
    monkeypatch.setattr(os, "unlink", slow(os.unlink, 0.001, 0.001))
    monkeypatch.setattr(Path, "rename", slow(Path.rename, 0.06, 0.02))


def save_forever(job, pipe):
    """Resume and send the state that was found; then save step after step, and send each saved
    step.
    """
    trainer = build_trainer(job)
    start = trainer.step
    pipe.send(
        (
            start,
            wrong_values(trainer, start) if start else 0,
            hidden(trainer.parts.checkpointer.folder) if start else [],
        )
    )
    dist.barrier()
    for step in range(start + 1, 1_000):
        save_step(trainer, step)
        trainer.parts.checkpointer.agree(False)
        pipe.send(step)


def is_late(path):
    """Return True for a hidden folder of a save that is about to be renamed, or of a checkpoint
    that is being removed.
    """
    return not path.name.endswith("tmp") or (path / commit.MANIFEST_FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [weekly("disabled"), "async"])
def test_random_kills_leave_complete_checkpoints(checked, tmp_path, monkeypatch, mode):
    """Kill one of 2 to 4 ranks, or all of them, while they do nothing but save; check the folder
    and start again, until enough kills were inside a save.
    """
    keep, rng = 2, random.Random(mode)
    folder = tmp_path / "run/checkpoint"
    overrides = [*SMALL, f"--checkpoint.async_mode={mode}", f"--checkpoint.keep_latest_k={keep}"]
    overrides.append("--checkpoint.verify_checksums=true")
    jobs = {size: checked(Degrees(dp_shard=size), *overrides) for size in (2, 3, 4)}
    slow_down(monkeypatch)
    newest = before = kills = hits = 0
    while hits < HITS:
        kills += 1
        assert kills <= 4 * HITS, f"{hits} kills inside a save"
        world_size = rng.choice((2, 2, 3, 4))
        ranks = Forked(world_size, partial(save_forever, jobs[world_size]))
        try:
            assert ranks.receive() == [(newest, 0, [])] * world_size, (
                "what was resumed, and what the start left there"
            )
            if not newest:
                wait_until(lambda: list_steps(folder), 60)  # for the first one
            time.sleep(rng.uniform(0, 0.5))
            if rng.random() < 0.5:  # a late moment, however slow the machine is
                wait_until(lambda: any(is_late(folder / name) for name in hidden(folder)), 5)
            for process in ranks.processes if rng.random() < 0.2 else [rng.choice(ranks.processes)]:
                process.kill()
            time.sleep(rng.choice((0, 0.1)))  # the others find out, until the launcher ends them
        finally:
            ranks.end()
        reported = [message for message in rest_of(ranks) if isinstance(message, int)]
        # `save` has returned for these steps. They are on the disk; with 'async' the last one may
        # still be in progress, and the step before it is on the disk.
        promised = max(reported, default=newest) - (mode == "async" and bool(reported))
        steps = list_steps(folder)
        for step in steps:  # all are complete, also the older ones
            assert_holds(step_folder(folder, step), step)
        assert steps and steps[-1] >= max(promised, newest)
        newest = steps[-1]
        assert steps == list(range(steps[0], newest + 1)), "no gap"
        assert min(keep, newest) <= len(steps) <= max(keep, before) + 1, (
            "none lost; the kill may precede a removal"
        )
        before = len(steps)
        hits += bool(hidden(folder))


def wait_until(condition, seconds):
    """Wait until `condition()` is true, for at most `seconds`."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


@dataclass(frozen=True)
class Point:
    """Kill rank 0 before or after its nth call of `name`; a resume then finds the step `newest`."""

    name: str
    call: int
    after: bool
    newest: int
    replace: bool = False

    def __str__(self):
        where = "after" if self.after else "before"
        return f"{where}-{self.name}-{self.call}-of-{'replacement' if self.replace else 'save'}"


KILL_POINTS = [
    Point("rename", 1, False, newest=2),  # step-3 is complete, but hidden
    Point("rename", 1, True, newest=3),  # step-3 has appeared
    Point("rename", 2, False, newest=3),  # before step-1 is hidden
    Point("rename", 2, True, newest=3),  # step-1 is hidden
    Point("unlink", 1, True, newest=3),  # step-1 is partly removed
    # The old step-2 is hidden, and the new one has not appeared yet.
    Point("rename", 1, True, newest=2, replace=True),
    Point("rename", 2, True, newest=2, replace=True),  # the new one has
    Point("unlink", 3, True, newest=2, replace=True),  # the old one is partly removed
]


@pytest.mark.parametrize("point", KILL_POINTS, ids=str)
def test_a_kill_around_each_rename_leaves_a_checkpoint_to_resume(
    checked, saved, monkeypatch, point
):
    folder = saved("run")
    job = checked(
        FSDP2, *SMALL, "--checkpoint.keep_latest_k=2", "--checkpoint.verify_checksums=true"
    )

    def killed(pipe):
        trainer = build_trainer(job)
        pipe.send(trainer.step)
        dist.barrier()
        owner = Path if point.name == "rename" else os
        if dist.get_rank() == 0:
            _kill_at(owner, point)
        if point.replace:
            trainer.parts.checkpointer._saved_step = -1
        save_step(trainer, 2 if point.replace else 3)

    ranks = Forked(2, killed)
    try:
        assert ranks.receive() == [2, 2]
        ranks.processes[0].join(SECONDS)
        assert ranks.processes[0].exitcode == -signal.SIGKILL, "rank 0 never came there"
    finally:
        ranks.end()
    assert hidden(folder) or (point.after, point.call) in [(True, 1), (False, 2)], (
        "the kill was in the middle"
    )

    def resumed(pipe):
        trainer = build_trainer(job)
        pipe.send((trainer.step, wrong_values(trainer, trainer.step), hidden(folder)))
        save_step(trainer, trainer.step + 1)
        trainer.parts.checkpointer.wait()
        pipe.send("saved")

    ranks = Forked(2, resumed)
    try:
        assert ranks.receive() == [(point.newest, 0, [])] * 2
        assert ranks.receive() == ["saved"] * 2
    finally:
        ranks.end()
    assert list_steps(folder) == [point.newest, point.newest + 1] and hidden(folder) == []
    for step in list_steps(folder):
        assert_holds(step_folder(folder, step), step)


def _kill_at(owner, point):
    """Let this process end itself at `point`."""
    original, calls = getattr(owner, point.name), []

    def deadly(*args, **kwargs):
        calls.append(args)
        if len(calls) == point.call and not point.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if len(calls) == point.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, point.name, deadly)


# --- failed saves


@pytest.fixture(scope="module")
def template(run_ranks, configure, tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2."""
    dump = tmp_path_factory.mktemp("template")
    job = configure(FSDP2, f"--job.dump_folder={dump}", *SMALL)

    def rank_main():
        trainer = build_trainer(job)
        save_step(trainer, 1)
        save_step(trainer, 2)

    run_ranks(2, rank_main)
    assert list_steps(dump / "checkpoint") == [1, 2]
    return dump / "checkpoint"


@pytest.fixture
def saved(template, tmp_path):
    """`saved(dump)` -> the folder `tmp_path / dump / checkpoint` with the checkpoints of steps 1
    and 2.
    """
    return lambda dump: Path(shutil.copytree(template, tmp_path / dump / "checkpoint"))


@contextmanager
def broken(rank, owner, name, number, first_call=1):
    """On `rank`, make `owner.name` raise `OSError(number)` in its calls from `first_call` on."""
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) >= first_call:
            raise OSError(number, os.strerror(number))
        return original(*args, **kwargs)

    if dist.get_rank() == rank:
        setattr(owner, name, failing)
    yield
    setattr(owner, name, original)


# The fault, words of the error, and the rank where it happens.
FAILING_SAVES = {
    "disk full while rank 1 writes": (
        partial(broken, 1, os, "pwritev", errno.ENOSPC, 3),
        "No space left on device",
        1,
    ),
    "disk full at the manifest": (
        partial(broken, 0, Path, "write_text", errno.ENOSPC),
        "No space left on device",
        0,
    ),
    "read-only on rank 1": (
        partial(broken, 1, os, "open", errno.EROFS),
        "Read-only file system",
        1,
    ),
    "disk does not flush on rank 1": (
        partial(broken, 1, os, "fsync", errno.EIO),
        "Input/output error",
        1,
    ),
    "cannot rename": (partial(broken, 0, Path, "rename", errno.EACCES), "Permission denied", 0),
}


def failing_save(trainer, step, how):
    """Save `step`; with 'async', reach its error by the method `how`. Return (type of the error,
    its text).
    """
    try:
        save_step(trainer, step)
        if how == "agree":
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                trainer.parts.checkpointer.agree(False)
                time.sleep(0.01)
        elif how == "save":
            save_step(trainer, step + 1)
        elif how == "wait":
            trainer.parts.checkpointer.wait()
    except (CheckpointError, OSError) as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_failed_save_is_one_error_on_all_ranks(run_ranks, checked, saved, mode):
    """The same ranks have each fault in turn; between two faults a save succeeds."""
    folder = saved("run")
    job = checked(FSDP2, *SMALL, f"--checkpoint.async_mode={mode}", "--checkpoint.keep_latest_k=0")
    before = folder_digests(folder)
    hows = ["now"] if mode == "disabled" else ["agree", "save", "wait"]

    def rank_main():
        trainer = build_trainer(job)
        outcomes = []
        for i, (sabotage, _, _) in enumerate(FAILING_SAVES.values()):
            start = time.monotonic()
            dist.barrier()
            with sabotage():
                kind, text = failing_save(trainer, 10 + i, hows[i % len(hows)])
            elapsed = time.monotonic() - start
            dist.barrier()  # all ranks reach this
            outcomes.append(
                (
                    kind,
                    text,
                    elapsed,
                    hidden(folder),
                    list_steps(folder),
                    folder_digests(folder) == before,
                )
            )
            dist.barrier()
        save_step(trainer, 3)
        trainer.parts.checkpointer.wait()
        return outcomes

    by_rank = run_ranks(2, rank_main)
    for i, (fault, (_, words, rank)) in enumerate(FAILING_SAVES.items()):
        outcomes = [outcomes[i] for outcomes in by_rank]
        kind, text, _, _, _, _ = outcomes[0]
        assert kind == "CheckpointError", (fault, outcomes)
        assert text.startswith(f"checkpoint: cannot save to {folder / f'step-{10 + i}'}: "), text
        assert ("Free space there" in text) == ("space" in words), (fault, text)
        assert words in text and f"(rank {rank})" in text, (fault, text)
        for other_kind, other_text, elapsed, left, steps, same in outcomes:
            assert (other_kind, other_text) == (kind, text), f"{fault}: the same on all ranks"
            assert elapsed < SECONDS, fault
            assert (left, steps, same) == ([], [1, 2], True), (
                f"{fault}: the earlier ones as they were, nothing else"
            )
    assert list_steps(folder) == [1, 2, 3]
    assert_holds(folder / "step-3", 3)


def test_background_save_is_finished_when_training_fails(config_file, tmp_path, monkeypatch):
    """The loss is not finite at step 2, while step 1, which is valid, is still being written."""
    arguments = ["--config", str(config_file), f"--job.dump_folder={tmp_path / 'run'}", *SMALL]
    arguments += ["--parallelism.data_parallel_shard_degree=2", "--checkpoint.async_mode=async"]
    pwritev, step = os.pwritev, TrainStep.train_step

    def broken(self, *args):
        if self.step == 1:
            local_of(next(self.model.parameters())).data.fill_(math.nan)
        return step(self, *args)

    monkeypatch.setattr(TrainStep, "train_step", broken)

    def slow(*args):
        time.sleep(0.1)
        return pwritev(*args)

    monkeypatch.setattr(os, "pwritev", slow)

    def train(pipe):
        pipe.send(titanlite.rank.main(arguments))

    ranks = Forked(2, train)
    try:
        assert ranks.receive() == [2, 2], "exit codes"
        for process in ranks.processes:
            process.join(SECONDS)
            assert process.exitcode == 0
    finally:
        ranks.end()
    folder = tmp_path / "run/checkpoint"
    assert list_steps(folder) == [1] and hidden(folder) == []
    assert check_folder(folder / "step-1", checksums=True) == []


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_removal_that_fails_is_the_same_on_all_ranks(run_ranks, checked, saved, mode):
    """All ranks have an error, or none has one: an error on one rank alone would leave the
    remaining ranks waiting.
    """
    folder = saved("run")
    job = checked(FSDP2, *SMALL, f"--checkpoint.async_mode={mode}", "--checkpoint.keep_latest_k=1")

    def rank_main():
        trainer = build_trainer(job)
        with broken(0, Path, "rename", errno.EACCES, 2):  # the first rename makes step-3 appear
            return failing_save(trainer, 3, "wait" if mode == "async" else "now")

    first, second = run_ranks(2, rank_main, timeout_s=SECONDS)
    assert first == second
    assert first[0] in ("none", "CheckpointError")
    assert list_steps(folder) == [1, 2, 3]
    assert_holds(folder / "step-3", 3)


# --- damaged checkpoints


def test_file_cut_off_while_one_rank_reads_is_an_error_on_all(run_ranks, checked, saved):
    path = saved("run") / "step-2" / MODEL
    job = checked(FSDP2, *SMALL)

    def rank_main():
        original = os.preadv

        def preadv(descriptor, buffers, offset):
            os.truncate(path, 100)
            return original(descriptor, buffers, offset)

        if dist.get_rank() == 1:
            os.preadv = preadv
        with pytest.raises(CheckpointError) as raised:
            build_trainer(job)
        return str(raised.value)

    first, second = run_ranks(2, rank_main, timeout_s=60)
    assert first == second and str(path) in first and "cut off" in first
