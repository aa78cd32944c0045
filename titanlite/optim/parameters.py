"""Which parameters are trained, and how fast: patterns over their names."""

from fnmatch import fnmatchcase

import torch
from torch import nn

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.config.patterns import parse_multipliers, split_patterns
from titanlite.config.schema import OptimizerSection
from titanlite.materialize.layout import num_values
from titanlite.materialize.plan import clean_name


def freeze_parameters(model: nn.Module, section: OptimizerSection) -> None:
    """Turn gradients off for the parameters that `optimizer.freeze` names, in place. Before sharding, on meta or not.

    A tied parameter is frozen under each of its names.

    Raises ConfigError: a pattern matches no parameter, or nothing is left to train. The same on all ranks.
    """
    patterns = split_patterns("optimizer.freeze", section.freeze)
    problems = []
    for pattern in patterns:
        matched = _matched(model, pattern)
        if not matched:
            problems.append(_no_match(pattern, model))
        for param in matched:
            param.requires_grad_(False)
    if patterns and not any(param.requires_grad for param in model.parameters()):
        problems.append("every parameter of the model is frozen. Leave one to train.")
    raise_problems(ConfigError, "optimizer.freeze", problems)


def lr_multipliers(model: nn.Module, section: OptimizerSection) -> dict[nn.Parameter, float]:
    """Return the factor on the learning rate of each trained parameter that `optimizer.lr_multipliers` names.

    Raises ConfigError: a pattern matches no parameter, or only frozen ones. The same on all ranks.
    """
    found: dict[nn.Parameter, float] = {}
    problems = []
    for pattern, factor in parse_multipliers("optimizer.lr_multipliers", section.lr_multipliers).items():
        matched = _matched(model, pattern)
        if not matched:
            problems.append(_no_match(pattern, model))
        elif not any(param.requires_grad for param in matched):
            problems.append(f"'{pattern}' matches frozen parameters only. Remove it.")
        found.update((param, factor) for param in matched if param.requires_grad)
    raise_problems(ConfigError, "optimizer.lr_multipliers", problems)
    return found


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the values of all parameters, and of the trained ones; of all ranks together, tied ones once."""
    params = list(model.parameters())
    return sum(map(num_values, params)), sum(num_values(p) for p in params if p.requires_grad)


def _matched(model: nn.Module, pattern: str) -> list[torch.nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return [param for name, param in named if fnmatchcase(clean_name(name), pattern)]


def _no_match(pattern: str, model: nn.Module) -> str:
    last = [clean_name(name) for name, _ in model.named_parameters()][-1]
    return f"'{pattern}' matches no parameter. Names are written out, as '{last}'; '*' stands for any characters."
