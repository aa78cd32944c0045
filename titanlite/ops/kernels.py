"""Selection of the kernels for a tensor: the kernels of its device, or of the device that a plan is
made for.

While a run is planned, fake CPU tensors represent CUDA tensors: kernels are then chosen as on CUDA,
and functions that read values of tensors are replaced.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

StandIn = Callable[..., Any]

_stand_ins: Mapping[str, StandIn] = {}
# Not a context variable: a compiled forward cannot read one.
_planned_device: str | None = None
_has_triton = True
_library = torch.library.Library("titanlite", "FRAGMENT")


def define_operator(schema: str, module: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define and return an operator of `schema`, computed by the function with its name in
    `module`, which is imported at the first call; `fake` returns its results without data.

    It has no autograd formula. A call costs the host 3 us; a call of a `custom_op` costs 13 us.
    """

    @cache
    def find() -> Callable[..., Any]:
        return getattr(import_module(module), schema.partition("(")[0])

    return _register(schema, lambda *operands: find()(*operands), fake)


def operator(
    fake: Callable[..., Any], mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function an operator, as `define_operator` does; the schema follows from
    its annotations.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        return _register(function.__name__ + schema, function, fake)

    return register


def _register(
    schema: str, compute: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    name = _library.define(schema)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"titanlite::{name}", fake, lib=_library)
    return getattr(torch.ops.titanlite, name)


def like(*places: int) -> Callable[..., Any]:
    """Return a fake kernel. Its results are contiguous, with the shapes and dtypes of the operands
    at the positions `places`.
    """

    def fake(*operands: Any) -> Any:
        made = [operands[i].new_empty(operands[i].shape) for i in places]
        return tuple(made) if len(made) > 1 else made[0]

    return fake


def differentiate(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    num_kept: int = 0,
    saves: Callable[..., Sequence[Any]] | None = None,
) -> Callable[..., Any]:
    """Return the operator `forward` with the autograd formula `backward`.

    The operands are tensors, followed by numbers. The last `num_kept` results of `forward` are not
    returned. Saved for backward are the tensors, these results and the numbers, in this order, or
    what `saves` returns for all operands and results, again tensors first. `backward` gets the
    gradients of the returned results, contiguous, then what was saved. It returns the gradients of
    as many operands as it likes, from the first on; the other operands get none.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            results = forward(*operands)
            if saves is None:
                tensors = [x for x in operands if isinstance(x, torch.Tensor)]
                kept = results[-num_kept:] if num_kept else ()
                saved = (*tensors, *kept, *operands[len(tensors) :])
            else:
                saved = saves(*operands, *results)
            tensors = [x for x in saved if isinstance(x, torch.Tensor)]
            ctx.save_for_backward(*tensors)
            ctx.numbers = saved[len(tensors) :]
            ctx.num_operands = len(operands)
            returned = results[:-num_kept] if num_kept else results
            return _as_views(returned) if torch.compiler.is_compiling() else returned

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: torch.Tensor):
            saved = (*ctx.saved_tensors, *ctx.numbers)  # under checkpointing, this recomputes
            found = backward(*(grad.contiguous() for grad in grads), *saved)
            return *found, *[None] * (ctx.num_operands - len(found))

    return Differentiable.apply


def _as_views(results: Any) -> Any:
    """Return views of the results of a compiled autograd function. In torch 2.11 a result that an
    operator of it has changed in place, or returned unchanged, gets no gradient (pytorch#180642).
    """
    if isinstance(results, torch.Tensor):
        return results.view_as(results)
    return tuple(x.view_as(x) for x in results)


@contextmanager
def recording() -> Generator[None]:
    """Record operations for autograd, even inside of an operator that compiled code or a dispatch
    mode, such as a counter of FLOPs, calls below autograd.
    """
    c = torch._C  # pyright: ignore[reportPrivateUsage]  # there is no public way
    with c._PreserveDispatchKeyGuard(), torch.enable_grad():  # pyright: ignore[reportPrivateUsage]
        c._dispatch_tls_set_dispatch_key_excluded(  # pyright: ignore[reportPrivateUsage]
            c.DispatchKey.AutogradFunctionality, False
        )
        yield


def find_stand_in(name: str) -> StandIn | None:
    """Return the function that a plan calls in place of `name`, because tensors have no values;
    None if no plan is being made.
    """
    return _stand_ins.get(name)


def use_triton(wanted: bool) -> None:
    """Turn titanlite's Triton kernels on CUDA on or off in this process
    (`training.triton_kernels`).
    """
    global _has_triton
    _has_triton = wanted


def has_triton(device: torch.device) -> bool:
    """Return True if Triton kernels may serve tensors on `device`."""
    return _has_triton and kernel_device(device) == "cuda"


@contextmanager
def plan_for_device(
    device_type: str, stand_ins: Mapping[str, StandIn] | None = None
) -> Generator[None]:
    """Choose kernels as for tensors on `device_type`, whatever their device is. Only for tensors
    without data.

    `stand_ins`, by name, are called in place of functions that need data.
    """
    global _planned_device, _stand_ins
    before = _planned_device, _stand_ins
    _planned_device = device_type
    _stand_ins = stand_ins or {}
    try:
        yield
    finally:
        _planned_device, _stand_ins = before


def kernel_device(device: torch.device) -> str:
    """Return the type of the device whose kernels serve a tensor on `device`."""
    return _planned_device or device.type


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Return float32, or the dtype of x if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or `param` itself if it is a plain tensor; for a
    parameter with `copies` (`distributed.fsdp.WeightCopies`), its copy. Differentiable.

    All arithmetic of titanlite's models runs on local tensors: DTensor dispatch costs 50 to 200 us
    per operation, and between FSDP2's all-gather and the kernel a DTensor's spec may have a
    different dtype than its data (up to torch 2.12). The gradient of a parameter that is replicated
    over tp is this rank's part of a sum; `reduce_replicated_grads` adds the parts once per step.
    """
    copies = getattr(param, "copies", None)
    if copies is not None:
        return copies.read(param)
    return param.to_local() if isinstance(param, DTensor) else param
