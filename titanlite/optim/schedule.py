"""`Schedule`: the values that depend on the step, such as the learning rate."""

import math

import torch

from titanlite.config import JobConfig
from titanlite.config.schema import LRSchedulerSection
from titanlite.models.interface import Model


class Schedule:
    """The values that depend on the step, set on a run's optimizer and model.

    Each value is a function of the configuration and of the completed optimizer steps, without
    other state. So a step, a run that resumes before it, and a diagnosis that computes it again use
    the same value. A new value is a method, and a line in `apply`. Optimizers find the step in
    `training_step` and `last_training_step` of each group of parameters.
    """

    def __init__(self, job: JobConfig, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.job = job
        self._model = model
        self._groups = [(group, group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["training_step"] = 0
            group["last_training_step"] = job.training.steps - 1

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (0-based), without multipliers."""
        return self.job.optimizer.lr * self._lr_factor(step)

    def aux_loss_coeff(self, step: int) -> float:
        return self.job.moe.aux_loss_coeff or 0.0

    def z_loss_coeff(self, step: int) -> float:
        return self.job.moe.z_loss_coeff

    def apply(self, step: int) -> None:
        """Set the values of optimizer step `step` (0-based); call before its first forward."""
        factor = self._lr_factor(step)
        for group, rate in self._groups:
            group["lr"] = rate * factor
            group["training_step"] = step
        self._model.set_loss_coeffs(aux=self.aux_loss_coeff(step), z=self.z_loss_coeff(step))

    def _lr_factor(self, step: int) -> float:
        return lr_factor(step, self.job.training.steps, self.job.lr_scheduler)


def lr_factor(step: int, steps: int, section: LRSchedulerSection) -> float:
    """Return the factor on the peak learning rate for optimizer step `step` (0-based) of `steps`.

    Warmup-stable-decay (arXiv:2404.06395). Warm-up of -1 is 3% of all steps, at most 200. The
    factor reaches 1 at step warmup_steps - 1, so that the first step is not wasted on a rate of 0.
    The decay covers the last decay_ratio of all steps, or all steps after warm-up if it is not set,
    and ends at min_lr_factor on the last step.
    """
    if section.warmup_steps >= 0:
        warmup = min(section.warmup_steps, steps)
    else:
        warmup = min(200, math.ceil(0.03 * steps))
    if step < warmup:
        return (step + 1) / warmup
    decay = steps - warmup
    if section.decay_ratio is not None:
        decay = min(round(steps * section.decay_ratio), decay)
    done = step - (steps - decay) + 1
    if done <= 0 or decay == 0:
        return 1.0
    progress = min(done / decay, 1.0)
    shape = {
        "linear": 1.0 - progress,
        "sqrt": 1.0 - math.sqrt(progress),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[section.decay_type]
    return section.min_lr_factor + (1.0 - section.min_lr_factor) * shape
