"""The optimizer that the configuration describes, stepped only if the gradients are finite, and its rate."""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from titanlite.base.extension import FORM, is_extension
from titanlite.base.log import logger
from titanlite.config.schema import LRSchedulerSection, OptimizerSection
from titanlite.materialize.layout import local_of
from titanlite.ops.kernels import kernel_device
from titanlite.optim.parameters import lr_multipliers

_LEAST_BFLOAT16_LR = 1e-3


class LocalAdamW(torch.optim.AdamW):
    """torch's AdamW (arXiv:1711.05101) on this rank's shards; parameters and states stay DTensors.

    DTensor refuses two meshes in a fused call, and finding the layout of the first results takes longer than ten
    updates of a small model.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        for group in self.param_groups:
            group["state_names"] = ("step", "exp_avg", "exp_avg_sq")  # what a checkpoint must have of each parameter

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill `lists` with local tensors, in the order of the update's arguments; private to torch."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_of(tensor) for tensor in tensors]
        return has_complex


def build_optimizer(
    model: Any, section: OptimizerSection, others: Mapping[str, Callable[..., torch.optim.Optimizer]] | None = None
) -> torch.optim.Optimizer:
    """Build AdamW of the trained parameters, or what the builder in `others` for `section.name` makes of them.

    The builder of the user's own optimizers is under `FORM`. Parameters that other ranks hold are in the groups, too,
    and never stepped here.

    Raises ConfigError: `section.lr_multipliers` names nothing that is trained.
    """
    name = FORM if is_extension(section.name) else section.name
    if others and name in others:
        return others[name](model, section)
    assert section.name == "AdamW", section.name
    return build_adamw(group_parameters(model, section)[1], section)


def build_adamw(groups: list[dict[str, Any]], section: OptimizerSection) -> LocalAdamW:
    """Build AdamW of these groups, which may be none."""
    return LocalAdamW(
        groups or [{"params": []}],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=section.implementation == "fused",
        foreach=section.implementation == "foreach",
    )


def group_parameters(
    model: nn.Module, section: OptimizerSection, apart: Container[nn.Parameter] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Group the trained parameters by rate and decay: those that lie in `apart`, and the rest.

    Only matrices decay: not norms and other vectors, nor biases, even if those of all experts are one matrix.

    Raises ConfigError: `section.lr_multipliers` names nothing that is trained.
    """
    multipliers = lr_multipliers(model, section)
    groups: defaultdict[tuple[bool, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, param in model.named_parameters():
        if param.requires_grad:
            decays = param.dim() >= 2 and not name.endswith("bias")
            groups[param in apart, decays, multipliers.get(param, 1.0)].append(param)
    if section.lr < _LEAST_BFLOAT16_LR and any(p.dtype == torch.bfloat16 for params in groups.values() for p in params):
        logger.warning(
            "optimizer: a weight in bfloat16 changes by 1/256 of its size or not at all; with optimizer.lr = %g most "
            "never will. Set training.dtype = 'float32'.",
            section.lr,
        )
    lies_apart, rest = (
        [
            {"params": params, "weight_decay": section.weight_decay if decay else 0.0, "lr": section.lr * multiplier}
            for (where, decay, multiplier), params in groups.items()
            if where == which
        ]
        for which in (True, False)
    )
    return lies_apart, rest


def scale_gradients(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply `grads`, those of all parameters of `optimizer`, by the scalar `factor` before its next step.

    On CUDA the kernel of fused AdamW does so while it reads them, which saves a pass.
    """
    if type(optimizer) is LocalAdamW and optimizer.defaults["fused"] and kernel_device(grads[0].device) == "cuda":
        optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_(grads, factor)


def step_if_finite(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Step `optimizer` if the bool scalar `finite` is True on the device; otherwise nothing changes.

    A fused optimizer reads the flag inside its kernel (`found_inf`), so the host does not wait for the gradients. The
    other implementations cost one synchronization.
    """
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        optimizer.step()


def lr_factor(step: int, steps: int, section: LRSchedulerSection) -> float:
    """Return the factor on the peak learning rate for optimizer step `step` (0-based) of `steps`.

    Warmup-stable-decay (arXiv:2404.06395). Warm-up of -1 is 3% of all steps, at most 200. It reaches 1 at step
    warmup_steps - 1, so that the first step is not wasted on a rate of 0. The decay covers the last decay_ratio of all
    steps, or all after warm-up if unset, and ends at min_lr_factor on the last step.
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


def build_lr_scheduler(
    optimizer: torch.optim.Optimizer, section: LRSchedulerSection, steps: int, start_step: int = 0
) -> LambdaLR:
    """Build the scheduler that applies `lr_factor`, from `start_step` steps done; step it after every optimizer step."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # which LambdaLR wants where it does not begin at 0
    return LambdaLR(optimizer, lambda step: lr_factor(step, steps, section), last_epoch=start_step - 1)
