"""FSDP's collectives: titanlite's, with a clock around them, through FSDP2's public seams for custom communication."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from titanlite.base import timers
from titanlite.distributed.collectives import all_gather_single, reduce_scatter_single


def time_collectives(module: FSDPModule, *, has_replicas: bool) -> None:
    """Count all-gathers, reduce-scatters and, with replicas, all-reduces of `module` for the active timer."""
    scatter: Any = _TimedReduceScatter()
    gather: Any = _TimedAllGather()
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(scatter)
    if has_replicas:  # without, the hook would move what follows the reduce-scatter to another stream
        module.set_all_reduce_hook(scatter.after_all_reduce)


class _Allocator:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _TimedAllGather(_Allocator):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with timers.collective(on_own_stream=True):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _TimedReduceScatter(_Allocator):
    """The all-reduce over replicas follows on the same or a later stream, and there is a hook only behind it.

    So its time begins where FSDP allocated the buffer of the result, or where the reduce-scatter ended.
    """

    def __init__(self) -> None:
        self._since: Any = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = super().allocate(size, dtype=dtype, device=device)
        self._note()
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with timers.collective(on_own_stream=True):
            work = reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        self._note()
        return work

    def after_all_reduce(self, reduced: torch.Tensor) -> None:
        timer = timers.get_active()
        if timer is not None and self._since is not None:
            timer.add_collective(self._since, timer.mark(), on_own_stream=True)
        self._since = None

    def _note(self) -> None:
        timer = timers.get_active()
        self._since = None if timer is None else timer.mark()
