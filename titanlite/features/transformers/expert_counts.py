"""The expert load of a transformers model, counted where its layers call their experts.

Shapes: B batch, S sequence, T tokens, k experts per token, E experts.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanlite.features.transformers.experts import SENT
from titanlite.materialize.recipes import Zeros
from titanlite.materialize.sources import Init, Source
from titanlite.models.moe import count_rows


class TransformersExpertCounter(nn.Module):
    """Counts the rows that a layer's router gives to each expert; an `ExpertCounter`.

    A hook before the experts' forward sees what the router chose, whatever implementation computes the experts then.
    It lies outside of what tensor parallelism makes of that forward, so it sees the tokens of all tp ranks.

    Args:
        experts: a module that transformers' experts interface serves. It becomes no submodule.

    Attributes:
        tokens_per_expert: (E,) int64, not saved; overwritten, never added to, so that a second run under activation
            checkpointing changes nothing.
        tp_share: rank and size of the axis whose ranks hold the same tokens; each counts its part of them.
        first_expert: which of all experts is the first one on this rank.
    """

    tokens_per_expert: torch.Tensor

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._experts = [experts]
        counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=next(experts.parameters()).device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.tp_share: tuple[int, int] = (0, 1)
        self.first_expert = 0
        self._valid_T: torch.Tensor | None = None
        experts.register_forward_pre_hook(self._count, with_kwargs=True)

    def declare_sources(self) -> dict[str, Source]:
        return {"tokens_per_expert": Init(Zeros())}

    def begin(self, valid_BS: torch.Tensor | None) -> None:
        """A forward in training mode begins. Of tokens in other numbers than `valid_BS` has, all are counted.

        The mask stays, for recomputation in backward counts once more.
        """
        self._valid_T = None if valid_BS is None else valid_BS.flatten()
        self.tokens_per_expert.zero_()  # a class may leave some experts out, such as those for images

    @torch.no_grad()
    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not module.training:
            return
        num_experts, (rank, size) = self.tokens_per_expert.numel(), self.tp_share
        ids_Tk = (args[1] if len(args) > 1 else kwargs["top_k_index"]).flatten(0, -2).to(torch.int64)
        ids_Tk = ids_Tk.clamp(max=num_experts)  # there are classes whose tokens may choose to skip all experts
        if self._valid_T is not None and self._valid_T.numel() == ids_Tk.shape[0]:
            ids_Tk = ids_Tk.masked_fill(~self._valid_T.unsqueeze(-1), num_experts)
        share = -(-ids_Tk.shape[0] // size)
        counts = count_rows(ids_Tk[rank * share : (rank + 1) * share], num_experts + 1)
        self.tokens_per_expert.copy_(counts[:num_experts])

    @property
    def chosen_rows(self) -> torch.Tensor | None:
        """Rows that were given to the token dispatcher; None without one."""
        return getattr(self._experts[0], SENT, (None, None))[0]

    @property
    def row_ends(self) -> torch.Tensor | None:
        """What this rank's experts got of them; None without a dispatcher."""
        return getattr(self._experts[0], SENT, (None, None))[1]


def build_counters(experts: Mapping[str, nn.Module]) -> dict[int, TransformersExpertCounter]:
    """A counter for each module of experts, by the number of its layer, which its name tells; else 0, 1, ...

    None if layers have other numbers of experts than others: one table is to hold all counts.
    """
    if len({getattr(module, "num_experts", 0) for module in experts.values()}) != 1:
        return {}
    numbers = [int(found[1]) for name in experts if (found := re.search(r"\.(\d+)\.", name))]
    if len(set(numbers)) < len(experts):
        numbers = list(range(len(experts)))
    return dict(zip(numbers, map(TransformersExpertCounter, experts.values()), strict=True))
