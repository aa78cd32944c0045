"""The learning-rate factor over a whole run, for every shape of decay."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config import JobConfig
from titanlite.config.schema import LRSchedulerSection
from titanlite.models.interface import Model
from titanlite.optim.schedule import Schedule, lr_factor

TYPES = ["linear", "sqrt", "cosine"]


def factors(steps, **changes):
    section = LRSchedulerSection(**changes)
    return [lr_factor(step, steps, section) for step in range(steps)]


@settings(max_examples=200)
@given(
    steps=st.integers(1, 200),
    warmup_steps=st.integers(0, 250),
    decay_ratio=st.none() | st.floats(0.001, 1.0),
    decay_type=st.sampled_from(TYPES),
    min_lr_factor=st.floats(0.0, 1.0),
)
def test_rises_stays_and_falls(steps, warmup_steps, decay_ratio, decay_type, min_lr_factor):
    found = factors(
        steps,
        warmup_steps=warmup_steps,
        decay_ratio=decay_ratio,
        decay_type=decay_type,
        min_lr_factor=min_lr_factor,
    )
    assert all(0.0 <= factor <= 1.0 for factor in found)
    warmup = min(warmup_steps, steps)
    if warmup:
        assert found[:warmup] == [(i + 1) / warmup for i in range(warmup)]
    after = found[warmup:]
    assert all(b <= a for a, b in itertools.pairwise(after))
    decay = (
        steps - warmup if decay_ratio is None else min(round(steps * decay_ratio), steps - warmup)
    )
    assert after[: len(after) - decay] == [1.0] * (len(after) - decay)
    if decay:
        # cos(pi) and 1 - 1 are exact up to rounding
        assert found[-1] == pytest.approx(min_lr_factor, abs=1e-12)
        assert min(found[warmup:]) >= min_lr_factor - 1e-12


@pytest.mark.parametrize(
    ("decay_type", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))]
)
def test_shape_in_the_middle_of_the_decay(decay_type, middle):
    found = factors(20, warmup_steps=4, decay_ratio=0.5, decay_type=decay_type, min_lr_factor=0.2)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4:10] == [1.0] * 6
    assert found[14] == pytest.approx(0.2 + 0.8 * middle)
    assert found[19] == pytest.approx(0.2)
    assert found[10] < 1.0


def test_every_group_has_its_own_rate_whatever_step_was_before():
    """As in a resumed run, and where an earlier step is computed again."""
    job = JobConfig()
    job.training.steps = 6
    job.optimizer.lr = 2.0
    job.lr_scheduler = LRSchedulerSection(warmup_steps=2, decay_type="linear")
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=2.0)
    schedule = Schedule(job, Model(), optimizer)
    expected = factors(6, warmup_steps=2, decay_type="linear")
    for step in (4, 0, 1, 5, 2, 3):
        schedule.apply(step)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([2.0 * expected[step], 0.5 * expected[step]])
        assert schedule.learning_rate(step) == rates[0]
