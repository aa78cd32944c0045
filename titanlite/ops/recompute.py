"""Results of a layer's forward that are saved for its recomputation in backward, which then reads
them instead of computing them again.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

# A list: `once_per_forward` appends values of the running layer to it. An iterator: a recomputation
# reads these values. None: no whole layer is recomputed.
forward_values: ContextVar[list[Any] | Iterator[Any] | None] = ContextVar(
    "forward_values", default=None
)


def once_per_forward(make: Callable[[], Any]) -> Any:
    """Return `make()`, and save the result, which should be small. If a whole layer is recomputed,
    return the saved result instead.

    A tensor is saved detached: gradients flow through the forward's result. Compiled code fuses
    small operations and recomputes them.
    """
    values = None if torch.compiler.is_compiling() else forward_values.get()
    if isinstance(values, Iterator):
        return next(values)
    made = make()
    if values is not None:
        values.append(
            made.detach().requires_grad_(made.requires_grad)
            if isinstance(made, torch.Tensor)
            else made
        )
    return made
