"""The optimizer that the configuration describes, stepped only if the gradients are finite."""

from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn

from titanlite.base.extension import FORM, is_extension
from titanlite.base.log import logger
from titanlite.config.schema import OptimizerSection
from titanlite.ops.kernels import kernel_device
from titanlite.optim.adamw import LocalAdamW
from titanlite.optim.parameters import lr_multipliers

_LEAST_BFLOAT16_LR = 1e-3


def build_optimizer(
    model: Any, section: OptimizerSection, others: Mapping[str, Callable[..., torch.optim.Optimizer]] | None = None
) -> torch.optim.Optimizer:
    """AdamW of the parameters that are trained, or what the builder in `others` for `section.name` makes of the same;
    that of the user's own optimizers is under `FORM`.

    What other ranks hold is in its groups too, and is never stepped here.

    Raises:
        ConfigError: `section.lr_multipliers` names nothing that is trained.
    """
    name = FORM if is_extension(section.name) else section.name
    if others and name in others:
        return others[name](model, section)
    assert section.name == "AdamW", section.name
    return build_adamw(group_parameters(model, section)[1], section)


def build_adamw(groups: list[dict[str, Any]], section: OptimizerSection) -> LocalAdamW:
    """AdamW of these groups, which may be none."""
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

    Decay is on matrices only: not on norms, on other vectors, or on biases, also where those of all experts are one
    matrix.

    Raises:
        ConfigError: `section.lr_multipliers` names nothing that is trained.
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

    On CUDA the kernel of fused AdamW does so while it reads them: a pass over all gradients less.
    """
    if type(optimizer) is LocalAdamW and optimizer.defaults["fused"] and kernel_device(grads[0].device) == "cuda":
        optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_(grads, factor)


def step_if_finite(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Step `optimizer` if the bool scalar `finite` is True on the device; else weights and states stay as they are.

    A fused optimizer reads the flag inside its kernel (the `found_inf` that GradScaler uses too), so the host does not
    wait for the gradients. The other implementations cost one synchronization.
    """
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        optimizer.step()
