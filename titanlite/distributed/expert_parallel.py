"""Expert parallelism: experts are split over a mesh axis, tokens travel to them and back.

Rank r of n holds experts r * E / n to (r + 1) * E / n.

Shapes: T tokens, k experts per token, C copies sent, P received, which become Q rows, E experts, e = E / n local ones,
D hidden.
"""

import math
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
from titanlite.distributed.activation_checkpoint import is_checkpointed, keep
from titanlite.distributed.collectives import all_to_all, register_group, start_all_to_all
from titanlite.distributed.parallel_dims import shard_parameters
from titanlite.models.interface import Model
from titanlite.ops import group_by_expert, permute_tokens
from titanlite.ops.permute import gather_sum

_assume_balanced: ContextVar[bool] = ContextVar("assume_balanced", default=False)


@contextmanager
def balanced_routing() -> Iterator[None]:
    """Give every rank the average number of tokens, whatever the router chose: to plan a run without data."""
    token = _assume_balanced.set(True)
    try:
        yield
    finally:
        _assume_balanced.reset(token)


def apply_expert_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Split the experts of every MoE layer over the one-axis `mesh`, in place, and dispatch tokens by all-to-all.

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
    """Token dispatcher over a process group: all-to-all to the experts' ranks, grouped GEMM there, all-to-all back. A
    token goes once to each rank that holds any of its experts; their results are summed there.

    Collectives: five per forward (counts, expert ids, tokens, weights, results); every rank of the group must call,
    with the same number of experts. One copy of the split sizes to the host per call, the only synchronization point. A
    recomputation of the layer repeats the exchange of tokens only: it keeps the forward's routing and needs no results.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name, self._size = register_group(group), group.size()

    def dispatch(
        self, experts: Any, x_TD: torch.Tensor, topk_scores_Tk: torch.Tensor, topk_expert_ids_Tk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `TokenDispatcher`; `experts` is titanlite's `Experts`, or has the same call signature."""
        token_C, rows_Tk, is_here_Ck, order_Q, rows_Pk, offsets_e, send, receive = keep(
            lambda: self._route(topk_expert_ids_Tk, experts.num_experts)
        )
        travel = _Travel(send, receive, self._name)
        x_PD = _Send.apply(permute_tokens(x_TD, token_C, rows_Tk), travel)
        weight_Ck = permute_tokens(topk_scores_Tk, token_C, rows_Tk) * is_here_Ck
        weight_Pk = keep(lambda: all_to_all(weight_Ck, receive, send, self._name))
        token_Q = order_Q // topk_expert_ids_Tk.shape[1]
        y_PD = experts(x_PD, weight_Pk.flatten().index_select(0, order_Q), token_Q, rows_Pk, offsets_e, travel)
        return _Return.apply(y_PD, token_C, rows_Tk, travel), offsets_e

    def _route(self, topk_expert_ids_Tk: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        """Return which token each copy sent is of and for which experts, and the order of the rows received.

        `rows_Tk` are the copies of each token, `rows_Pk` the rows of each copy received: k or fewer.
        """
        size, local = self._size, num_experts // self._size
        rank_Tk = topk_expert_ids_Tk // local
        is_again_Tk = (rank_Tk.unsqueeze(2) == rank_Tk.unsqueeze(1)).tril(-1).any(2)
        order, rows_Tk, copies_n = group_by_expert(rank_Tk.masked_fill(is_again_Tk, size), size)
        rows_n = torch.zeros_like(copies_n).scatter_add_(0, rank_Tk.flatten(), torch.ones_like(rank_Tk).flatten())
        sent_n2 = torch.stack([copies_n, rows_n], 1)
        received_n2 = all_to_all(sent_n2, [1] * size, [1] * size, self._name)
        send, receive, num_rows = self._splits(sent_n2, received_n2, topk_expert_ids_Tk.shape, num_experts)
        token_C = order[: sum(send)] // rank_Tk.shape[1]
        rank_C = torch.arange(size, device=order.device).repeat_interleave(copies_n, output_size=sum(send))
        is_here_Ck = rank_Tk.index_select(0, token_C) == rank_C.unsqueeze(1)
        ids_Ck = (topk_expert_ids_Tk.index_select(0, token_C) % local).masked_fill_(~is_here_Ck, local)
        ids_Ck = ids_Ck.to(torch.uint8 if local < 256 else torch.int32)
        order_Q, rows_Pk, counts_e = group_by_expert(all_to_all(ids_Ck, receive, send, self._name).long(), local)
        kept = (token_C.int(), rows_Tk.int(), is_here_Ck, order_Q[:num_rows].int(), rows_Pk.int())
        return *kept, counts_e.cumsum(0).to(torch.int32), send, receive

    def _splits(
        self, sent_n2: torch.Tensor, received_n2: torch.Tensor, shape: torch.Size, num_experts: int
    ) -> tuple[list[int], list[int], int]:
        """Return copies that go to each rank, copies that come from each, and how many rows those become."""
        send, _, receive, rows = torch.cat([sent_n2, received_n2], 1).T.tolist()  # synchronization point
        if not _assume_balanced.get():
            return send, receive, sum(rows)
        tokens, top_k = shape
        elsewhere = math.comb(num_experts - num_experts // self._size, top_k) / math.comb(num_experts, top_k)
        even = [round(tokens * (1 - elsewhere))] * self._size
        return even, even, tokens * top_k


class _Travel:
    """All-to-alls of one dispatch. In backward, that of the results' gradients may overlap with the recomputation of
    the layer, and that of the tokens' gradients with the weight gradients: see `ops.moe_experts.Travel`.
    """

    def __init__(self, send: list[int], receive: list[int], group: str) -> None:
        self.is_served, self.is_recomputed = False, is_checkpointed()
        self.there, self.back = (receive, send, group), (send, receive, group)
        self.sent: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, x: torch.Tensor, splits: tuple[Any, ...]) -> torch.Tensor:
        """Start an all-to-all of `x`; return its result, which is complete after `wait`."""
        out, self._work = start_all_to_all(x, *splits)
        return out

    def wait(self) -> None:
        """As `ops.moe_experts.Travel`."""
        if self._work is not None:
            with timers.collective():
                self._work.wait()
            self._work = None

    def begin(self, dx_TD: torch.Tensor) -> None:
        """As `ops.moe_experts.Travel`."""
        self.sent = self.start(dx_TD, self.back)


class _Send(torch.autograd.Function):
    """All-to-all of the tokens to the ranks of their experts. In backward the exchange may be in flight already."""

    @staticmethod
    def forward(ctx: Any, x_CD: torch.Tensor, travel: _Travel) -> torch.Tensor:
        ctx.travel = travel
        return all_to_all(x_CD, *travel.there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_PD: torch.Tensor):
        sent, ctx.travel.sent = ctx.travel.sent, None
        ctx.travel.wait()
        return all_to_all(dx_PD, *ctx.travel.back) if sent is None else sent, None


class _Return(torch.autograd.Function):
    """All-to-all of the results back to their tokens' ranks, where they are summed.

    No tensor is saved for backward: a recomputation stops after the last saved tensor, so it skips this exchange.
    """

    @staticmethod
    def forward(ctx: Any, y_PD: Any, token_C: Any, rows_Tk: Any, travel: _Travel) -> torch.Tensor:
        ctx.token_C, ctx.travel = token_C, travel
        return gather_sum(all_to_all(y_PD, *travel.back), rows_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: torch.Tensor):
        travel, dy_CD = ctx.travel, dout_TD.index_select(0, ctx.token_C)
        overlaps = travel.is_served and travel.is_recomputed
        dy_PD = travel.start(dy_CD, travel.there) if overlaps else all_to_all(dy_CD, *travel.there)
        return dy_PD, None, None, None
