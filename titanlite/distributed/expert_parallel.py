"""Expert parallelism: experts are split over a mesh axis, tokens travel to them and back.

Rank r of n holds experts r * E / n to (r + 1) * E / n. Rows grouped by expert are therefore grouped by destination.

Shapes: T tokens, k experts per token, R = T * k rows sent, Q rows received, E experts, e = E / n local ones, D hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from titanlite.base import timers
from titanlite.distributed.activation_checkpoint import keep
from titanlite.distributed.collectives import all_to_all, all_to_all_single, register_group
from titanlite.distributed.parallel_dims import shard_parameters
from titanlite.models.interface import Model
from titanlite.ops import group_by_expert, permute_tokens
from titanlite.ops.permute import gather_sum

_assume_balanced: ContextVar[bool] = ContextVar("assume_balanced", default=False)


@contextmanager
def balanced_routing() -> Iterator[None]:
    """Send equally many rows to every rank, without a look at the counts: for tensors without data, to plan a run."""
    token = _assume_balanced.set(True)
    try:
        yield
    finally:
        _assume_balanced.reset(token)


def apply_expert_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Split the experts of every MoE layer over the one-axis `mesh`, in place, and let tokens travel.

    Attributes of parameters are kept. No collective is run; the model may be on meta.

    Raises:
        ConfigError: as `Model.split_experts`.
    """
    # Not compiled: ranks compile for different numbers of rows, and two graphs may order the same independent
    # collectives differently, which is a deadlock.
    dispatch: Any = torch.compiler.disable(ExpertParallelDispatcher(mesh.get_group()).dispatch)
    for experts in model.split_experts():
        shard_parameters(experts, mesh, {param: Shard(0) for param in experts.parameters()})
    model.set_dispatch(dispatch, mesh)


class ExpertParallelDispatcher:
    """Token dispatcher over a process group: all-to-all to the experts' ranks, grouped GEMM there, all-to-all back.

    Collectives: four per forward (counts, rows, weights, results); every rank of the group must call, with the same
    number of experts. One copy of the split sizes to the host per call, the only synchronization point. A recomputation
    of the layer sends the rows alone: it takes counts and weights from the forward, and needs no results.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._name, self._size = group, register_group(group), group.size()

    def dispatch(
        self, experts: Any, x_TD: torch.Tensor, topk_scores_Tk: torch.Tensor, topk_expert_ids_Tk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `TokenDispatcher`; `experts` is titanlite's `Experts`, or is called as that is."""
        token_R, rows_Tk, order_R, send, receive, order_Q, rows_Q1, offsets_e = keep(
            lambda: self._route(topk_expert_ids_Tk, experts.num_experts)
        )
        x_QD = all_to_all(permute_tokens(x_TD, token_R, rows_Tk), receive, send, self._name)
        weight_R = topk_scores_Tk.flatten().index_select(0, order_R)
        weight_Q = keep(lambda: all_to_all(weight_R, receive, send, self._name))
        y_QD = experts(x_QD, weight_Q.index_select(0, order_Q), order_Q, rows_Q1, offsets_e)
        return _Return.apply(y_QD, token_R, rows_Tk, send, receive, self._name), offsets_e

    def _route(self, topk_expert_ids_Tk: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        """Order of the rows here, how many go to each rank and come from it, and order of the rows received."""
        order_R, rows_Tk, counts_E = group_by_expert(topk_expert_ids_Tk, num_experts)
        sent_ne = counts_E.view(self._size, -1)
        received_ne = torch.empty_like(sent_ne)
        with timers.collective():
            all_to_all_single(received_ne, sent_ne, [1] * self._size, [1] * self._size, group=self._group)
        send, receive = self._splits(sent_ne, received_ne, order_R.numel())
        # Received rows are grouped by (sender, expert); the grouped GEMM wants them by expert.
        expert_of_block = torch.arange(received_ne.shape[1], device=order_R.device).repeat(self._size)
        expert_Q = expert_of_block.repeat_interleave(received_ne.flatten(), output_size=sum(receive))
        order_Q, rows_Q1, _ = group_by_expert(expert_Q.unsqueeze(1), received_ne.shape[1])
        offsets_e = received_ne.sum(0).cumsum(0).to(torch.int32)
        return order_R // topk_expert_ids_Tk.shape[1], rows_Tk, order_R, send, receive, order_Q, rows_Q1, offsets_e

    def _splits(self, sent_ne: torch.Tensor, received_ne: torch.Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """Rows that go to each rank, and that come from each."""
        send, receive = torch.stack([sent_ne.sum(1), received_ne.sum(1)]).tolist()  # synchronization point
        if _assume_balanced.get():
            even = [num_rows // self._size + (rank < num_rows % self._size) for rank in range(self._size)]
            return even, [even[self._group.rank()]] * self._size
        return send, receive


class _Return(torch.autograd.Function):
    """Results go back to their tokens' ranks and are summed there.

    No tensor is saved as such: a recomputation ends where the last one is, and leaves this exchange out.
    """

    @staticmethod
    def forward(ctx: Any, y_QD: Any, token_R: Any, rows_Tk: Any, send: Any, receive: Any, group: str) -> torch.Tensor:
        ctx.token_R, ctx.splits = token_R, (receive, send, group)
        return gather_sum(all_to_all(y_QD, send, receive, group), rows_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: torch.Tensor):
        dy_RD = dout_TD.index_select(0, ctx.token_R)
        return all_to_all(dy_RD, *ctx.splits), None, None, None, None, None
