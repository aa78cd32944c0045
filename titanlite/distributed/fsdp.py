"""FSDP2 (`fully_shard`): parameters, gradients and optimizer states sharded over the data-parallel
ranks.

Experts are separate FSDP units if they are on the sparse mesh. Over one rank FSDP would only cast
and copy, so parameters that no other rank shares are outside FSDP, and are read as `WeightCopies`.
Gradients are summed, never averaged: the loss is divided by the global number of valid tokens, so
that dense and expert gradients have the same scale.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from titanlite.config.schema import BLOCK_SIZES, LoRASection, ParallelismSection, TrainingSection
from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.materialize.execute import sharded_like
from titanlite.materialize.layout import is_remote, local_of
from titanlite.models.interface import Model, is_adapter
from titanlite.models.moe import Experts


def mixed_precision_dtypes(
    training: TrainingSection, device_type: str
) -> tuple[torch.dtype, torch.dtype]:
    """Return (parameter and activation dtype, gradient reduction dtype) of the configuration on
    this type of device.
    """
    param = training.mixed_precision_param
    if param == "auto":
        param = "bfloat16" if device_type == "cuda" else training.dtype
    return getattr(torch, param), getattr(torch, training.mixed_precision_reduce)


def base_dtype(training: TrainingSection, lora: LoRASection, device_type: str) -> torch.dtype:
    """Return the dtype of weights that are not quantized: `training.dtype`, or with adapters
    `lora.base_dtype`.
    """
    if not lora.rank:
        return getattr(torch, training.dtype)
    if lora.base_dtype == "auto" or lora.base_dtype in BLOCK_SIZES:
        # frozen weights need no more bits than the matmuls
        return mixed_precision_dtypes(training, device_type)[0]
    return getattr(torch, lora.base_dtype)


def apply_fsdp(
    model: Model,
    training: TrainingSection,
    section: ParallelismSection,
    dims: ParallelDims,
    device_type: str,
    *,
    is_compiled: bool = False,
) -> None:
    """Shard `model` in place, on meta. Parameters keep attributes that were set on them.

    The FSDP units are each decoder layer, its experts if they are on a different mesh, the
    embedding, and the final norm with the output head. Tied embedding and head are in the root
    unit. In a transformers model the blocks of a vision tower are layers too, and everything
    outside of layers is in the root unit. If no other rank shares a parameter of the model, there
    are no units.
    """
    param_dtype, reduce_dtype = mixed_precision_dtypes(training, device_type)
    layers = model.decoder_layers()
    units = {
        layer: list(model.experts_in(layer)) if dims.degrees.experts_on_own_mesh else []
        for layer in layers
    }
    # A compiled layer would have a graph break at each copy.
    allows_copies = (
        model.reads_local_tensors
        and not is_compiled
        and section.fsdp_reshard_after_forward != "always"
    )
    whole = set[nn.Parameter]()
    if not training.enable_cpu_offload:
        whole = _find_whole(model, units, dims, param_dtype, allows_copies=allows_copies)
    copies = WeightCopies(param_dtype)
    for param in whole - model.float32_parameters():
        if param.dtype != param_dtype:
            vars(param)["copies"] = copies
    if whole == {*model.parameters()}:
        return
    units = {
        layer: [module for module in modules if whole.isdisjoint(module.parameters())]
        for layer, modules in units.items()
    }
    # FSDP2 cannot reduce the gradient of a parameter without elements.
    ignored = whole | {p for p in model.parameters() if is_remote(p) or not p.numel()}
    attributes = {
        name: dict(vars(param)) for name, param in model.named_parameters(remove_duplicate=False)
    }
    # Inputs are not cast: activations have the parameters' dtype from the embedding on. The router
    # weights of rows, which enter the experts, are float32 on purpose.
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    placement = _expert_placement(model, dims)
    offload = CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy()

    def shard_unit(modules: list[nn.Module], mesh: DeviceMesh, **options: Any) -> None:
        given = {"mp_policy": policy, "ignored_params": ignored, **options}
        fully_shard(
            modules, mesh=mesh, offload_policy=offload, shard_placement_fn=placement, **given
        )
        sharded: Any = modules  # FSDPModules now
        for module in sharded:
            if mesh.size() > 1:  # over one rank, FSDP would copy the gradients again, divided by 1
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    root: nn.Module = model
    embedding, head = model.outer_units()
    trained = [p for p in model.parameters() if p.requires_grad and p not in ignored]
    wide = model.float32_parameters() - ignored if param_dtype != torch.float32 else set()
    if len({p.dtype for p in trained if p not in wide}) > 1:
        wide |= {p for p in trained if p.dtype == torch.float32}
    if wide:
        # A unit has one dtype, so float32 parameters form the root unit. They are small, and are
        # gathered without a cast.
        as_is = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        others = {*model.parameters()} - wide
        shard_unit([model], dims.fsdp_mesh, mp_policy=as_is, ignored_params=others)
        ignored |= {*model.parameters()} - others  # they replaced the parameters in `wide`
        root = next(model.children())
        tied = [module for module in model.embedding_and_head() if module is not None]
        if not embedding and len({module.weight for module in tied}) < len(tied):
            head = tied  # one of them is outside of the new root
    reshard = "never" if section.fsdp_once_per_step else section.fsdp_reshard_after_forward
    for layer in layers:
        # Backward begins with the last layer and needs its parameters immediately.
        last = layer is layers[-1] and dims.is_last_stage
        reshard_layer = reshard == "always" or (reshard == "default" and not last)
        for experts in units[layer]:
            shard_unit([experts], dims.expert_fsdp_mesh, reshard_after_forward=reshard_layer)
        shard_unit([layer], dims.fsdp_mesh, reshard_after_forward=reshard_layer)
    if embedding:
        shard_unit(embedding, dims.fsdp_mesh, reshard_after_forward=reshard != "never")
    if head:
        shard_unit(head, dims.fsdp_mesh, reshard_after_forward=reshard == "always")
    shard_unit([root], dims.fsdp_mesh)

    if dims.degrees.ep > 1 or dims.degrees.pp > 1:
        _prefetch_explicitly([[layer, *units[layer]] for layer in layers])
        if dims.degrees.pp > 1 and not section.fsdp_once_per_step:
            _prefetch_nothing_in_backward([layers[0], *units[layers[0]], *embedding])
    if section.fsdp_once_per_step:
        _prefetch_nothing_in_backward(
            module for module in model.modules() if isinstance(module, FSDPModule)
        )
    for name, param in model.named_parameters(remove_duplicate=False):
        vars(param).update(attributes[name])


def prepare_backward(
    model: Model, dims: ParallelDims, *, is_last: bool, once_per_step: bool
) -> None:
    """Set whether the next backwards finish the reduction of gradients. Only the last micro-batch
    of a step does; in a new model every backward does.

    Without `once_per_step`, the other micro-batches skip only the all-reduce over `dp_replicate`,
    which has the slowest interconnect. With it, they skip every reduction of gradients and leave
    the parameters gathered. Until the last micro-batch, gradients are in FSDP's own buffers instead
    of `grad`.
    """
    if not isinstance(model, FSDPModule):
        return
    root: Any = model
    if once_per_step:
        root.set_is_last_backward(is_last)
        root.set_reshard_after_backward(is_last)
        root.set_requires_gradient_sync(is_last)
    elif dims.degrees.dp_replicate > 1:
        root.set_requires_all_reduce(is_last)


@contextmanager
def forward_only(model: nn.Module, *, reshard: bool = True) -> Iterator[None]:
    """Run the forwards in the body in evaluation mode and without gradients. Every forward that has
    no backward must run in this context.

    FSDP2 reshards the last layer and the root only after a backward. If they stayed gathered, the
    next forward would not see a later change of the weights. `reshard` is False if the caller's own
    forward or backward uses the gathered weights, and no weight changes before it.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for module in model.modules() if reshard else ():
            if isinstance(module, FSDPModule):
                module.reshard()


def _expert_placement(model: Model, dims: ParallelDims) -> Callable[[nn.Parameter], Shard | None]:
    """Return the rule for splits: experts along dim 1 if there are more ranks than experts, all
    other parameters along dim 0.

    Experts of transformers stay on dim 0, because other dims may not be divisible: surplus ranks
    hold no expert.
    """
    if not model.splits_inside_experts:
        return lambda param: None
    dim = dims.degrees.expert_shard_dim(max(model.config.num_experts, 1))
    experts = {
        id(p)
        for layer in model.decoder_layers()
        for m in model.experts_in(layer)
        for p in m.parameters()
    }
    adapters = {id(p) for n, p in model.named_parameters() if is_adapter(n)}

    def place(param: nn.Parameter) -> Shard | None:
        if id(param) not in experts:
            return None
        if dim == 0 or id(param) not in adapters:
            return Shard(dim)
        # FSDP2 requires equal parts on dims other than 0, and the LoRA rank may not be divisible.
        even = [d for d in (1, 2) if param.shape[d] % dims.degrees.efsdp == 0]
        return Shard(max(even, key=lambda d: param.shape[d], default=0))

    return place


def _find_whole(
    model: Model,
    units: Mapping[nn.Module, Sequence[nn.Module]],
    dims: ParallelDims,
    dtype: torch.dtype,
    *,
    allows_copies: bool,
) -> set[nn.Parameter]:
    """Return the parameters that no other rank shares and that can be read in `dtype` without FSDP.
    All experts in `units` are among them, or none.
    """
    d = dims.degrees
    modules = [module for experts in units.values() for module in experts]
    of_experts = {param for module in modules for param in module.parameters()}
    if of_experts:
        is_read = all(isinstance(module, Experts) for module in modules)
        is_cast = any(param.dtype != dtype for param in of_experts)
        if d.efsdp * d.dp_replicate > 1 or (is_cast and not is_read):
            return set()
    if d.fsdp * d.dp_replicate > 1:
        return of_experts
    return of_experts | {p for p in model.parameters() if allows_copies or p.dtype == dtype}


_num_optimizer_steps = 0


def _count_optimizer_step(*_: Any) -> None:
    global _num_optimizer_steps
    _num_optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)


class WeightCopies:
    """Copies of parameters in the matmul dtype, leaves of autograd, refreshed after an optimizer
    step, all of them at once. Gradients are added to the parameters' `grad`, in the parameters'
    dtype and in place.

    `local_tensor` reads a parameter through its attribute `copies`.

    Attributes:
        by_param: local copies, each with the version of the parameter and the number of optimizer
            steps when the copy was made. Both are needed, because fused optimizers change a tensor
            without a new version.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.by_param: dict[nn.Parameter, tuple[torch.Tensor, tuple[int, int]]] = {}

    def read(self, param: nn.Parameter) -> torch.Tensor:
        """Return the local tensor of `param` in `dtype`."""
        copy, before = self.by_param.get(param, (None, None))
        if copy is None:
            copy = local_of(param).to(self.dtype).requires_grad_(param.requires_grad)
            if param.requires_grad:
                # An autograd function in Python for each parameter would cost the host five times
                # as much. The garbage collector does not see torch's reference to the hook. So the
                # hook must not hold the parameter, which holds the copy: both would stay forever.
                copy.register_post_accumulate_grad_hook(partial(_take_gradient, ref(param)))
            if param.dtype == torch.float32:
                vars(copy)["find_total"] = partial(_find_total, param)  # for `moe_experts`
            self.by_param[param] = copy, _state_of(param)
        elif before != _state_of(param):
            old = [p for p, (_, state) in self.by_param.items() if state != _state_of(p)]
            copies = [self.by_param[p][0] for p in old]
            with torch.no_grad():
                torch._foreach_copy_(copies, [local_of(p) for p in old])
            self.by_param |= {p: (c, _state_of(p)) for p, c in zip(old, copies, strict=True)}
        return copy


def _state_of(param: nn.Parameter) -> tuple[int, int]:
    local = param._local_tensor if isinstance(param, DTensor) else param
    return local._version, _num_optimizer_steps


def _find_total(param: nn.Parameter) -> tuple[torch.Tensor, bool]:
    """Return the local gradient of `param`, and whether it holds values yet; False means a new
    tensor that must be overwritten.
    """
    if param.grad is not None:
        return local_of(param.grad), True
    total = torch.empty_like(local_of(param))
    param.grad = sharded_like(param, total)
    return total, False


def _take_gradient(find_param: "ref[nn.Parameter]", copy: torch.Tensor) -> None:
    """Add the gradient of a copy to the gradient of its parameter. The copy has no gradient if the
    matmul has already added it to the parameter's.
    """
    grad = copy.grad
    copy.grad = None
    param = find_param()
    if grad is None or param is None:
        return
    if param.grad is None:
        param.grad = sharded_like(param, grad.to(param.dtype))
    else:
        local_of(param.grad).add_(grad)


def _prefetch_nothing_in_backward(units: Iterable[nn.Module]) -> None:
    """Turn off FSDP2's backward prefetching for `units`. Call it for units that are gathered once
    per step, and for a pipeline stage's first units.

    FSDP2 keeps one list of units over all micro-batches. Before the backward of the first unit, it
    would prefetch the last unit again.
    """
    modules: Any = units  # FSDPModules, which their static type does not show
    for module in modules:
        module.set_modules_to_backward_prefetch([module])  # an empty list means the default


def _prefetch_explicitly(units_of_layers: list[list[nn.Module]]) -> None:
    """Set the order of the all-gathers explicitly; each list holds the FSDP units of a layer, with
    the layer first.

    Implicit prefetching does not work here: the host copy of the split sizes in each MoE layer
    blocks it, and if forwards run ahead, FSDP2 forgets the order of units after a backward.
    """
    layers: Any = units_of_layers  # of FSDPModules
    for here, following in pairwise(layers):
        here[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(here)
