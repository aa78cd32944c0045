"""Optimizer, learning-rate schedule and the expert balancer."""

from titanlite.optim.optimizer import FiniteGuard, NonFiniteSteps, build_lr_scheduler, lr_factor
