"""Learning-rate schedules: linear warm-up, a plateau, then decay (warmup-stable-decay, arXiv:2404.06395)."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from titanlite.config.schema import LRSchedulerSection


def lr_factor(step: int, steps: int, section: LRSchedulerSection) -> float:
    """Factor on the peak learning rate for optimizer step `step` (0-based) of `steps`.

    Warm-up of -1 is 3% of all steps, at most 200. It reaches 1 at step warmup_steps - 1, so that the first step is not
    wasted on a rate of 0. The decay covers the last decay_ratio of all steps, or all after warm-up if unset, and ends
    at min_lr_factor on the last step.
    """
    warmup = min(section.warmup_steps, steps) if section.warmup_steps >= 0 else min(200, math.ceil(0.03 * steps))
    if step < warmup:
        return (step + 1) / warmup
    decay = steps - warmup if section.decay_ratio is None else min(round(steps * section.decay_ratio), steps - warmup)
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


def build_lr_scheduler(optimizer: Optimizer, section: LRSchedulerSection, steps: int, start_step: int = 0) -> LambdaLR:
    """Scheduler that applies `lr_factor`, from `start_step` steps done; call `step()` after every optimizer step."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # which LambdaLR wants where it does not begin at 0
    return LambdaLR(optimizer, lambda step: lr_factor(step, steps, section), last_epoch=start_step - 1)
