"""From the tensor-parallel plan of a class of transformers to one style for each of its modules.

transformers writes a plan as patterns of module names with the names of styles. Here it becomes a style per module,
and everything that would go wrong with it on so many ranks is found at once, before anything is sharded.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, get_args

from torch import nn

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.features.transformers.model import TransformersModel

Style = Literal["colwise", "colwise_gather", "rowwise", "rowwise_split", "embedding_rows", "embedding_columns"]
"""How a module is split: its output, left split or gathered; its input, which comes split or is cut here; or its table,
by tokens or by width."""

_STYLES: dict[str, Style | None] = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise_split",
    "rowwise_rep": "rowwise_split",
    "embedding_rowwise": "embedding_rows",
    "embedding_colwise": "embedding_columns",
    # These split nothing. What they add to a gradient is done for every replicated parameter.
    **dict.fromkeys(("replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj")),
}

_NUMBER = re.compile(r"\.\d+(?=\.)")

SPLIT_DIM: dict[Style, int] = {s: int(s in ("rowwise", "rowwise_split", "embedding_columns")) for s in get_args(Style)}
"""Dim of a module's weight that its style splits."""


def resolve_tensor_parallel_plan(model: TransformersModel, size: int) -> dict[str, Style]:
    """Return the style of each module of `model` split over `size` ranks, by its name in the transformers model.

    Experts are in none: they are never split inside, also where the plan of the class splits their parameters. A module
    that shares its weight with a split one is split with it.

    Raises:
        ConfigError: the class carries no plan, or it asks for something that cannot be done; all problems at once.
    """
    inner = model.transformers_model
    plan: dict[str, str] = dict(inner.tp_plan or {})
    if not plan:
        raise ConfigError(
            f"parallelism: tensor_parallel_degree is {size}, but transformers' {model.config.architecture} carries no "
            "tensor-parallel plan. Set it to 1; FSDP shards the model over all ranks."
        )
    modules = {name: module for name, module in inner.named_modules() if name}
    parameters = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    # Those of classes that the experts interface does not serve too: every rank computes them whole.
    routed = {name: m.parameters(recurse=False) for name, m in modules.items() if hasattr(m, "num_experts")}
    experts = tuple(f"{name}." for name, own in routed.items() if any(param.dim() == 3 for param in own))
    found: dict[str, Style] = {}
    problems: list[str] = []
    for pattern, asked in plan.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        for name in filter(matches, [*modules, *parameters]):
            if f"{name}.".startswith(experts):
                continue
            style = _STYLES.get(asked)
            if name not in modules or asked not in _STYLES:
                problems.append(f"{name} has style '{asked}' in the plan of its class, which is not done here.")
            elif style is not None:
                found[name] = style
    problems += _follow_ties(modules, found)
    for name, style in found.items():
        problems += _misfits(name, style, modules, size, is_head=modules[name] is inner.get_output_embeddings())
    raise_problems(
        ConfigError,
        f"parallelism: {model.config.architecture} cannot be split over tensor_parallel_degree = {size}",
        # Layers are alike; each problem is said once.
        [
            f"{problem} Set another degree, or 1 to shard by FSDP alone."
            for problem in dict.fromkeys(_NUMBER.sub(".*", problem) for problem in problems)
        ],
    )
    return found


def _follow_ties(modules: dict[str, nn.Module], found: dict[str, Style]) -> Iterator[str]:
    """Give modules that share the weight of a split one the style that goes with it; say where none does."""
    holders: defaultdict[Any, list[str]] = defaultdict(list)
    for name, module in modules.items():
        if module._parameters.get("weight") is not None:
            holders[module._parameters["weight"]].append(name)
    for names in holders.values():
        split = [name for name in names if name in found]
        if not split or len(names) == 1:
            continue
        dims = {SPLIT_DIM[found[name]] for name in split}
        for name in set(names) - found.keys():
            by_dim: dict[int, Style] = (
                {0: "embedding_rows", 1: "embedding_columns"}
                if isinstance(modules[name], nn.Embedding)
                else {0: "colwise_gather", 1: "rowwise_split"}
            )
            found[name] = by_dim[min(dims)]
        if len(dims) > 1:
            yield f"{' and '.join(sorted(names))} share a weight, which the plan of the class splits in two ways."


def _misfits(name: str, style: Style, modules: dict[str, nn.Module], size: int, *, is_head: bool) -> Iterator[str]:
    """Yield what keeps one module from being split over `size` ranks."""
    module: Any = modules[name]
    wanted = nn.Embedding if style.startswith("embedding") else nn.Linear
    if not isinstance(module, wanted):
        kind = type(module).__name__
        yield f"{name} is a {kind}, and its style in the plan of its class, '{style}', splits {wanted.__name__}s."
        return
    if style.startswith("embedding") and module.max_norm is not None:
        yield f"{name} has a max_norm, which needs whole rows in one place."
    length = module.weight.shape[SPLIT_DIM[style]]
    # Rows of the vocabulary may be shared out unevenly.
    if length % size and style != "embedding_rows" and not (is_head and style == "colwise_gather"):
        yield f"{name}.weight {tuple(module.weight.shape)}: dim {SPLIT_DIM[style]} does not go into {size} equal parts."
        return
    # A head must not be cut: attention reads how many it has from the width of its projections.
    head_dim = getattr(modules.get(name.rpartition(".")[0]), "head_dim", None)
    heads = length // head_dim if isinstance(head_dim, int) and head_dim and length % head_dim == 0 else 0
    if style == "colwise" and heads % size:
        yield f"{name} has {heads} heads of width {head_dim}, which do not go round."
