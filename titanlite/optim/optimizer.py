"""The optimizer that the configuration describes, stepped only if the gradients are finite."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from titanlite.base.log import logger
from titanlite.config.schema import OptimizerSection
from titanlite.features.muon.matrix_exchange import AllToAll
from titanlite.features.muon.muon import Muon
from titanlite.optim.adamw import LocalAdamW
from titanlite.optim.parameters import lr_multipliers, muon_matrices

_LEAST_BFLOAT16_LR = 1e-3


def build_optimizer(
    model: nn.Module,
    section: OptimizerSection,
    all_to_all: AllToAll = dist.all_to_all_single,
    group: dist.ProcessGroup | None = None,
) -> LocalAdamW | Muon:
    """The optimizer of the parameters that are trained, with decay on matrices only: not on norms, on other vectors, or
    on biases, also where those of all experts are one matrix.

    `all_to_all` exchanges the matrices of Muon that are split over the ranks of `group` (None: all). Every rank must
    call alike; no collective. What other ranks hold is in the groups too, and is never stepped here.

    Raises:
        ConfigError: `section.lr_multipliers` names nothing that is trained.
    """
    multipliers, matrices = lr_multipliers(model, section), muon_matrices(model, section)
    groups: defaultdict[tuple[bool, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, param in model.named_parameters():
        if param.requires_grad:
            decays = param.dim() >= 2 and not name.endswith("bias")
            groups[param in matrices, decays, multipliers.get(param, 1.0)].append(param)
    if section.lr < _LEAST_BFLOAT16_LR and any(p.dtype == torch.bfloat16 for params in groups.values() for p in params):
        logger.warning(
            "optimizer: a weight in bfloat16 changes by 1/256 of its size or not at all; with optimizer.lr = %g most "
            "never will. Set training.dtype = 'float32'.",
            section.lr,
        )
    of_muon, of_adamw = (
        [
            {
                "params": params,
                "weight_decay": section.weight_decay if decay else 0.0,
                "lr": section.lr * multiplier,
            }
            for (in_muon, decay, multiplier), params in groups.items()
            if in_muon == which
        ]
        for which in (True, False)
    )
    adamw = LocalAdamW(
        of_adamw or [{"params": []}],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=section.implementation == "fused",
        foreach=section.implementation == "foreach",
    )
    if section.name == "AdamW":
        return adamw
    rest = {"momentum": section.momentum, "stacked": matrices, "all_to_all": all_to_all, "group": group}
    return Muon(of_muon or [{"params": []}], adamw, **rest)


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
