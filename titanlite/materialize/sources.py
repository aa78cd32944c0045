"""Sources: where the value of a tensor comes from. Every tensor has exactly one.

Who says so, strongest first:

1. a tensor that is not on meta keeps its value (`Keep`);
2. the `sources` given to `materialize`: a checkpoint, or claims by name or pattern; two claims are an error;
3. the declaration of the module that owns the tensor (`declare_sources`); two declarations are an error.

A tied tensor is one tensor with several names: the first name is filled, the others are `Alias`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol

import torch
from torch import nn

from titanlite.materialize.layout import Encoding, Region
from titanlite.materialize.recipes import Recipe


@dataclass(frozen=True)
class Init:
    """A draw by a recipe from the layout-invariant generator."""

    recipe: Recipe
    may_be_absent: bool = False  # a checkpoint need not have the tensor; then the recipe is used
    dtype: torch.dtype | None = None  # that the tensor must have, whatever the model is cast to

    def __str__(self) -> str:
        return f"init {self.recipe}"


@dataclass(frozen=True)
class Compute:
    """A pure function of the configuration (rotary frequencies, position ids)."""

    function: Callable[[], torch.Tensor]  # returns the whole tensor on CPU; called once per rank
    dtype: torch.dtype | None = None  # as of `Init`

    def __str__(self) -> str:
        return f"compute {getattr(self.function, '__name__', 'function')}"


@dataclass(frozen=True)
class Alias:
    """Tied: the same tensor object as `target`. Never a comparison of values, which on meta would be nonsense."""

    target: str

    def __str__(self) -> str:
        return f"alias of {self.target}"


@dataclass(frozen=True)
class Keep:
    """A tensor that was never on meta; its value is preserved bit for bit."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True)
class ReadRequest:
    """One read: `region` of tensor `name`, encoded if need be, goes into `destination`, which is contiguous."""

    name: str
    region: Region
    destination: torch.Tensor
    encoding: Encoding | None = None


class TensorReader(Protocol):
    """A store of named tensors that can read parts of them; `name` is for messages."""

    name: str
    proves_coverage: bool  # `read` checks, before it reads, that it will write every element of each destination

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Write every requested region into its destination, cast to its dtype or encoded."""


@dataclass(frozen=True)
class Read:
    """Read from a checkpoint; all reads of one reader are handed over together, to be sorted by file offset."""

    reader: TensorReader
    name: str
    shape: tuple[int, ...]
    keeps_float32: bool = False  # stored in float32 among tensors of fewer bits, and saved so again

    def __str__(self) -> str:
        return f"checkpoint {self.reader.name}:{self.name}"


Source = Init | Compute | Alias | Keep | Read


@dataclass(frozen=True)
class Unfit:
    """A claim that cannot be used: the provider's tensor of this name does not fit. The plan lists `reason`."""

    reason: str


@dataclass(frozen=True)
class TensorInfo:
    """Facts about a tensor for its source; `shape` is the global one, `module` holds the tensor."""

    fqn: str
    kind: Literal["parameter", "buffer"]
    persistent: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: nn.Module


class SourceProvider(Protocol):
    """A claimant of sources for tensors, by their names; `name` is for messages."""

    name: str
    complete: bool  # it must cover every persistent tensor that does not declare `may_be_absent`

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source | Unfit]]:
        """Claim (fully qualified name, source). Unknown names and double claims are reported as such."""
        ...


class Patterns:
    """Claims by exact name or shell pattern: `{"*.bias": Init(Zeros())}`. One that matches nothing is an error."""

    def __init__(self, claims: Mapping[str, Source]) -> None:
        self.name, self.complete, self._claims = "sources", False, claims

    def __call__(self, tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, Source]]:
        for pattern, source in self._claims.items():
            names = [fqn for fqn in tensors if fqn == pattern or fnmatchcase(fqn, pattern)]
            yield from ((name, source) for name in names or [pattern])
