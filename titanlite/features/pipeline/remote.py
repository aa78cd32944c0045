"""What a pipeline stage has in place of the modules of other stages: their names and shapes, and nothing to compute."""

from typing import Any

import torch
from torch import nn

from titanlite.materialize.layout import leave_elsewhere
from titanlite.materialize.sources import Source


class Elsewhere(nn.Module):
    """Stands for `module`, of which another stage has the values; its parameters and buffers stay on meta.

    All keep their names, and their modules say as before where values come from: the plan, checkpoints and optimizer
    know of the whole model on every rank. `forward` hands its first argument on.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        vars(self).update(vars(module))  # the same dictionaries: a parameter is exchanged in both
        self._original = (module,)  # in a tuple, or it would be a module below this one
        for tensor in [*module.parameters(), *module.buffers()]:
            leave_elsewhere(tensor)

    def declare_sources(self) -> dict[str, Source]:
        (original,) = self._original
        declare: Any = getattr(original, "declare_sources", dict)
        return declare()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return `x` as it is."""
        return x


class ElsewhereLayer(Elsewhere):
    """Stands for a decoder layer."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Return the hidden states as they are, without balance losses."""
        return x, None


class BetweenChunks(ElsewhereLayer):
    """Stands for the first of the layers that other stages have between two chunks of this one."""
