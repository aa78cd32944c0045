"""The optimizer: which part of each parameter this rank updates, and with which random bits."""

import hashlib
import struct
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from titanlite.config.schema import OptimizerSection
from titanlite.features.rounded_adamw.adamw import Rates, adamw_rounded
from titanlite.materialize.layout import Region, local_of, region_of
from titanlite.materialize.plan import clean_name
from titanlite.optim.optimizer import LocalAdamW, group_parameters


class RoundedAdamW(LocalAdamW):
    """AdamW with moments in bfloat16, rounded stochastically, as weights in bfloat16 are.

    A bfloat16 moment that is rounded to nearest does not change if a step changes it by less than
    1/512, as with beta2 = 0.999. The random bits depend on `seed` and the parameters' `names`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        section: OptimizerSection,
        names: dict[nn.Parameter, str],
        seed: int,
    ) -> None:
        super().__init__(groups, replace(section, implementation="fused"))
        self.defaults["state_dtype"] = torch.bfloat16
        self._keys = {param: _make_key(seed, name) for param, name in names.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have a gradient; with `found_inf` = 1 nothing changes."""
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            stepped = [param for param in group["params"] if param.grad is not None]
            if not stepped:
                continue
            steps = [self._state_of(param)["step"] for param in stepped]
            torch._foreach_add_(steps, 1.0 if found_inf is None else 1.0 - found_inf)
            beta1, beta2 = group["betas"]
            rates = Rates(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
            for param in stepped:
                self._step_one(param, found_inf, rates)

    def _state_of(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_of(param).device)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(param, dtype=torch.bfloat16)
        return state

    def _step_one(self, param: nn.Parameter, found_inf: torch.Tensor | None, rates: Rates) -> None:
        """Update this rank's part of one parameter."""
        region = region_of(param)
        shape = tuple(param.shape)
        if len(shape) < 2:  # a vector is one column
            region = Region((*region.starts, 0), (*region.lengths, 1))
            shape = (*shape, 1)
        if not region.numel:
            return
        assert param.grad is not None
        state = self.state[param]
        tensors = (param, param.grad, state["exp_avg"], state["exp_avg_sq"])
        rows = [local_of(tensor).reshape(-1, region.lengths[-1]) for tensor in tensors]
        done = 0
        for start, count in region.row_runs(shape):
            some = [tensor[done : done + count] for tensor in rows]
            done += count
            adamw_rounded(
                *some,
                step=state["step"],
                found_inf=found_inf,
                rates=rates,
                key=self._keys[param],
                first=start * shape[-1] + region.starts[-1],
                row=shape[-1],
            )


def _make_key(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"adamw:{seed}:{name}".encode(), digest_size=8).digest()
    return struct.unpack("<ii", digest)


def build_rounded_adamw(model: nn.Module, section: OptimizerSection, seed: int) -> RoundedAdamW:
    """Build `RoundedAdamW` for the trained parameters; raises as `build_adamw`."""
    _, groups = group_parameters(model, section)
    names = {param: clean_name(name) for name, param in model.named_parameters()}
    return RoundedAdamW(groups, section, names, seed)
