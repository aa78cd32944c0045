"""Results of a layer's forward that are saved for its recomputation in backward, which then reads
them instead of computing them again.
"""

from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

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


@torch.compiler.disable
def save_results(operators: Collection[Any], compute: Callable[..., Any], *operands: Any) -> Any:
    """Return `compute(*operands)`, and save the results of the `operators` that it calls.

    A recomputation calls `compute` again, but takes the saved results instead of running these
    operators. Their backward is torch's own, and reads the saved results.
    """
    with _SaveResults(operators):
        return compute(*operands)


class _SaveResults(TorchDispatchMode):
    def __init__(self, operators: Collection[Any]) -> None:
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compute = partial(func, *args, **(kwargs or {}))
        if func not in self.operators:
            return compute()
        # Autograd attaches its node to the returned tensors. If these tensors were saved, the graph
        # would hold a reference to itself.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, once_per_forward(compute))
