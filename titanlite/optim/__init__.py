"""Optimizer, learning-rate schedule and the expert balancer."""

from titanlite.optim.lr_schedule import build_lr_scheduler, lr_factor
from titanlite.optim.nonfinite import FiniteGuard, NonFiniteSteps
