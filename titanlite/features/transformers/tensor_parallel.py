"""Tensor parallelism for models of transformers, by the plan that their class carries.

Between modules every tp rank holds all positions, for the code of transformers reads lengths and masks from what it
gets. So the split layers gather nothing before and sum up behind; norms, routers and whatever the plan leaves alone
are computed on every rank.

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

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.base.log import logger
from titanlite.distributed.collectives import all_gather, all_reduce, register_group
from titanlite.distributed.context_parallel import Peers
from titanlite.distributed.parallel_dims import ParameterPlacements, shard_parameters
from titanlite.distributed.tensor_parallel import vocab_shard
from titanlite.features.transformers.model import TransformersModel
from titanlite.features.transformers.tensor_parallel_plan import SPLIT_DIM, Style, resolve_tensor_parallel_plan
from titanlite.materialize.layout import region_of
from titanlite.models.layers import Linear
from titanlite.ops import linear_cross_entropy, local_tensor

_Forward = Callable[..., torch.Tensor]


def apply_transformers_tensor_parallel(model: TransformersModel, mesh: DeviceMesh) -> None:
    """Shard `model` over the one-axis `mesh` by its class's plan and insert the collectives, in place.

    Every parameter outside of experts becomes a DTensor, replicated where the plan does not split it. Ties and
    attributes are kept. No collective is run; the model may be on meta.

    Raises:
        ConfigError: as `resolve_tensor_parallel_plan`. The same on all ranks.
    """
    inner = model.transformers_model
    plan = resolve_tensor_parallel_plan(model, mesh.size())
    styles: dict[nn.Module, Style] = {inner.get_submodule(name): style for name, style in plan.items()}
    experts = list(model.expert_modules.values())
    in_experts = {module for outer in experts for module in outer.modules()}
    # In order, and looked up below.
    holders = {
        m: None for m in inner.modules() if m not in in_experts and any(True for _ in m.parameters(recurse=False))
    }
    placements = _placements(holders, styles)
    shard_parameters(model, mesh, placements)
    axis = Peers(register_group(mesh.get_group()), mesh.size(), mesh.get_local_rank())
    for module in inner.modules():
        if module in holders or _convolutions(module):
            module.forward = _split_forward(module, styles.get(module), axis)
    head = inner.get_output_embeddings()
    if styles.get(head) == "colwise_gather" and model.head_project is not None:
        # With labels the head gives a loss: over this rank's part of the vocabulary, and not to be gathered.
        model.head_project = _split_forward(head, "colwise_gather", axis, model.head_project)
        head.forward = partial(_on_local_parameters, head, model.head_forward)
        model.cross_entropy = partial(linear_cross_entropy, shard=vocab_shard(head.weight, mesh))
        model.has_split_head = True
    elif head in styles:
        model.head_project = None
    for module in experts:
        module.forward = partial(_own_tokens, module.forward, axis=axis)
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


def _split_forward(module: nn.Module, style: Style | None, axis: Peers, forward: _Forward | None = None) -> _Forward:
    """Return the forward of `module` on its local parameters, with the collectives of its style."""
    forward = module.forward if forward is None else forward
    if style in ("rowwise", "rowwise_split"):
        product = partial(_on_local_parameters, module, forward, hidden="bias")
        return partial(_sum_output, module, product, axis=axis, cut_input=style == "rowwise_split")
    local = partial(_on_local_parameters, module, forward)
    if style == "embedding_rows":
        return _split_table(module, local, axis)
    if style in ("colwise_gather", "embedding_columns"):
        weight: Any = module.weight
        return partial(_gather_output, local, width=weight.shape[SPLIT_DIM[style]], axis=axis)
    return local


def _on_local_parameters(
    module: nn.Module, forward: Callable[..., Any], *args: Any, hidden: str = "", **kwargs: Any
) -> Any:
    """Run `forward` while the DTensors among the parameters that the module reads are this rank's parts of them.

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
        return forward(*args, **kwargs)
    finally:
        for held, name, param in own:
            held[name] = param  # type: ignore[assignment]


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """Layers with a state (linear attention, Mamba) read the weights of their convolutions without calling them."""
    return [child for child in module.children() if isinstance(child, nn.Conv1d)]


def _gather_output(forward: _Forward, *args: Any, width: int, axis: Peers) -> torch.Tensor:
    """All ranks' pieces of the last dim, `width` in all; those of the last ranks may be shorter."""
    out = forward(*args)
    piece = -(-width // axis.size)
    whole = all_gather(F.pad(out, (0, piece - out.shape[-1])), out.dim() - 1, axis.group)
    return _no_view(whole[..., :width])


def _sum_output(module: nn.Module, product: _Forward, x: torch.Tensor, *, axis: Peers, cut_input: bool) -> torch.Tensor:
    """Return the sum of all ranks' products, plus the bias once."""
    if cut_input:
        x = x.chunk(axis.size, dim=-1)[axis.rank]
    out = all_reduce(product(x), axis.group)
    bias = module._parameters.get("bias")
    return out if bias is None else out + local_tensor(bias)


def _split_table(module: Any, forward: _Forward, axis: Peers) -> _Forward:
    """Return a forward that looks up the tokens of this rank's rows, zeros elsewhere, and sums over the ranks."""
    region = region_of(module.weight)
    start, rows = region.starts[0], region.lengths[0]
    if module.padding_idx is not None:  # its row has no gradient
        padding = module.padding_idx - start
        module.padding_idx = padding if 0 <= padding < rows else None

    def look_up(tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - start
        mine = (local >= 0) & (local < rows)
        return all_reduce(forward(local.where(mine, 0)) * mine.unsqueeze(-1), axis.group)

    return look_up


def _own_tokens(
    forward: _Forward, hidden_TD: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, *, axis: Peers
) -> torch.Tensor:
    """Run the experts on this rank's share of the tokens, and return the results of all ranks.

    Where tokens do not go round, the last ones are zeros for the first expert, with weight 0.
    """
    num_tokens = hidden_TD.shape[0]
    share = -(-num_tokens // axis.size)
    mine = slice(axis.rank * share, (axis.rank + 1) * share)
    missing = share * axis.size - num_tokens
    parts = [F.pad(x, (0, 0, 0, missing))[mine] for x in (hidden_TD, ids_Tk, weights_Tk)]
    return _no_view(all_gather(forward(*parts), 0, axis.group)[:num_tokens])


def _no_view(x: torch.Tensor) -> torch.Tensor:
    """FSDP2 wants no view as a module's result: an operation in place on it would lose FSDP's hook."""
    return x.clone(memory_format=torch.contiguous_format)
