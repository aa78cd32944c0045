"""Which steps are applied, decided without a look from the host."""

import pytest
import torch

from titanlite.optim.optimizer import FiniteGuard, NonFiniteSteps

CPU = torch.device("cpu")


def admit(guard, finite):
    """`finite`: one character per step from 1 on, '.' for finite, 'x' for not."""
    return [bool(guard.admit(step, torch.tensor(c == "."))) for step, c in enumerate(finite, 1)]


@pytest.mark.parametrize(
    ("limit", "steps", "applied", "found"),
    [
        (1, ".x..", [1, 0, 0, 0], NonFiniteSteps(2, 2, 1, 1, True)),
        (2, ".x.x", [1, 0, 1, 0], NonFiniteSteps(2, 4, 1, 2, False)),
        (2, ".x..", [1, 0, 1, 1], NonFiniteSteps(2, -1, 0, 1, False)),
        (2, ".x.xx...", [1, 0, 1, 0, 0, 0, 0, 0], NonFiniteSteps(2, 4, 2, 3, True)),
        (3, "xx.xxx.", [0, 0, 1, 0, 0, 0, 0], NonFiniteSteps(1, 4, 3, 5, True)),
    ],
)
def test_steps_in_a_row(limit, steps, applied, found):
    guard = FiniteGuard(CPU, limit)
    assert admit(guard, steps) == list(map(bool, applied))
    assert guard.look() == found
    assert guard.look() is None, "said once"


def test_a_run_of_bad_steps_goes_on_over_a_look():
    guard = FiniteGuard(CPU, 2)
    guard.admit(1, torch.tensor(False))
    assert guard.look() == NonFiniteSteps(1, 1, 1, 1, False)
    guard.admit(2, torch.tensor(False))
    assert guard.look() == NonFiniteSteps(2, 1, 2, 2, True)
