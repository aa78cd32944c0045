"""Optimizer, learning-rate schedule and the expert balancer."""

from titanlite.optim.nonfinite import FiniteGuard, NonFiniteSteps
from titanlite.optim.optimizer import build_lr_scheduler, lr_factor
