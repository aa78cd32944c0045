"""Tensor parallelism for models of transformers, by the plan that their class carries.

Between modules every tp rank holds all positions, because transformers' code reads lengths and masks from its inputs.
So the split layers gather nothing before and sum up after; norms, routers and all else outside the plan are computed on
every rank.

Gradients follow one rule: **what a rank has as the gradient of something replicated is its part of a sum over tp.** The
loss takes part in it (each rank of the vocabulary gives a part, or all give 1 / tp of the same), and the backward of
every collective here keeps it: a sum is summed again, a gather scatters sums. So layers that split their output need no
collective in backward at all, and any code between split layers is right as it stands, whether it works with all heads,
with the rank's own, or with some of each. `reduce_replicated_grads` adds up the parts of parameters once per step.

Experts of transformers' experts interface are not split inside (their matrices are narrow): each rank takes its share
of the tokens through whole experts, and results are gathered. Expert parallelism and FSDP then see what they see in
titanlite's decoder.

Shapes: T tokens, k experts per token, D hidden, V vocabulary.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.log import logger
from titanlite.distributed.collectives import all_gather, all_reduce, register_group
from titanlite.distributed.context_parallel import Peers
from titanlite.distributed.parallel_dims import ParameterPlacements, shard_parameters
from titanlite.distributed.tensor_parallel import vocab_shard
from titanlite.features.transformers.model import Around, TransformersModel, hook_around
from titanlite.materialize.layout import region_of
from titanlite.models.layers import Linear
from titanlite.ops import linear_cross_entropy, local_tensor

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
    # These split nothing. Their sums of gradients are done for every replicated parameter.
    **dict.fromkeys(("replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj")),
}

_NUMBER = re.compile(r"\.\d+(?=\.)")

SPLIT_DIM: dict[Style, int] = {s: int(s in ("rowwise", "rowwise_split", "embedding_columns")) for s in get_args(Style)}
"""Dim of a module's weight that its style splits."""


def apply_transformers_tensor_parallel(model: TransformersModel, mesh: DeviceMesh) -> None:
    """Shard `model` over the one-axis `mesh` by its class's plan and insert the collectives, in place.

    Every parameter outside of experts becomes a DTensor, replicated where the plan does not split it. Ties and
    attributes are kept. No collective is run; the model may be on meta.

    Raises ConfigError: as `resolve_tensor_parallel_plan`. The same on all ranks.
    """
    inner = model.transformers_model
    plan = resolve_tensor_parallel_plan(model, mesh.size())
    styles: dict[nn.Module, Style] = {inner.get_submodule(name): style for name, style in plan.items()}
    experts = list(model.expert_modules.values())
    in_experts = {module for outer in experts for module in outer.modules()}
    holders = dict.fromkeys(m for m in inner.modules() if m not in in_experts and [*m.parameters(recurse=False)])
    placements = _placements(holders, styles)
    shard_parameters(model, mesh, placements)
    axis = Peers(register_group(mesh.get_group()), mesh.size(), mesh.get_local_rank())
    head = inner.get_output_embeddings()
    if styles.get(head) == "colwise_gather" and model.is_plain_head:
        del styles[head]  # with labels the head gives a loss, of this rank's part of the vocabulary: not to be gathered
        model.gather_logits = partial(_gather_last, width=head.weight.shape[0], axis=axis)
        model.cross_entropy = partial(linear_cross_entropy, shard=vocab_shard(head.weight, mesh))
        model.has_split_head = True
    elif head in styles:
        model.is_plain_head = False
    for module in inner.modules():
        if module in holders or _convolutions(module):
            _hook_style(module, styles.get(module), axis)
    for module in experts:
        hook_around(module, partial(_own_tokens, axis=axis))
    for counter in model.expert_counters().values():
        counter.tp_share = (axis.rank, axis.size)
    model.loss_copies = mesh.size()
    split = sum(param.numel() for param, placement in placements.items() if isinstance(placement, Shard))
    logger.info(
        "tensor parallelism: the plan of %s splits %.0f %% of the parameters outside of experts over %d ranks",
        *(model.config.architecture, 100 * split / sum(param.numel() for param in placements), mesh.size()),
    )


def _placements(holders: Iterable[nn.Module], styles: dict[nn.Module, Style]) -> ParameterPlacements:
    """Placement of every parameter that `holders` have themselves; a tied one appears once."""
    found: ParameterPlacements = {p: Replicate() for module in holders for p in module.parameters(recurse=False)}
    for module, style in styles.items():
        dim = SPLIT_DIM[style]
        split: list[Any] = [module.weight]
        if isinstance(module, Linear):
            split = module.split_parameters(dim)
        elif isinstance(module, nn.Linear) and dim == 0:
            split.append(module.bias)
        found |= {param: Shard(dim) for param in split if param is not None}
    return found


def _hook_style(module: nn.Module, style: Style | None, axis: Peers) -> None:
    """Run the forward of `module` on its local parameters, with the collectives of its style around it."""
    is_sum = style in ("rowwise", "rowwise_split")
    hook_around(module, partial(_on_local_parameters, module, hidden="bias" if is_sum else ""))
    if is_sum:
        hook_around(module, partial(_sum_output, module, axis=axis, cut_input=style == "rowwise_split"))
    elif style == "embedding_rows":
        hook_around(module, _split_table(module, axis))
    elif style in ("colwise_gather", "embedding_columns"):
        weight: Any = module.weight
        hook_around(module, partial(_gather_output, width=weight.shape[SPLIT_DIM[style]], axis=axis))


def _on_local_parameters(module: nn.Module, *args: Any, hidden: str) -> Around:
    """Have the DTensors among the parameters that the module reads be this rank's parts of them.

    The code of transformers would mix DTensors and tensors. The parameter `hidden` is not there meanwhile.
    """
    own = [
        (held, name, param)
        for held in [module._parameters, *(child._parameters for child in _convolutions(module))]
        for name, param in held.items()
        if isinstance(param, DTensor)
    ]
    for held, name, param in own:
        held[name] = None if name == hidden else local_tensor(param)  # type: ignore[assignment]
    try:
        return (yield args)
    finally:
        for held, name, param in own:
            held[name] = param  # type: ignore[assignment]


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """Layers with a state (linear attention, Mamba) read the weights of their convolutions without calling them."""
    return [child for child in module.children() if isinstance(child, nn.Conv1d)]


def _gather_output(x: torch.Tensor, *, width: int, axis: Peers) -> Around:
    return _gather_last((yield (x,)), width=width, axis=axis)


def _gather_last(piece: torch.Tensor, *, width: int, axis: Peers) -> torch.Tensor:
    """Gather all ranks' pieces of the last dim, `width` in all; those of the last ranks may be shorter."""
    missing = -(-width // axis.size) - piece.shape[-1]
    whole = all_gather(F.pad(piece, (0, missing)), piece.dim() - 1, axis.group)
    return _no_view(whole[..., :width])


def _sum_output(module: nn.Module, x: torch.Tensor, *, axis: Peers, cut_input: bool) -> Around:
    """Return the sum of all ranks' products, plus the bias once."""
    product = yield (x.chunk(axis.size, dim=-1)[axis.rank] if cut_input else x,)
    out = all_reduce(product, axis.group)
    bias = module._parameters.get("bias")
    return out if bias is None else out + local_tensor(bias)


def _split_table(module: Any, axis: Peers) -> Callable[[torch.Tensor], Around]:
    """Have the tokens of this rank's rows looked up, zeros elsewhere, and sum over the ranks."""
    region = region_of(module.weight)
    start, rows = region.starts[0], region.lengths[0]
    if module.padding_idx is not None:  # its row has no gradient
        padding = module.padding_idx - start
        module.padding_idx = padding if 0 <= padding < rows else None

    def look_up(tokens: torch.Tensor) -> Around:
        local = tokens - start
        mine = (local >= 0) & (local < rows)
        found = yield (local.where(mine, 0),)
        return all_reduce(found * mine.unsqueeze(-1), axis.group)

    return look_up


def _own_tokens(hidden_TD: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, *, axis: Peers) -> Around:
    """Run the experts on this rank's share of the tokens, and return the results of all ranks.

    If tokens do not divide evenly, zeros for the first expert, with weight 0, fill up.
    """
    num_tokens = hidden_TD.shape[0]
    share = -(-num_tokens // axis.size)
    mine = slice(axis.rank * share, (axis.rank + 1) * share)
    missing = share * axis.size - num_tokens
    results = yield tuple(F.pad(x, (0, 0, 0, missing))[mine] for x in (hidden_TD, ids_Tk, weights_Tk))
    return _no_view(all_gather(results, 0, axis.group)[:num_tokens])


def _no_view(x: torch.Tensor) -> torch.Tensor:
    """FSDP2 wants no view as a module's result: an operation in place on it would lose FSDP's hook."""
    return x.clone(memory_format=torch.contiguous_format)


# --- from the plan of a class to a style for each module


def resolve_tensor_parallel_plan(model: TransformersModel, size: int) -> dict[str, Style]:
    """Return the style of each module of `model` split over `size` ranks, by its name in the transformers model.

    Experts are in none: they are never split inside, also where the plan of the class splits their parameters. A module
    that shares its weight with a split one is split with it.

    Raises ConfigError: the class carries no plan, or it asks for something that cannot be done; all problems at once.
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
