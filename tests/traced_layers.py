"""Layers that are traced as torch.compile traces them, and run without code generation."""

from dataclasses import dataclass

import pytest
import torch

# torch 2.13 warns about its own operations: it reads .grad of gathered parameters and instantiates
# autograd functions.
TORCH_COMPILE_WARNINGS = [
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@dataclass
class Graphs:
    """Counts, in one process, the graphs of the layers and their calls."""

    made: int = 0
    called: int = 0

    def trace(self, module, inputs):
        """Trace forward and backward, as a backend for torch.compile."""
        self.made += 1
        run = torch._dynamo.lookup_backend("aot_eager")(module, inputs)

        def call(*args):
            self.called += 1
            return run(*args)

        return call
