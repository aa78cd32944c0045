"""Recordings of the torch calls that make tensors, and their replay.

A class of transformers is built and initialized on meta, without values. Its calls are recorded, so
that their results can be computed later, on the CPU.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from titanlite.materialize.execute import poison_of
from titanlite.materialize.layout import Region
from titanlite.materialize.sources import Recipe

_MOST_TRIED = 1 << 22  # elements; a replay of more calls is not tried before it is needed
_GENERATOR = Lock()  # torch's own is one for all threads
_OVERWRITING = {"zero_", "fill_", "copy_", "normal_", "uniform_"}
UNWRITTEN = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
}
_IN_PLACE = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor")
}
_NO_CALL = {"__get__", "__set__", "requires_grad_", "detach_"}


class View(NamedTuple):
    """What a tensor saw of its storage, of `size` elements in all, at the time of a call."""

    storage: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        storage = tensor.untyped_storage()
        size, offset = storage.nbytes() // tensor.element_size(), int(tensor.storage_offset())
        return cls(storage._cdata, size, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    @property
    def is_whole(self) -> bool:
        return math.prod(self.shape) == self.size


class Call(NamedTuple):
    """A call with views instead of tensors.

    Attributes:
        target: where an operation in place writes.
        reads: storages of which it needs the contents.
        overwrites: all of what it writes to; what was there before does not matter.
    """

    function: Any
    name: str
    args: Any
    kwargs: Any
    results: Any
    target: View | None
    reads: frozenset[int]
    overwrites: bool


class Recording(TorchFunctionMode):
    """Notes of all calls that make tensors or write to them, so that they can be made again with
    real memory.

    While it is `active`, the functions of `transformers.initialization` and `torch.nn.init` leave
    meta tensors alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        # by storage, numbers of calls
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._constants: dict[int, torch.Tensor] = {}  # by storage, contents that no call gave
        self._alive: list[Any] = []  # keeps addresses of storages unique
        self._noting = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Take notes; the generators of the run are as before at the end."""
        from transformers import initialization

        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for name in [
                name
                for name in vars(initialization)
                if name.endswith("_") and not name.startswith("_")
            ]:
                function = getattr(initialization, name)
                setattr(initialization, name, partial(self._initialize, function))
                stack.callback(setattr, initialization, name, function)
            # torch's become those, too
            stack.enter_context(initialization.guard_torch_init_functions())
            self._noting = True
            stack.callback(setattr, self, "_noting", False)
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not self._noting or name in _NO_CALL:
            return func(*args, **kwargs)
        in_place = (
            name == "__setitem__"
            or name in _IN_PLACE
            or (name.endswith("_") and not name.endswith("__"))
        )
        target = args[0] if in_place and args else kwargs.get("out")
        target = target if isinstance(target, torch.Tensor) else None
        return self._note(func, args, kwargs, target, overwrites=name in _OVERWRITING, run=True)

    def _initialize(
        self, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self._noting:
            return self._note(
                function, (tensor, *args), kwargs, tensor, overwrites=True, run=not tensor.is_meta
            )
        return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

    def _note(
        self, function: Any, args: Any, kwargs: Any, target: Any, *, overwrites: bool, run: bool
    ) -> Any:
        self._noting = False  # what the function calls is part of this call
        try:
            taken = _map(self._view, args), _map(self._view, kwargs)
            target = None if target is None else self._view(target)
            overwrites = overwrites and target is not None and target.is_whole
            held = args[1:] if overwrites else args
            reads = [
                tensor
                for tensor in leaves((held, kwargs), torch.Tensor)
                if tensor.layout == torch.strided
            ]
            for tensor in reads:
                self._keep_contents(tensor)
            result = function(*args, **kwargs) if run else args[0]
            views = _map(self._view, result)
        finally:
            self._noting = True
        known = {view.storage for view in leaves(taken, View)}
        writes = (
            {view.storage for view in leaves(views, View)} - known
            if target is None
            else {target.storage}
        )
        for storage in writes:
            self._writers[storage].append(len(self._calls))
        if writes:
            name = getattr(function, "__name__", "")
            read = frozenset(tensor.untyped_storage()._cdata for tensor in reads)
            self._calls.append(
                Call(
                    function,
                    name,
                    taken[0],
                    taken[1],
                    views,
                    target,
                    read,
                    overwrites or target is None,
                )
            )
        return result

    def _view(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return value
        self._alive.append(value.untyped_storage())
        return View.of(value)

    def _keep_contents(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        # Memory that a legacy constructor gave a parameter may be anything.
        is_value = not tensor.is_meta and not isinstance(tensor, torch.nn.Parameter)
        if is_value and key not in self._writers and key not in self._constants:
            self._constants[key] = _flat(tensor.detach()).clone()

    def trace(self, tensor: torch.Tensor) -> "Replay":
        """Return the calls that together make what `tensor` holds, in order."""
        found: dict[int, Call] = {}
        todo = [(tensor.untyped_storage()._cdata, len(self._calls))]
        while todo:
            storage, end = todo.pop()
            for number in reversed(self._writers.get(storage, ())):
                if number >= end:
                    continue
                call = self._calls[number]
                if number not in found:
                    found[number] = call
                    todo += [(read, number) for read in call.reads]
                if call.overwrites:
                    break
        calls = tuple(found[number] for number in sorted(found))
        read = {storage for call in calls for storage in call.reads} & self._constants.keys()
        return Replay(
            calls=calls, view=View.of(tensor), constants={key: self._constants[key] for key in read}
        )


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list) and not isinstance(value, View):
        return tuple(_map(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    return function(value)


def leaves(value: Any, kind: type) -> list[Any]:
    """List all instances of `kind` in nested tuples, lists and dictionaries, in order."""
    found: list[Any] = []
    _map(lambda leaf: found.append(leaf) if isinstance(leaf, kind) else None, value)
    return found


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of `tensor`."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay(Recipe):
    """Results of calls of torch, repeated on the CPU by every rank that holds a part, and then cut.

    The generator is seeded with the seed of the run and the name of the tensor, so all ranks have
    the same bits.
    """

    calls: Sequence[Call]
    view: View
    constants: Mapping[int, torch.Tensor]

    def __str__(self) -> str:
        return "as transformers draws it"

    def _draw(
        self, local: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int, name: str
    ) -> None:
        key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        local.copy_(self.compute(int.from_bytes(key, "big"))[region.slices])

    @torch.no_grad()
    def compute(self, seed: int, filling: float | None = None) -> torch.Tensor:
        """Return the whole tensor, on the CPU. Elements that no call writes are `filling`, or
        poison.
        """
        memory = {key: value.clone() for key, value in self.constants.items()}

        def fresh(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(
                (size,), (poison_of(dtype) or 0) if filling is None else filling, dtype=dtype
            )

        def real(value: Any) -> Any:
            if isinstance(value, View):
                if value.storage not in memory:
                    memory[value.storage] = fresh(value.size, value.dtype)
                # another where complex numbers are seen as pairs
                flat = memory[value.storage].view(value.dtype)
                return flat.as_strided(value.shape, value.stride, value.offset)
            is_device = isinstance(value, torch.device) or (
                isinstance(value, str) and value == "meta"
            )
            return torch.device("cpu") if is_device else value

        with _GENERATOR, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs' too
            for call in self.calls:
                result = call.function(*_map(real, call.args), **_map(real, call.kwargs))
                if call.target is not None:
                    continue
                for view, tensor in zip(
                    leaves(call.results, View), leaves(result, torch.Tensor), strict=True
                ):
                    if view.storage not in memory:
                        made = (
                            fresh(view.size, view.dtype)
                            if call.name in UNWRITTEN
                            else _flat(tensor)
                        )
                        memory[view.storage] = made.to(view.dtype)
        return real(self.view)

    def is_small(self) -> bool:
        views = [view for call in self.calls for view in leaves((call.args, call.results), View)]
        return sum({view.storage: view.size for view in views}.values()) <= _MOST_TRIED
