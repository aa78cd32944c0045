"""AdamW (arXiv:1711.05101) over parameters that may live on two meshes, stepped only if the gradients are finite."""

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from titanlite.config.schema import OptimizerSection
from titanlite.logger import logger
from titanlite.materialize.layout import local_of
from titanlite.optim.parameters import lr_multipliers

_LEAST_BFLOAT16_LR = 1e-3


class LocalAdamW(torch.optim.AdamW):
    """torch's AdamW, computed on this rank's shards; parameters and states stay the DTensors that they are.

    The update of an element needs nothing of other elements, so DTensor has nothing to add. It refuses two meshes in a
    fused call, and to find the layout of the first one's results takes it longer than ten updates of a small model.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill `lists` with the tensors of a group, in the order of the update's arguments; private to torch."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_of(tensor) for tensor in tensors]
        return has_complex


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW of the parameters that are trained, with decay on matrices only: not on norms, on other vectors, or on
    biases, also where those of all experts are one matrix.

    Raises:
        ConfigError: `section.lr_multipliers` names nothing that is trained.
    """
    multipliers = lr_multipliers(model, section)
    groups: defaultdict[tuple[bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups[param.dim() >= 2 and not name.endswith("bias"), multipliers.get(param, 1.0)].append(param)
    if section.lr < _LEAST_BFLOAT16_LR and any(p.dtype == torch.bfloat16 for params in groups.values() for p in params):
        logger.warning(
            "optimizer: a weight in bfloat16 changes by 1/256 of its size or not at all; with optimizer.lr = %g most "
            "never will. Set training.dtype = 'float32'.",
            section.lr,
        )
    options: dict[str, Any] = {
        "fused": section.implementation == "fused",
        "foreach": section.implementation == "foreach",
    }
    return LocalAdamW(
        [
            {
                "params": params,
                "weight_decay": section.weight_decay if decay else 0.0,
                "lr": section.lr * multiplier,
            }
            for (decay, multiplier), params in groups.items()
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
