"""Optimizer, learning-rate schedule and the expert balancer."""

from titanlite.optim.expert_bias import ExpertBiasBalancer
from titanlite.optim.lr_schedule import build_lr_scheduler, lr_factor
from titanlite.optim.nonfinite import FiniteGuard, NonFiniteSteps
from titanlite.optim.optimizer import build_optimizer, step_if_finite
from titanlite.optim.parameters import count_parameters, freeze_parameters, lr_multipliers, muon_matrices

__all__ = [
    "ExpertBiasBalancer",
    "FiniteGuard",
    "NonFiniteSteps",
    "build_lr_scheduler",
    "build_optimizer",
    "count_parameters",
    "freeze_parameters",
    "lr_factor",
    "lr_multipliers",
    "muon_matrices",
    "step_if_finite",
]
