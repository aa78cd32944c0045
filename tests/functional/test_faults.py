"""Faults in a run while it trains: values that are not finite, failed saves."""

import errno
import math
import os
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from files import read_lines
from safetensors.torch import load_file

from tests.functional.conftest import weekly
from titanlite.assemble import assemble
from titanlite.base.errors import TitanliteError
from titanlite.checkpoint.commit import check_folder, list_steps
from titanlite.config.parallelism import Degrees

QUIET = [
    "--metrics.log_freq=4",
    "--training.steps=8",
    "--lr_scheduler.warmup_steps=2",
    "--checkpoint.keep_latest_k=0",
]
STEPS = "--training.steps=5"


@pytest.fixture
def train(run_ranks, checked, tmp_path):
    """`train(degrees, folder name, *overrides, before=)`: a whole training; all ranks must
    have the same outcome.

    `before(trainer)` may inject a fault.
    """

    def run(degrees, folder, *overrides, before=lambda trainer: None):
        job = checked(degrees, *QUIET, f"--job.dump_folder={tmp_path / folder}", *overrides)

        def rank_main():
            trainer = assemble(job)
            before(trainer)
            try:
                trainer.train()
            except TitanliteError as error:
                return (type(error).__name__, error.exit_code, str(error)), trainer.step
            return None, trainer.step

        first, *others = run_ranks(degrees.world_size, rank_main)
        assert others == [first] * len(others), "one outcome on all ranks"
        return first

    return run


def events(folder):
    """Return kind and step of the events that a run without faults does not have."""
    found = [(e["kind"], e["step"]) for e in read_lines(folder / "events.jsonl")]
    return [event for event in found if event[0] not in ("start", "resume", "save", "stop", "end")]


def points(folder):
    return read_lines(folder / "metrics.jsonl")


def poison_output(name, step, rank, *, once):
    """Make module `name` return NaN on `rank` in micro-batch 1 of `step`: only the first time, or
    whenever it runs.
    """

    def put_in(trainer):
        bad, latest, done = trainer.parts.loader.micro_batches(step - 1)[1].tokens, [], []

        def hook(module, arguments, output):
            if dist.get_rank() != rank or not torch.equal(latest[-1], bad) or (once and done):
                return output
            done.append(True)
            return (
                (output[0] * math.nan, *output[1:])
                if isinstance(output, tuple)
                else output * math.nan
            )

        trainer.model.register_forward_pre_hook(
            lambda module, arguments: latest.append(arguments[0])
        )
        trainer.model.get_submodule(name).register_forward_hook(hook)

    return put_in


def assert_same_state(one, other):
    """Two checkpoints hold the same bits: model, biases and optimizer states."""
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*.safetensors"))
    assert len(names) == 3
    for name in names:
        expected, found = load_file(one / name), load_file(other / name)
        assert expected.keys() == found.keys()
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


# --- values that are not finite


def test_nan_is_named_the_state_of_before_is_saved_and_a_transient_one_changes_nothing(
    train, tmp_path
):
    mesh = Degrees(dp_shard=2, ep=2)
    assert train(mesh, "whole", "--checkpoint.interval=2", STEPS) == (None, 5)

    put_in = poison_output("model.layers.1.mlp", step=3, rank=1, once=False)
    (kind, code, text), step = train(
        mesh, "repeats", "--checkpoint.interval=0", STEPS, before=put_in
    )
    assert (kind, code, step) == ("TrainingError", 2, 2), "a new start would meet it again"
    assert text.startswith("training: the loss or gradient of step 3 is not finite. ")
    assert (
        "first output that is not finite is that of model.layers.1.mlp (micro-batch 1, rank 1)"
        in text
    )
    assert (
        "Gradients that are not finite, from micro-batch 1 on: lm_head.weight, model.norm.weight"
        in text
    )
    assert (
        f"those of step 2, saved in {tmp_path / 'repeats/checkpoint'}" in text
        and "Lower optimizer.lr" in text
    )
    assert list_steps(tmp_path / "repeats/checkpoint") == [2]
    assert_same_state(tmp_path / "whole/checkpoint/step-2", tmp_path / "repeats/checkpoint/step-2")

    put_in = poison_output("model.layers.0.self_attn", step=3, rank=0, once=True)
    (kind, code, text), step = train(mesh, "once", "--checkpoint.interval=0", STEPS, before=put_in)
    assert (kind, code, step) == ("TransientError", 3, 2)
    assert "Computed again, the step is finite on all ranks" in text
    assert train(mesh, "once", "--checkpoint.interval=0", STEPS) == (None, 5)
    assert_same_state(tmp_path / "whole/checkpoint/step-5", tmp_path / "once/checkpoint/step-5")


def test_nan_is_named_where_it_came_from_though_attention_gave_it_to_all_ranks(train):
    put_in = poison_output("model.layers.0.mlp", step=2, rank=1, once=False)
    (kind, _, text), _ = train(
        Degrees(cp=2), "spread", "--checkpoint.enable=false", STEPS, before=put_in
    )
    assert kind == "TrainingError"
    assert (
        "first output that is not finite is that of model.layers.0.mlp (micro-batch 1, rank 1), "
        "that of " in text
    )


def test_skipped_steps_are_counted_and_too_many_in_a_row_end_the_run(train, tmp_path):
    overrides = [
        "--training.on_nonfinite=skip",
        "--training.max_nonfinite_steps=2",
        "--checkpoint.interval=0",
    ]

    def put_in(trainer):
        for step in (2, 4):
            poison_output("model.layers.1.mlp", step, rank=1, once=False)(trainer)

    assert train(Degrees(dp_shard=2), "skips", *overrides, before=put_in) == (None, 8)
    assert [(p["step"], p["nonfinite_steps"]) for p in points(tmp_path / "skips")] == [
        (1, 0),
        (4, 2),
        (8, 2),
    ]
    assert all(math.isfinite(p["loss/train"]) for p in points(tmp_path / "skips"))
    assert events(tmp_path / "skips") == [("skip", 4)]

    def put_in_more(trainer):
        for step in (2, 5, 6):
            poison_output("model.layers.1.mlp", step, rank=1, once=False)(trainer)

    (kind, _, text), step = train(Degrees(dp_shard=2), "ends", *overrides, before=put_in_more)
    assert (kind, step) == ("TrainingError", 4)
    assert "the loss or gradient of step 5 is not finite; it is the first of 2 in a row" in text
    assert list_steps(tmp_path / "ends/checkpoint") == [4]


# --- saves that fail


def failing_saves(steps, monkeypatch):
    """Make the disk full on rank 1 while the checkpoint of one of `steps` is written; each number
    fails once.
    """
    original = os.pwritev
    left = list(steps)

    def pwritev(fd, *arguments):
        found = re.search(r"step-(\d+)", os.readlink(f"/proc/self/fd/{fd}"))
        if dist.get_rank() == 1 and found is not None and int(found[1]) in left:
            left.remove(int(found[1]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, *arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize("mode", [weekly("disabled"), "async"])
def test_failed_saves_do_not_end_a_run_that_shall_go_on(train, tmp_path, monkeypatch, mode):
    overrides = [f"--checkpoint.async_mode={mode}", "--checkpoint.interval=2"]
    degrees = Degrees(dp_shard=2)
    go_on = [*overrides, "--checkpoint.on_save_error=continue"]
    outcome = train(degrees, "goes-on", *go_on, before=lambda t: failing_saves([4], monkeypatch))
    assert outcome == (None, 8)
    folder = tmp_path / "goes-on/checkpoint"
    assert list_steps(folder) == [2, 6, 8]
    assert check_folder(folder / "step-8", checksums=True) == []
    assert all(path.name.startswith("step-") for path in folder.iterdir()), (
        "nothing is left of those that failed"
    )
    assert {kind for kind, _ in events(tmp_path / "goes-on")} == {"save failed"}
    lines = read_lines(tmp_path / "goes-on/events.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "save"] == list_steps(folder), (
        "those that are there"
    )
    failed = [line["step"] for line in lines if line["kind"] == "save failed"]
    assert failed == [4]

    (kind, code, text), _ = train(
        degrees, "full", *go_on, before=lambda t: failing_saves([8, 8], monkeypatch)
    )
    assert (kind, code) == ("TransientError", 3) and "the last one could not be written" in text
    (kind, code, text), _ = train(
        degrees, "stops", *overrides, before=lambda t: failing_saves([4], monkeypatch)
    )
    assert (kind, code) == ("CheckpointError", 2) and "No space left" in text


def test_a_disk_that_cannot_hold_the_first_checkpoint_ends_the_run_before_it_trains(
    train, tmp_path, monkeypatch
):
    """The check is exact to the byte: the free space must hold the files of one checkpoint."""
    usage = shutil.disk_usage(tmp_path)

    def run(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        return train(Degrees(dp_shard=2), "full", "--checkpoint.export_dtype=bfloat16")

    def refused(free):
        with pytest.raises(
            AssertionError, match="ConfigError: checkpoint: the first one takes "
        ) as raised:
            run(free)
        return str(raised.value)

    text = refused(1000)
    assert " and 1.00 kB (1,000 bytes) are free" in text
    assert points(tmp_path / "full") == [] and list_steps(tmp_path / "full/checkpoint") == []
    size = int(re.search(r"\(([\d,]+) bytes\), and", text)[1].replace(",", ""))
    refused(size - 1)
    assert run(size) == (None, 8) and list_steps(tmp_path / "full/checkpoint")[-1] == 8
