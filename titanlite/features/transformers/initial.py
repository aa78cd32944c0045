"""Initial values of transformers' classes, computed by their own code.

A model is built on meta. Only small tensors that constructors compute are real, so their values are
known. `Notes` records the calls of `transformers.initialization`: a parameter that one plain call
draws gets an initializer. Any other parameter is drawn by `Units`: transformers' own
`_init_weights` runs on one repeated layer at a time, on the CPU, and each rank cuts its shard from
the result. Buffers are small, so they are computed at once.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titanlite.features.transformers.probes import repeated_layers
from titanlite.materialize import Alias, Compute, Constant, Init, Normal, Recipe, Source, Uniform
from titanlite.materialize.execute import exchange, poison_of
from titanlite.materialize.layout import Region

_MOST_REAL = 1 << 22  # most elements of a real tensor from a constructor; larger ones stay on meta
_EMPTY = ("empty", "empty_strided", "empty_permuted")
_FILLED = ("zeros", "ones", "full", "rand", "randn")
_RECIPES: dict[str, Callable[..., Recipe]] = {
    "normal_": lambda mean=0.0, std=1.0: Normal(mean=float(mean), std=float(std)),
    "uniform_": lambda a=0.0, b=1.0: Uniform(low=float(a), high=float(b)),
    "constant_": lambda val: Constant(value=float(val)),
    "zeros_": lambda: Constant(value=0.0),
    "ones_": lambda: Constant(value=1.0),
}


class Notes(TorchFunctionMode):
    """Record of how the parameters of a model on meta are drawn, while its constructors and
    `_init_weights` run.

    Attributes:
        values: values that constructors gave to tensors, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, torch.Tensor] = {}
        # By storage address: the storage (held, so that the address stays unique), and the last
        # write.
        self._writes: dict[int, tuple[Any, Recipe | None, tuple[int, ...]]] = {}

    def recipe_of(self, tensor: torch.Tensor) -> Recipe | None:
        """Return the initializer that draws `tensor`; None if one plain call does not suffice."""
        _, recipe, shape = self._writes.get(_key(tensor), (None, None, ()))
        return recipe if shape == tensor.shape else None

    def take_values(self, model: Any) -> None:
        """Move every tensor of `model` to meta, and store the values that constructors computed in
        `values`.
        """
        for name, tensor in named_own(model):
            if not tensor.is_meta:
                self.values[name] = tensor.data
                exchange(tensor, tensor.data.to("meta"))

    def begin(self, name: str, tensor: torch.Tensor, filling: float) -> torch.Tensor:
        """Return `tensor` as its constructor leaves it, on the CPU; `filling` in elements that are
        not set.
        """
        if name in self.values:
            return self.values[name].to(tensor.dtype, copy=True)
        return torch.full(tensor.shape, filling, dtype=tensor.dtype)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record while the context is open. Models that are built inside have their parameters on
        meta, not initialized and not tied. Random generators are restored at the end.
        """
        from transformers import PreTrainedModel, initialization

        with ExitStack() as stack:

            def patch(owner: Any, name: str, function: Any) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, function)

            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(initialization.no_tie_weights())
            patch(PreTrainedModel, "initialize_weights", lambda model: None)
            for name in (*initialization.TORCH_INIT_FUNCTIONS, "copy_"):
                function = partial(self._initialize, getattr(initialization, name))
                patch(initialization, name, function)
            # torch's initialization functions become those of transformers
            stack.enter_context(initialization.guard_torch_init_functions())
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if kwargs.get("device") is None and name in (*_EMPTY, *_FILLED):
            made = func(*args, **{**kwargs, "device": "meta"})
            if name in _EMPTY or made.numel() > _MOST_REAL:
                return made
        is_write = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
        if is_write and name != "requires_grad_" and args and isinstance(args[0], torch.Tensor):
            self._writes.pop(_key(args[0]), None)  # not `transformers.initialization`
        return func(*args, **kwargs)

    def _initialize(self, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        key = _key(tensor)
        name = function.__name__
        storage = tensor.untyped_storage()
        _, before, shape = self._writes.get(key, (None, None, ()))
        recipe = None
        if all(isinstance(value, int | float) for value in (*args, *kwargs.values())):
            recipe = _RECIPES[name](*args, **kwargs) if name in _RECIPES else None
        if tensor.numel() * tensor.element_size() == storage.nbytes():
            shape = tuple(tensor.shape)
        else:
            is_row = shape[1:] == tensor.shape and tensor.is_contiguous()
            row = int(tensor.storage_offset()) // max(tensor.numel(), 1)
            is_zero = is_row and recipe == Constant(value=0.0)
            recipe = None
            if is_zero and before is not None and before.zero_row in (None, row):
                recipe = replace(before, zero_row=row)
        self._writes[key] = (storage, recipe, shape)
        return tensor


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def named_own(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List parameters and buffers with their names, each one once."""
    return [*model.named_parameters(), *model.named_buffers()]


@torch.no_grad()
def find_sources(
    model: Any, notes: Notes, build: Callable[[], tuple[Any, Notes]]
) -> dict[str, Source]:
    """Return a source for every tensor of the transformers `model` that its own code determines.

    Ties, from `_tied_weights_keys`, are an `Alias`. Parameters get a layout-invariant `Init`.
    Buffers get a `Compute` with the values of `from_pretrained`, bit for bit; a buffer that is
    drawn at random, or not written, has no source.

    Args:
        model: a `PreTrainedModel` on meta, not yet sharded, because `_init_weights` checks class
            names, which sharding changes. Not yet tied either, because transformers draws before it
            ties.
        notes: recorded while it was built.
        build: builds it again, with parameters in float32.
    """
    buffers = dict(model.named_buffers())
    found: list[dict[str, torch.Tensor]] = []
    failed: set[torch.Tensor] = set()
    for seed in (0, 1):  # random or unwritten values differ between the two runs
        for name, buffer in buffers.items():
            exchange(buffer, notes.begin(name, buffer, filling=seed))
        with notes.active():
            torch.default_generator.manual_seed(seed)
            for module, initialize in initializers(model):
                try:
                    initialize(module)
                except Exception:  # noqa: BLE001 - of any class; it asks parameters for values
                    failed.update(tensor for _, tensor in named_own(module))
        found.append({name: buffer.data for name, buffer in buffers.items()})
        for buffer in buffers.values():
            exchange(buffer, buffer.data.to("meta"))
    sources: dict[str, Source] = {
        name: Compute(_give(value), dtype=value.dtype)
        for name, value in found[0].items()
        if buffers[name] not in failed and torch.equal(value, found[1][name])
    }
    units = Units(build, find_units(model))
    ties: dict[str, str] = model.all_tied_weights_keys
    for name, param in model.named_parameters():
        if name not in ties:
            recipe = None if param in failed else notes.recipe_of(param)
            sources[name] = Init(recipe or units.add(name))
    return sources | {name: Alias(target) for name, target in ties.items()}


def _give(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    def give() -> torch.Tensor:
        return value

    give.__name__ = "as transformers does"  # shown in the plan
    return give


def initializers(model: Any) -> Iterator[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Yield every module once, with the `_init_weights` of the nearest model around it; children
    first, as in transformers.
    """
    from transformers import PreTrainedModel

    seen: set[nn.Module] = set()

    def walk(module: nn.Module, initialize: Any) -> Iterator[tuple[nn.Module, Any]]:
        for child in module.children():
            own = child._init_weights if isinstance(child, PreTrainedModel) else initialize
            yield from walk(child, own)
        if module not in seen:
            seen.add(module)
            yield module, initialize

    yield from walk(model, model._init_weights)


def find_units(model: Any) -> dict[str, str]:
    """Return, for each module and tensor inside a repeated layer, the name of that layer."""
    layers = set(repeated_layers(model))
    return {
        f"{prefix}.{name}" if name else prefix: prefix
        for prefix, layer in model.named_modules()
        if layer in layers
        for name, _ in [*layer.named_modules(), *named_own(layer)]
    }


class Units:
    """Draws one unit of a model at a time: a repeated layer, or everything outside of them.

    A rank that holds a part of a unit draws whole tensors, in float32 on the CPU, but only the
    unit's tensors without an initializer. It holds at most two units: 2.5 GB each for layers of
    Qwen3-30B-A3B, if their experts had no initializer. The values depend only on the seed and the
    name of the unit, so all ranks have the same bits.
    """

    def __init__(self, build: Callable[[], tuple[Any, Notes]], unit_of: Mapping[str, str]) -> None:
        self._build = build
        self._unit_of = unit_of
        self._members: defaultdict[str, list[str]] = defaultdict(list)  # tensors of each unit
        self._lock = Lock()  # torch's generator is shared by all threads
        self._built: tuple[Any, Notes] | None = None
        self._seed: int | None = None
        self._drawn: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, tensor: str) -> "UnitDraw":
        """Add `tensor` to the tensors that are drawn with its unit; return the initializer that
        draws it.
        """
        unit = self._unit_of.get(tensor, "")
        self._members[unit].append(tensor)
        return UnitDraw(units=self, unit=unit, tensor=tensor)

    def take(self, unit: str, tensor: str, seed: int) -> torch.Tensor:
        """Return the whole tensor in float32, with poison in elements that the class does not
        write.

        A tensor is returned once, so that it does not stay in memory; a second call draws the unit
        again.
        """
        with self._lock, torch.random.fork_rng(devices=[]):
            if self._seed != seed or self._built is None:
                _seed_by(f"{seed}")  # constructors draw too
                self._built = self._build()
                self._seed = seed
                self._drawn = {}
            if tensor not in self._drawn.get(unit, ()):
                # The previous unit is kept beside the new one, because threads may need two units
                # at the same time.
                self._drawn = dict([*self._drawn.items()][-1:])
                _seed_by(f"{seed}:{unit}")
                self._drawn[unit] = self._draw(unit, *self._built)
            return self._drawn[unit].pop(tensor)

    @torch.no_grad()
    def _draw(self, unit: str, model: Any, notes: Notes) -> dict[str, torch.Tensor]:
        params = {name: model.get_parameter(name) for name in self._members[unit]}
        for name, param in params.items():
            exchange(param, notes.begin(name, param, filling=poison_of(param.dtype) or 0))
        names = {module: name for name, module in model.named_modules()}
        inside = [
            (module, initialize)
            for module, initialize in initializers(model)
            if self._unit_of.get(names[module], unit) == unit
        ]
        for module, _ in inside:
            _construct(module)
        for module, initialize in inside:
            initialize(module)
        drawn = {name: param.data for name, param in params.items()}
        for param in params.values():
            exchange(param, param.data.to("meta"))
        return drawn


def _seed_by(key: str) -> None:
    """Seed only the CPU's generator; `torch.manual_seed` would seed the GPUs' generators too."""
    digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest, "big"))


def _construct(module: Any) -> None:
    """Draw the tensors that the constructor of a torch module draws."""
    if type(module).__module__.startswith("torch."):
        for name in ("reset_parameters", "_reset_parameters"):
            getattr(module, name, lambda: None)()


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitDraw(Recipe):
    """A tensor of a unit that transformers draws, cut to the shard."""

    units: Units
    unit: str
    tensor: str

    def __str__(self) -> str:
        return "as transformers draws it"

    def _draw(
        self, local: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int, name: str
    ) -> None:
        local.copy_(self.units.take(self.unit, self.tensor, seed)[region.slices])
