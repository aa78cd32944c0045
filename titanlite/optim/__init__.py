"""Optimizer, the values that follow the step, and the expert balancer."""

from titanlite.optim.optimizer import FiniteGuard, NonFiniteSteps
