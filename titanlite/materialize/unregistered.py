"""Search for meta tensors that a module holds without registering them: they have no source, so
they are an error.

Without this search they would go unnoticed: torch computes with a CPU tensor and a meta tensor
without an error, and the results are arbitrary memory.
"""

import gc
from collections.abc import Iterator, Mapping
from types import FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn

from titanlite.materialize.sources import Alias, Compute, Init, Keep, Read

_LEAVES = (str, bytes, int, float, type(None), type, ModuleType, FrameType, GeneratorType)
_SOURCES = (Init, Compute, Alias, Keep, Read)  # forwards do not use tensors inside a source
# torch's own objects (meshes, FSDP, compiled graphs), which torch updates when tensors change.
_MACHINERY = ("torch._", "torch.distributed.", "torch.fx.", "torch.utils.")
_OF_ANY_MODULE = frozenset(vars(nn.Module()))  # registered tensors and modules, and hooks
_REGISTERED = ("_parameters", "_buffers", "_modules")


def find_unregistered(
    model: nn.Module, names: Mapping[nn.Module, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path of the attribute, first tensor found) for each attribute that leads to a meta
    tensor which the model did not register.

    The search begins at the modules in `names`. It follows the attributes of the modules and of
    their classes through containers, unregistered modules, objects, bound methods and closures. It
    visits each object once, and does not enter Python modules, classes, globals of functions, or
    hooks.
    """
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    seen = set(map(id, names))
    for module, name in names.items():
        for attribute, held in _attributes(module):
            todo = [held]
            while todo:
                value = todo.pop()
                if isinstance(value, _LEAVES) or id(value) in seen:
                    continue
                seen.add(id(value))
                is_own = not isinstance(value, torch.Tensor) or id(value) in registered
                if not is_own and value.is_meta:
                    yield f"{name}.{attribute}".lstrip("."), value
                    break
                todo.extend(_referents(value))


def _referents(value: Any) -> list[Any]:
    if isinstance(value, _SOURCES) or f"{type(value).__module__}.".startswith(_MACHINERY):
        return []
    if isinstance(value, nn.Module):
        return [item for _, item in _attributes(value)]
    if isinstance(value, torch.Tensor):
        return list(vars(value).values())
    if isinstance(value, FunctionType):  # not its globals
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    return gc.get_referents(value)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for a module's tensors, modules and other attributes, and for tensors
    and containers in its classes, such as a cache.
    """
    for registered in _REGISTERED:
        yield from vars(module)[registered].items()
    yield from ((name, item) for name, item in vars(module).items() if name not in _OF_ANY_MODULE)
    for base in type(module).__mro__:
        if not f"{base.__module__}.".startswith("torch."):
            for name, item in vars(base).items():
                if isinstance(item, torch.Tensor | dict | list | tuple | set):
                    yield name, item
