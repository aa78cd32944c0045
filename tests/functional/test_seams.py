"""Guarantees for code that is added to a step: values that follow the step, squares of gradients
after a backward, and weights that change around a forward without a backward.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import titanlite.train_step
from tests.functional.conftest import values_of, weekly
from titanlite.assemble import assemble
from titanlite.config.parallelism import Degrees
from titanlite.materialize.layout import is_remote, local_of
from titanlite.optim.optimizer import Diagnosis
from titanlite.optim.schedule import Schedule

Z_LOSS = [
    "--moe.z_loss_coeff=0.01",
    "--moe.aux_loss_coeff=0",
    "--training.global_batch_size=4",
    "--training.local_batch_size=4",
]
SLOW = ["--optimizer.lr=1e-6", "--lr_scheduler.warmup_steps=0", "--lr_scheduler.min_lr_factor=1"]
WARMUP_STEPS = 4


def warm_up(monkeypatch):
    """Let the coefficient of the z-loss rise; a warm-up needs only this function and its
    setting.
    """

    def z_loss_coeff(self, step):
        return self.job.moe.z_loss_coeff * min(1.0, (step + 1) / WARMUP_STEPS)

    monkeypatch.setattr(Schedule, "z_loss_coeff", z_loss_coeff)


def test_a_resumed_run_goes_on_in_the_warm_up_of_the_z_loss(
    run_ranks,
    checked,
    tmp_path,
    monkeypatch,
):
    def rank_main(name, *steps):
        for count in steps:
            folder = f"--job.dump_folder={tmp_path / name}"
            job = checked(Degrees(), *Z_LOSS, *SLOW, folder, f"--training.steps={count}")
            assemble(job).train()
        return list(values_of(tmp_path / name, "loss/aux").values())

    (constant,) = run_ranks(1, rank_main, "constant", 1)
    warm_up(monkeypatch)
    (whole,) = run_ranks(1, rank_main, "whole", 5)
    (parts,) = run_ranks(1, rank_main, "parts", 2, 5)
    assert whole[0] == pytest.approx(constant[0] / WARMUP_STEPS, rel=1e-6)
    rise = [now / before for before, now in itertools.pairwise(whole)]
    # The weights hardly change, but other tokens have other losses.
    assert rise == pytest.approx([2, 3 / 2, 4 / 3, 1], rel=0.05)
    assert parts == whole


def test_the_diagnosis_of_a_step_sees_the_values_of_that_step(run_ranks, checked, monkeypatch):
    """Step 2 of 4 is not finite, which is found after step 4. The diagnosis computes it again with
    the z-loss, the learning rate and the random numbers of step 2.
    """
    warm_up(monkeypatch)
    job = checked(
        Degrees(),
        *Z_LOSS,
        "--training.steps=4",
        "--metrics.log_freq=4",
        "--training.on_nonfinite=skip",
        "--checkpoint.enable=false",
    )
    real = titanlite.train_step.clip_grad_norms

    def rank_main():
        trainer = assemble(job)
        stepper = trainer.parts.stepper
        gate = next(iter(trainer.model.moe_layers().values())).gate
        seen = []

        def look():
            rates = [group["lr"] for group in stepper.optimizer.param_groups]
            seen.append((gate.z_loss_coeff, rates, torch.rand(1).item()))

        def clip(groups, *rest):
            look()
            norm, of_groups = real(groups, *rest)
            return (norm * math.nan if len(seen) == 2 else norm), of_groups

        def diagnose(batches, scaled_loss):
            look()
            return Diagnosis("", repeats=True)

        monkeypatch.setattr(titanlite.train_step, "clip_grad_norms", clip)
        trainer.watch = replace(trainer.watch, diagnose=diagnose)
        trainer.train()
        return seen

    (seen,) = run_ranks(1, rank_main)
    assert [coeff for coeff, *_ in seen] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.005])
    assert seen[-1] == seen[1] != seen[2]


# --- squares of gradients after each backward


def measure(job):
    trainer = assemble(job)
    stepper = trainer.parts.stepper
    stepper.measures_backwards = True
    result = stepper.train_step(trainer.parts.loader.micro_batches(0))
    assert result.squares is not None
    return result.units.tolist(), result.squares.tolist(), result.grad_norm.item()


@pytest.mark.parametrize(
    ("degrees", "once_per_step"),
    [
        weekly(Degrees(dp_shard=2), "false"),
        weekly(Degrees(tp=2), "false"),
        (Degrees(dp_replicate=2, dp_shard=2), "true"),
        weekly(Degrees(dp_shard=2, ep=2), "true"),
        (Degrees(dp_replicate=2, tp=2, ep=2), "false"),
        (Degrees(dp_shard=2, pp=2), "true"),
    ],
    ids=str,
)
def test_squares_after_each_backward_are_those_of_one_rank(
    run_warm,
    checked,
    once,
    degrees,
    once_per_step,
):
    """Each step has 4 micro-batches, with 4 sequences each on all ranks together."""
    rows = "--training.global_batch_size=16"

    def run(degrees):
        size = f"--training.local_batch_size={4 // degrees.dp}"
        fsdp = f"--parallelism.fsdp_once_per_step={once_per_step}"
        results = run_warm(degrees.world_size, measure, checked(degrees, rows, size, fsdp))
        assert len(set(map(str, results))) == 1
        return results[0]

    expected_units, expected, expected_norm = once("one rank", lambda: run(Degrees()))
    units, squares, norm = run(degrees)
    assert units == expected_units and len(units) == 4
    # Ranks add float32 numbers in another order; see test_parity_ladder.py.
    assert squares == pytest.approx(expected, rel=2e-5)
    assert math.sqrt(squares[-1]) == pytest.approx(norm, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-5)


def test_measured_gradients_are_trained_as_others(run_warm, checked):
    """The measurement sums gradients over tp; afterwards they have their old values again."""
    job = checked(Degrees(tp=2), "--training.global_batch_size=2")
    measured, plain = (run_warm(2, train_measured, job, each) for each in (True, False))
    assert measured == plain


def train_measured(job, measures):
    trainer = assemble(job)
    stepper = trainer.parts.stepper
    stepper.measures_backwards = measures
    steps = [stepper.train_step(trainer.parts.loader.micro_batches(step)) for step in range(3)]
    return [step.grad_norm.item() for step in steps]


# --- weights that change around a forward without a backward


def scale(params, factor):
    with torch.no_grad():
        for param in params:
            if not is_remote(param):
                param.mul_(factor)


@pytest.mark.parametrize(
    ("degrees", "precision", "once_per_step"),
    [
        (Degrees(dp_shard=2), "float32", "true"),
        weekly(Degrees(dp_shard=2, tp=2), "float32", "false"),
        # the experts' copies are not FSDP's
        (Degrees(dp_shard=2, ep=2), "bfloat16", "false"),
        (Degrees(pp=2), "float32", "true"),
    ],
    ids=str,
)
def test_weights_that_change_after_a_validation_are_used_and_kept(
    run_ranks,
    checked,
    degrees,
    precision,
    once_per_step,
):
    """FSDP leaves the last layer and the root gathered after a forward, but an optimizer changes
    the shards.
    """
    job = checked(
        degrees,
        "--validation.enable=true",
        "--validation.steps=1",
        f"--training.mixed_precision_param={precision}",
        f"--parallelism.fsdp_once_per_step={once_per_step}",
    )

    def rank_main():
        trainer = assemble(job)
        params = list(trainer.model.parameters())
        losses = [trainer.validate()[0]]
        before = [local_of(param).clone() for param in params if not is_remote(param)]
        scale(params, 2.0)
        losses.append(trainer.validate()[0])
        for module in trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        losses.append(trainer.validate()[0])
        scale(params, 0.5)
        losses.append(trainer.validate()[0])
        after = [local_of(param) for param in params if not is_remote(param)]
        return losses, all(map(torch.equal, before, after))

    for (first, second, again, last), is_kept in run_ranks(degrees.world_size, rank_main):
        assert first == last != pytest.approx(second, rel=1e-3)
        assert second == again
        assert is_kept
