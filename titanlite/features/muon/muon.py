"""Muon (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982): momentum steps made orthogonal, for the matrices
of decoder layers; AdamW for all else.

Shape suffixes: N matrices of R rows and C columns.
"""

from functools import reduce
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.schema import OptimizerSection
from titanlite.features.muon.matrix_exchange import AllToAll, MatrixExchange
from titanlite.materialize.layout import is_elsewhere, local_of
from titanlite.models.interface import Model
from titanlite.ops.kernels import kernel_device
from titanlite.optim.optimizer import LocalAdamW, build_adamw, group_parameters

MOMENTUM = "momentum_buffer"

# Iterations of an odd polynomial a x + b x^3 + c x^5 that drive every singular value to about 1 (0.7 to 1.2).
_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
# An orthogonal step of R x C has entries of 1 / sqrt(max(R, C)) in the quadratic mean; AdamW's have about 0.2, so that
# learning rate and weight decay are those of AdamW (arXiv:2502.16982, eq. 4).
_RMS = 0.2


def orthogonalize(x_NRC: torch.Tensor) -> torch.Tensor:
    """About U V^T of every matrix U S V^T, by Newton-Schulz iterations in the dtype of `x_NRC`; zeros stay zeros."""
    x_NRC = x_NRC / (torch.linalg.matrix_norm(x_NRC, keepdim=True) + 1e-7)
    is_tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    if is_tall:
        x_NRC = x_NRC.mT
    for _ in range(_STEPS):
        gram_NRR = x_NRC @ x_NRC.mT
        poly_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=_B, alpha=_C)
        x_NRC = torch.baddbmm(x_NRC, poly_NRR, x_NRC, beta=_A)
    return x_NRC.mT if is_tall else x_NRC


def build_muon(
    model: Model,
    section: OptimizerSection,
    all_to_all: AllToAll = dist.all_to_all_single,
    group: dist.ProcessGroup | None = None,
) -> "Muon":
    """Muon of the matrices of `muon_matrices`, with AdamW for the other parameters that are trained.

    `all_to_all` exchanges the matrices that are split over the ranks of `group` (None: all). Every rank must call
    alike; no collective. What other ranks hold is in the groups too, and is never stepped here. A ConfigError:
    `section.lr_multipliers` names nothing that is trained.
    """
    matrices = muon_matrices(model, section)
    groups, rest = group_parameters(model, section, matrices)
    options = {"momentum": section.momentum, "stacked": matrices, "all_to_all": all_to_all, "group": group}
    return Muon(groups or [{"params": []}], build_adamw(rest, section), **options)


def muon_matrices(model: Model, section: OptimizerSection) -> dict[nn.Parameter, int]:
    """Return the trained parameters that Muon steps, each with the number of matrices in its rows; none for AdamW.

    Embedding, output head, norms, biases and what lies outside of layers are AdamW's (arXiv:2502.16982, 2.1).
    """
    if section.name != "Muon":
        return {}
    found: dict[nn.Parameter, int] = {}
    for layer in model.all_layers():
        experts = {id(param) for module in model.experts_in(layer) for param in module.parameters()}
        for module in layer.modules():
            if isinstance(module, nn.Embedding):
                continue
            for name, param in module.named_parameters(recurse=False):
                is_matrix = param.dim() == 2 and not name.endswith("bias")
                if param.requires_grad and (is_matrix if id(param) not in experts else param.dim() == 3):
                    found[param] = _get_num_stacked(module, name)
    return found


def _get_num_stacked(module: nn.Module, name: str) -> int:
    """Return how many matrices are stacked in the rows of a parameter."""
    if hasattr(module, "stacked_matrices"):
        return cast(dict[str, int], module.stacked_matrices).get(name, 1)
    # What transformers' experts say of themselves.
    layout = [getattr(module, attribute, None) for attribute in ("has_gate", "is_concatenated", "is_transposed")]
    return 2 if name == "gate_up_proj" and layout == [True, True, False] else 1


class Muon(torch.optim.Optimizer):
    """One optimizer of two: Muon for the matrices in `groups`, and `adamw` for its own parameters.

    `param_groups` and `state` hold those of both. A matrix that is split over ranks is put together on one of them
    (`MatrixExchange`), so the step is that of one process on any mesh, up to rounding.

    Args:
        momentum: of Nesterov's kind.
        stacked: for some parameters, of how many matrices each of theirs consists: gate and up projection are two.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        adamw: LocalAdamW,
        *,
        momentum: float,
        stacked: dict[nn.Parameter, int],
        all_to_all: AllToAll,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            groups, {"state_names": (MOMENTUM,), "lr": 0.0, "weight_decay": 0.0, "fused": adamw.defaults["fused"]}
        )
        self._adamw, self._momentum = adamw, momentum
        all_params = ((param, group) for group in self.param_groups for param in group["params"])
        self._params = [(param, group) for param, group in all_params if not is_elsewhere(param)]
        self.param_groups += adamw.param_groups  # the same dictionaries: a scheduler sets the rates of both
        adamw.state = self.state
        self._stacked = [stacked.get(param, 1) for param, _ in self._params]
        self._exchange = MatrixExchange([param for param, _ in self._params], self._stacked, all_to_all, group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all parameters that have a gradient; with `found_inf` = 1 nothing changes. Collectives: those of
        `MatrixExchange.apply` for each of its buckets.
        """
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        keep = None if found_inf is None else found_inf.to(torch.bool)
        dtype = _get_dtype([param for param, _ in self._params])
        for bucket, numbers in enumerate(self._exchange.buckets):
            steps = {number: self._take_momentum(self._params[number][0], keep, dtype) for number in numbers}
            self._exchange.apply(bucket, steps, orthogonalize)
            for number, step in steps.items():
                self._move(number, step, keep)

    def _take_momentum(self, param: nn.Parameter, keep: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        local = local_of(param)
        if not self._is_stepped(param):  # no other rank has a gradient, either, but all take part
            return torch.zeros_like(local, dtype=dtype)
        state = self.state[param]
        grad = torch.zeros_like(local) if param.grad is None else local_of(param.grad)
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(param)
        buffer = local_of(state[MOMENTUM])
        new = torch.add(grad, buffer, alpha=self._momentum)
        buffer.copy_(new if keep is None else torch.where(keep, buffer, new))
        return torch.add(grad, new, alpha=self._momentum).to(dtype)

    def _is_stepped(self, param: nn.Parameter) -> bool:
        """Return True if the parameter has or ever had a gradient; equal on all ranks that hold pieces of it."""
        return param.grad is not None or param in self.state

    def _move(self, number: int, step: torch.Tensor, keep: torch.Tensor | None) -> None:
        param, group = self._params[number]
        if not self._is_stepped(param):
            return
        local, lr = local_of(param), group["lr"]
        longer = max(param.shape[-2] // self._stacked[number], param.shape[-1])
        moved = torch.add(local * (1 - lr * group["weight_decay"]), step, alpha=-lr * _RMS * longer**0.5)
        local.copy_(moved if keep is None else torch.where(keep, local, moved))


def _get_dtype(params: list[nn.Parameter]) -> torch.dtype:
    """bfloat16 on CUDA, where it takes half the time to compute and to send and is as good; else the parameters'."""
    if any(kernel_device(param.device) == "cuda" for param in params):
        return torch.bfloat16
    return reduce(torch.promote_types, (param.dtype for param in params), torch.bfloat16)
