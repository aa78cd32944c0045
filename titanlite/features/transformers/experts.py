"""titanlite's grouped GEMM for transformers' own mixture-of-experts models:
`use_titanlite_experts(model)`.

transformers' experts interface calls a registered function with the module that holds the fused
weights, the tokens, and the router's choice. Every case of the interface is supported: gated or
not, biases, transposed weights, expert parallelism's ids beyond the last expert, and a norm after
the experts. The load of the experts is counted at the call of the module, independent of the
implementation.

Shapes: B batch, S sequence, T tokens, k experts per token, E experts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.checkpoint.bias import is_bias
from titanlite.materialize.sources import Init, Source, Zeros
from titanlite.models.moe import dispatch_locally
from titanlite.ops import grouped_gemm, local_tensor, permute_tokens, unpermute_sum
from titanlite.ops.moe_experts import Exchange, moe_experts
from titanlite.ops.routing import count_rows

NAME = "titanlite"
DISPATCH = "titanlite_dispatch"  # attribute of an experts module: its token dispatcher


def use_titanlite_experts(model: Any) -> None:
    """Run the experts of a transformers model on titanlite's grouped GEMM from the next forward on.

    Raises ValueError: the model's class does not allow its experts to be replaced.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)
    model.set_experts_implementation(NAME)


def find_experts(model: Any) -> dict[str, nn.Module]:
    """Return the modules with fused expert weights that transformers' experts interface supports,
    by name.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed")
        and hasattr(module, "has_gate")
        and hasattr(module, "num_experts")
    }


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the forward of an experts module of transformers: (T, D), (T, k), (T, k) -> (T, D).

    With a token dispatcher, set by `distributed.apply_expert_parallel`, tokens are sent to the
    ranks of their experts.
    """
    dispatch: Any = getattr(self, DISPATCH, dispatch_locally)
    return dispatch(_HeldExperts(self), hidden_states, top_k_weights, top_k_index)


class _HeldExperts:
    """The experts that this rank holds, with the call signature of titanlite's `Experts`.

    Attributes:
        num_experts: number of experts on all ranks together.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.num_experts = module.down_proj.shape[0]

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        token: torch.Tensor,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        exchange: Exchange | None = None,
    ) -> torch.Tensor:
        """Apply the experts to rows grouped by expert (a token of `x` and its router weight);
        return the sum of each token's rows.
        """
        module = self._module
        dtype = x.dtype
        if is_plain_swiglu(module) and not _adapted(module):
            gate_up = local_tensor(module.gate_up_proj)
            down = local_tensor(module.down_proj)
            if module.is_transposed:
                gate_up = gate_up.mT
                down = down.mT
            return moe_experts(
                x, gate_up, down, weight.float(), token, rows, offsets, exchange=exchange
            )
        x = permute_tokens(x, token, rows)
        index = torch.arange(x.shape[0], device=x.device)
        ids = torch.searchsorted(offsets, index.to(offsets.dtype), right=True).clamp(
            max=offsets.numel() - 1
        )
        x = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", x, ids, offsets)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = _linear(module, "down_proj", x, ids, offsets)
        if getattr(module, "has_post_expert_norm", False):
            x = module.post_expert_norm(x)
        # Rows of no local expert are zero, but a bias, a norm or an activation of zero need not be.
        x = torch.where((index < offsets[-1]).unsqueeze(-1), x * weight.unsqueeze(-1), 0.0)
        return unpermute_sum(x.to(dtype), token, rows)


def is_plain_swiglu(module: Any) -> bool:
    """Return True if one operator of titanlite computes these experts."""
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    return (
        module.has_gate
        and module.is_concatenated
        and not module.has_bias
        and not getattr(module, "has_post_expert_norm", False)
        # The interface's function for classes without their own gate; if it is missing, use the
        # general case.
        and type(module)._apply_gate is getattr(moe, "_default_apply_gate", None)
        and isinstance(module.act_fn, nn.SiLU | SiLUActivation)
    )


def _adapted(module: Any) -> frozenset[str]:
    """Return the weights to which `features.lora` has attached adapters that are enabled."""
    return module.adapted if getattr(module, "adapter_enabled", False) else frozenset()


def add_correction(
    module: Any, name: str, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return `y` plus the product of `x` and the adapters of the experts' weight `name`, if it has
    adapters.
    """
    if name not in _adapted(module):
        return y
    prefix = name.removesuffix("proj")
    backend: Any = getattr(module, "grouped_gemm_backend", "auto")
    x = F.dropout(x, module.dropout, module.training) if module.dropout else x
    for matrix in ("lora_A", "lora_B"):
        weight = local_tensor(getattr(module, f"{prefix}{matrix}")).to(x.dtype)
        x = grouped_gemm(x, weight.mT, offsets, backend)
    return y + x * module.scaling


def _linear(
    module: Any, name: str, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    weight = local_tensor(getattr(module, name))
    y = grouped_gemm(x, weight if module.is_transposed else weight.mT, offsets)
    y = add_correction(module, name, x, y, offsets)
    if not module.has_bias:
        return y
    # In float32: the gradient is a sum over an expert's rows, which CUDA accumulates in this dtype.
    bias = local_tensor(getattr(module, name + "_bias")).float()
    return y + bias.index_select(0, ids).to(y.dtype)


@dataclass(frozen=True)
class TransformersRouter:
    """A router of transformers that chooses experts by score plus bias; holds the bias."""

    module: nn.Module
    name: str  # of the bias

    @property
    def expert_bias(self) -> torch.Tensor:
        """The bias, (E,) float32."""
        return getattr(self.module, self.name)

    @property
    def weight(self) -> torch.Tensor:
        """The first parameter of the router; it is frozen if the router is."""
        return next(self.module.parameters())


class TransformersMoE(NamedTuple):
    """The parts of an MoE layer that balancing uses."""

    gate: TransformersRouter


def find_router(model: nn.Module, path: str, experts: nn.Module) -> TransformersRouter | None:
    """Return the router of the `experts` at `path` of `model`, if it has a bias that is only used
    to choose experts. The router is the module around the experts, or next to them.
    """
    size = (getattr(experts, "num_experts", 0),)
    for module in model.get_submodule(path.rpartition(".")[0]).modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_bias(name) and buffer.shape == size:
                return TransformersRouter(module, name)
    return None


class TransformersExpertCounter(nn.Module):
    """Counts the rows that a layer's router gives to each expert; an `ExpertCounter`.

    A hook before the experts' forward reads the router's choice, whatever implementation then
    computes the experts.

    Args:
        experts: a module that transformers' experts interface supports. It is not registered as a
            submodule.

    Attributes:
        tokens_per_expert: (E,) int64, not saved; overwritten, never added to, so that a second run
            under activation checkpointing changes nothing.
    """

    tokens_per_expert: torch.Tensor

    def __init__(self, experts: Any) -> None:
        super().__init__()
        counts = torch.zeros(
            experts.num_experts, dtype=torch.int64, device=next(experts.parameters()).device
        )
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self._valid_T: torch.Tensor | None = None
        experts.register_forward_pre_hook(self._count, with_kwargs=True)

    def declare_sources(self) -> dict[str, Source]:
        return {"tokens_per_expert": Init(Zeros())}

    def begin(self, valid_BS: torch.Tensor | None) -> None:
        """Begin a forward in training mode. If `valid_BS` has a different number of tokens than the
        experts get, all tokens are counted.

        The mask is stored, because recomputation in backward counts again.
        """
        self._valid_T = None if valid_BS is None else valid_BS.flatten()
        # a class may not run some experts, such as those for images
        self.tokens_per_expert.zero_()

    @torch.no_grad()
    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not module.training:
            return
        num_experts = self.tokens_per_expert.numel()
        ids_Tk = (args[1] if len(args) > 1 else kwargs["top_k_index"]).flatten(0, -2)
        if self._valid_T is not None and self._valid_T.numel() == ids_Tk.shape[0]:
            ids_Tk = ids_Tk.masked_fill(~self._valid_T.unsqueeze(-1), num_experts)
        # In some classes, tokens may choose to skip all experts.
        ids = ids_Tk.flatten().to(torch.int64).clamp(max=num_experts)
        self.tokens_per_expert.copy_(count_rows(ids, num_experts))


def build_counters(experts: Mapping[str, nn.Module]) -> dict[int, TransformersExpertCounter]:
    """Return a counter for each module of experts, by the layer number in its name, or else by 0,
    1, ...

    None if layers differ in their number of experts, because one table holds all counts.
    """
    if len({getattr(module, "num_experts", 0) for module in experts.values()}) != 1:
        return {}
    numbers = [int(found[1]) for name in experts if (found := re.search(r"\.(\d+)\.", name))]
    if len(set(numbers)) < len(experts):
        numbers = list(range(len(experts)))
    return dict(zip(numbers, map(TransformersExpertCounter, experts.values()), strict=True))
