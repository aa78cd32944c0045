"""The order of forwards and backwards in one optimizer step."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

from torch import nn

Phase = Literal["forward", "backward"]


class Turn(NamedTuple):
    """What a rank does next: the forward or backward of one of its chunks of layers, for one micro-batch."""

    phase: Phase
    micro_batch: int
    chunk: int


class Schedule:
    """The schedule of a rank that has all layers, in one chunk: each backward follows its forward.

    Attributes:
        group_size: micro-batches that go through the ranks together where there is no backward.
    """

    group_size = 1

    def turns(self, num_micro_batches: int) -> Iterable[Turn]:
        """Yield the forwards and backwards of a step, in order."""
        for number in range(num_micro_batches):
            yield Turn("forward", number, 0)
            yield Turn("backward", number, 0)

    def forwards(self, num_micro_batches: int) -> Iterable[tuple[int, int]]:
        """Yield (micro-batch, chunk) of the forwards without backward, in order."""
        return ((number, 0) for number in range(num_micro_batches))

    def chunk(self, model: nn.Module, chunk: int) -> AbstractContextManager[None]:
        """Restrict forwards of `model` to one chunk, as long as the context is open."""
        return nullcontext()
