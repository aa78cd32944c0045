"""Tensors that a module holds without registering them: they have no source, so on meta they must
not be there.

torch computes with a CPU tensor and one on meta without an error, and the results are arbitrary
memory.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from titanlite.materialize.sources import Alias, Compute, Init, Keep, Read

_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), type, ModuleType)
_SOURCES = (Init, Compute, Alias, Keep, Read)  # what they recorded is in no forward
# Torch's own machinery (meshes, FSDP, compiled graphs), which follows the model's tensors by
# itself.
_MACHINERY = ("torch._", "torch.distributed.", "torch.fx.", "torch.utils.")
_OF_ANY_MODULE = frozenset(vars(nn.Module()))  # registered tensors and modules, and hooks
_REGISTERED = ("_parameters", "_buffers", "_modules")


def find_unregistered(
    model: nn.Module, names: Mapping[nn.Module, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of each meta tensor that `model` reaches and that is none of its own.

    The search begins at the modules in `names`. It goes through attributes, also those of classes,
    containers, unregistered modules, plain objects, `functools.partial`, bound methods and
    closures, and visits each object once. It enters no Python modules, globals of functions, or
    hooks.
    """
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    seen = set(map(id, names))
    for module, name in names.items():
        todo = deque(_parts(name, module))
        while todo:
            path, value = todo.popleft()
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in registered:
                yield path.lstrip("."), value
            todo.extend(_parts(path, value))


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for all that the object `value`, which is at `path`, holds."""
    if isinstance(value, _SOURCES) or f"{type(value).__module__}.".startswith(_MACHINERY):
        return
    match value:
        case dict() | MappingProxyType():
            for key, item in value.items():
                shown = repr(key) if isinstance(key, str | int) else type(key).__name__
                yield f"{path}[{shown}]", item
                yield f"{path} (key)", key
        case list() | tuple() | deque():
            yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
        case set() | frozenset():
            yield from ((f"{path} (element)", item) for item in value)
        case FunctionType():
            names = value.__code__.co_freevars
            cells = zip(names, value.__closure__ or (), strict=True)
            yield from ((f"{path} (variable {name})", cell) for name, cell in cells)
        case CellType():
            try:
                yield path, value.cell_contents
            except ValueError:  # the variable has no value yet
                return
        case _:
            pass
    for name, item in _attributes(value):
        yield f"{path}.{name}", item


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) of the attributes of an object; for modules, of their tensors and
    classes.
    """
    held = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        for registered in _REGISTERED:
            yield from held.get(registered, {}).items()
        held = {name: item for name, item in held.items() if name not in _OF_ANY_MODULE}
        yield from _class_attributes(type(value))
    if isinstance(held, dict):
        yield from held.items()
    is_function = isinstance(value, FunctionType)
    names = ("__defaults__", "__kwdefaults__") if is_function else _slots(type(value))
    yield from ((name, getattr(value, name)) for name in names if hasattr(value, name))


def _class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) of the tensors and containers that a class holds, such as a cache."""
    for base in cls.__mro__:
        if not f"{base.__module__}.".startswith("torch."):
            for name, item in vars(base).items():
                if isinstance(item, torch.Tensor | dict | list | tuple | set):
                    yield name, item


def _slots(cls: type) -> Iterator[str]:
    """Yield the names in `__slots__`; those of `functools.partial` and bound methods, too."""
    for base in cls.__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, MemberDescriptorType):
                yield name
