"""Layers that are traced as torch.compile does it, and run without code generation."""

from dataclasses import dataclass

import pytest
import torch

# torch 2.13 warns about its own doing: it reads .grad of gathered parameters and instantiates
# autograd functions.
TORCH_COMPILE_WARNINGS = [
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@dataclass
class Graphs:
    """Of one process: how many graphs were made of the layers, and how often they were called."""

    made: int = 0
    called: int = 0

    def trace(self, module, inputs):
        """A backend for torch.compile: traces forward and backward."""
        self.made += 1
        run = torch._dynamo.lookup_backend("aot_eager")(module, inputs)

        def call(*args):
            self.called += 1
            return run(*args)

        return call
