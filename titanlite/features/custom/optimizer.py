"""An optimizer of the user's, tried on small stand-ins first, so that its states can be saved and found again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.extension import load_extension
from titanlite.config.schema import OptimizerSection
from titanlite.materialize.plan import clean_name

_SIZES = (3, 4, 5, 6)  # of the stand-ins: a state of other dims has another shape
_Named = list[tuple[str, nn.Parameter]]
_Build = Callable[[_Named, OptimizerSection], torch.optim.Optimizer]


def build_custom_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """Return the optimizer that the function of `optimizer.name` makes of (name, parameter) of all that is trained.

    Raises:
        ConfigError: it cannot be built or stepped, leaves a parameter out, or has states that cannot be saved.
    """
    build: _Build = load_extension("optimizer.name", section.name, ["named_parameters, section"])
    where = f'optimizer.name = "{section.name}"'
    named = [(clean_name(name), param) for name, param in model.named_parameters() if param.requires_grad]
    try:
        states = _try_out(build, named, section)
        optimizer = _build(build, named, section)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:
        raise ConfigError(f"{where}: it raised {type(error).__name__}: {error}. Correct it.") from error
    names = {id(param): name for name, param in named}
    groups: dict[tuple[int, object, tuple[str, ...]], dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            key = (number, mesh, states[names[id(param)]])  # a fused call takes one mesh
            options = {name: value for name, value in group.items() if name != "params"}
            groups.setdefault(key, {"params": [], **options, "state_names": key[2]})["params"].append(param)
    optimizer.param_groups = list(groups.values())
    return optimizer


def _build(build: _Build, named: _Named, section: OptimizerSection) -> torch.optim.Optimizer:
    optimizer = build(list(named), section)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"it returned {type(optimizer).__name__}. Return a torch.optim.Optimizer.")
    found = [id(param) for group in optimizer.param_groups for param in group["params"]]
    missing = [name for name, param in named if id(param) not in found]
    if missing or len(found) != len(named):
        what = f"leaves out {', '.join(missing[:3])}" if missing else "has parameters that it was not given"
        raise ConfigError(f"{what}: {len(named)} were given. Use all of them; optimizer.freeze takes some out.")
    return optimizer


def _try_out(build: _Build, named: _Named, section: OptimizerSection) -> dict[str, tuple[str, ...]]:
    """Step the optimizer on small stand-ins of the parameters; the names of the tensors that it keeps of each."""
    stand_ins = [(name, nn.Parameter(torch.ones(_SIZES[: p.dim()], dtype=p.dtype))) for name, p in named]
    optimizer = _build(build, stand_ins, section)
    before = [_get_options(group) for group in optimizer.param_groups]
    for _ in range(2):
        for _, param in stand_ins:
            param.grad = torch.ones_like(param)
        optimizer.step()
    problems = [
        f"its step changes {', '.join(sorted(name for name in now if now[name] != old.get(name)))} of a group of "
        "parameters, which is not saved. Keep it in a tensor in state."
        for old, now in zip(before, map(_get_options, optimizer.param_groups), strict=True)
        if old != now
    ]
    states: dict[str, tuple[str, ...]] = {}
    for name, param in stand_ins:
        state = optimizer.state.get(param, {})
        states[name] = tuple(sorted(state))
        for key, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            like = is_tensor and value.shape == param.shape and value.dtype == param.dtype
            if not (like or (is_tensor and key == "step" and value.dim() == 0)):
                kind = f"{value.dtype} {tuple(value.shape)}" if is_tensor else type(value).__name__
                problems.append(
                    f"its state '{key}' of a parameter {param.dtype} {tuple(param.shape)} is {kind}, which cannot be "
                    "saved. Keep tensors like the parameter, and a scalar tensor 'step'."
                )
    raise_problems(ConfigError, "a trial step", dict.fromkeys(problems))
    return states


def _get_options(group: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name != "params"}
