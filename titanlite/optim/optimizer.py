"""AdamW (arXiv:1711.05101) over parameters that may live on two meshes, stepped only if the gradients are finite."""

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import OptimizerSection
from titanlite.optim.parameters import lr_multipliers


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW of the parameters that are trained, with decay on matrices only (norms, biases and other vectors are not).

    Parameters are grouped by mesh too: one fused or foreach call cannot mix DTensors of the dense and the sparse mesh.

    Raises:
        ConfigError: `section.lr_multipliers` names nothing that is trained.
    """
    multipliers = lr_multipliers(model, section)
    groups: defaultdict[tuple[bool, int, float], list[nn.Parameter]] = defaultdict(list)
    for param in model.parameters():
        if param.requires_grad:
            mesh = hash(param.device_mesh) if isinstance(param, DTensor) else 0
            groups[param.dim() >= 2, mesh, multipliers.get(param, 1.0)].append(param)
    options: dict[str, Any] = {
        "fused": section.implementation == "fused",
        "foreach": section.implementation == "foreach",
    }
    return torch.optim.AdamW(
        [
            {
                "params": params,
                "weight_decay": section.weight_decay if decay else 0.0,
                "lr": section.lr * multiplier,
            }
            for (decay, _, multiplier), params in groups.items()
        ],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        **options,
    )


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
