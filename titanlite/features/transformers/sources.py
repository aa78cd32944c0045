"""Sources of a transformers model's tensors, found by asking its own initialization, on meta.

transformers says per module, in `_init_weights`, how parameters are drawn and buffers are computed. Here it runs with
its writing functions replaced by ones that take notes: parameters stay on meta and get a recipe; buffers are small, so
they are computed on the CPU. What `_init_weights` does not write has no source, and the plan fails with its name.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from titanlite.materialize.recipes import Constant, Normal, Recipe, TruncatedNormal, Uniform
from titanlite.materialize.sources import Alias, Compute, Init, Source


def find_sources(model: Any) -> dict[str, Source]:
    """A source for every tensor of the transformers `model` that its own initialization determines.

    Parameters get layout-invariant `Init` recipes of the distributions that transformers uses; buffers a `Compute` with
    the values of `from_pretrained`, bit for bit; ties, from `_tied_weights_keys`, an `Alias`.

    A buffer counts as written if two runs over different fillings leave the same in it: an element that they leave
    alone, or draw at random, differs.

    Args:
        model: a `PreTrainedModel` on meta, not yet sharded: `_init_weights` looks at class names, which sharding
            changes. It is given back as it came.
    """
    sources: dict[str, Source] = {name: Alias(target) for name, target in model.all_tied_weights_keys.items()}
    params = {name: param for name, param in model.named_parameters() if param.is_meta}
    notes: dict[int, list[Recipe | None]] = {id(param): [] for param in params.values()}
    with _noting(notes):
        first, second = _computed_buffers(model, one=False), _computed_buffers(model, one=True)
    for name, param in params.items():
        # Both runs took the same notes.
        recipe = _combined(notes[id(param)][: len(notes[id(param)]) // 2])
        if recipe is not None:
            sources[name] = Init(recipe)
    for name, value in first.items():
        if torch.equal(value, second[name]):  # False where there is NaN
            sources[name] = Compute(_Value(value), dtype=value.dtype)
    return sources


@torch.no_grad()
def _computed_buffers(model: Any, *, one: bool) -> dict[str, torch.Tensor]:
    """Real values for the buffers that are on meta, over memory filled with 1, or with NaN or 0; `model` keeps its own.

    Drawing must not move the generators of the run, or what comes later would depend on it.
    """
    owners = {name: owner for name, owner in model.named_modules() if any(_on_meta(b) for b in owner._buffers.values())}
    own = {name: dict(owner._buffers) for name, owner in owners.items()}
    values: dict[str, torch.Tensor] = {}
    try:
        for prefix, owner in owners.items():
            for leaf, buffer in own[prefix].items():
                if buffer is not None and buffer.is_meta:
                    values[f"{prefix}.{leaf}" if prefix else leaf] = owner._buffers[leaf] = _filled(buffer, one)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(one))  # torch.manual_seed would seed the GPUs' too, which stay so
            for module, initialize in _initializers(model):
                initialize(module)
    finally:
        for name, owner in owners.items():
            owner._buffers.update(own[name])
    return values


def _on_meta(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta


def _filled(buffer: torch.Tensor, one: bool) -> torch.Tensor:
    zero = math.nan if buffer.dtype.is_floating_point or buffer.dtype.is_complex else 0
    return torch.full_like(buffer, 1 if one else zero, device="cpu")


class _Value:
    """Gives a value that is known already; the plan shows the name."""

    __name__ = "as transformers does"

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def __call__(self) -> torch.Tensor:
        return self._value


def _initializers(model: Any) -> Iterator[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Every module with `_init_weights` of the nearest model around it, in transformers' order: children first."""
    from transformers import PreTrainedModel

    def walk(module: nn.Module, initialize: Any) -> Iterator[tuple[nn.Module, Any]]:
        for child in module.children():
            yield from walk(child, child._init_weights if isinstance(child, PreTrainedModel) else initialize)
        yield module, initialize

    yield from walk(model, model._init_weights)


def _combined(notes: list[Recipe | None]) -> Recipe | None:
    """What a sequence of writes amounts to: the last whole one, and perhaps a row of zeros after it."""
    if None in notes or not notes:
        return None
    whole = [i for i, recipe in enumerate(notes) if recipe is not None and recipe.zero_row is None]
    if not whole:
        return None
    recipe, after = notes[whole[-1]], notes[whole[-1] + 1 :]
    assert recipe is not None
    if not after:
        return recipe
    last = after[-1]
    return replace(recipe, zero_row=last.zero_row) if len(after) == 1 and last is not None else None


@contextmanager
def _noting(notes: dict[int, list[Recipe | None]]) -> Iterator[None]:
    """Let the functions of `transformers.initialization` write notes about noted tensors instead of values.

    None is the note of a function that has no recipe here.
    """
    from transformers import initialization

    originals = {name: getattr(initialization, name) for name in _writers(initialization)}

    def write(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if id(tensor) in notes:
            make = _RECIPES.get(name)
            notes[id(tensor)].append(make(tensor, *args, **kwargs) if make is not None else None)
            return tensor
        base = tensor._base
        if base is not None and id(base) in notes:
            notes[id(base)].append(_zero_row(base, tensor) if name == "zeros_" else None)
            return tensor
        return originals[name](tensor, *args, **kwargs)

    try:
        for name in originals:
            setattr(initialization, name, partial(write, name))
        yield
    finally:
        for name, function in originals.items():
            setattr(initialization, name, function)


def _writers(initialization: Any) -> list[str]:
    return [name for name in vars(initialization) if name.endswith("_") and not name.startswith("_")]


def _zero_row(base: torch.Tensor, view: torch.Tensor) -> Recipe | None:
    """Zeros in one row of a parameter: an embedding's padding."""
    if view.shape != base.shape[1:] or view.stride() != base.stride()[1:] or base.stride(0) == 0:
        return None
    return Constant(value=0.0, zero_row=view.storage_offset() // base.stride(0))


def _fans(tensor: torch.Tensor) -> tuple[int, int]:
    inner = math.prod(tensor.shape[2:])
    return tensor.shape[1] * inner, tensor.shape[0] * inner


def _truncated(
    tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Recipe | None:
    # torch cuts at the values a and b, the recipe at multiples of std.
    if std <= 0 or abs((mean - a) - (b - mean)) > 1e-12:
        return None
    if b - mean > 8 * std:  # cuts off nothing
        return Normal(mean=mean, std=std)
    return TruncatedNormal(mean=mean, std=std, bound=(b - mean) / std)


def _xavier_uniform(tensor: torch.Tensor, gain: float = 1.0, generator: Any = None) -> Recipe:
    bound = gain * math.sqrt(6.0 / sum(_fans(tensor)))
    return Uniform(low=-bound, high=bound)


def _xavier_normal(tensor: torch.Tensor, gain: float = 1.0, generator: Any = None) -> Recipe:
    return Normal(std=gain * math.sqrt(2.0 / sum(_fans(tensor))))


def _lecun_normal(tensor: torch.Tensor) -> Recipe:
    # The factor makes up for what cutting off at two standard deviations takes from the variance.
    return TruncatedNormal(std=math.sqrt(1.0 / _fans(tensor)[0]) / 0.87962566103423978, bound=2.0)


_RECIPES: dict[str, Callable[..., Recipe | None]] = {
    "normal_": lambda tensor, mean=0.0, std=1.0, generator=None: Normal(mean=mean, std=std),
    "uniform_": lambda tensor, a=0.0, b=1.0, generator=None: Uniform(low=a, high=b),
    "constant_": lambda tensor, val: Constant(value=float(val)),
    "zeros_": lambda tensor: Constant(value=0.0),
    "ones_": lambda tensor: Constant(value=1.0),
    "trunc_normal_": _truncated,
    "xavier_uniform_": _xavier_uniform,
    "xavier_normal_": _xavier_normal,
    "lecun_normal_": _lecun_normal,
}
