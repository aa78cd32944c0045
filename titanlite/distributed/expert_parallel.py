"""Expert parallelism: experts are split over a mesh axis; all-to-alls send tokens to the experts'
ranks and the results back. Rank r of n holds experts r * E / n to (r + 1) * E / n.

Shapes: T tokens, k experts per token, C token copies sent, P token copies received, Q (token,
expert) rows made of them, E experts, e = E / n local experts, D hidden.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from titanlite.distributed.collectives import all_to_all, register_group, start_all_to_all
from titanlite.distributed.shard import shard_parameters
from titanlite.models.interface import Model
from titanlite.ops import group_by_expert
from titanlite.ops.kernels import find_stand_in
from titanlite.ops.moe_experts import gather_sum
from titanlite.ops.recompute import forward_values, once_per_forward


def apply_expert_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Split the experts of every MoE layer over the one-axis `mesh`, in place, and dispatch tokens
    by all-to-all.

    Parameters keep their attributes. This function runs no collective; the model may be on meta.

    Raises ConfigError as `Model.split_experts`.
    """
    # The dispatcher is not compiled: ranks compile for different numbers of rows, and two graphs
    # may order the same independent collectives differently, which is a deadlock.
    dispatch: Any = torch.compiler.disable(ExpertParallelDispatcher(mesh.get_group()).dispatch)
    for experts in model.split_experts():
        shard_parameters(experts, mesh, {param: Shard(0) for param in experts.parameters()})
    model.set_dispatch(dispatch)


class ExpertParallelDispatcher:
    """Token dispatcher over a process group: all-to-all to the experts' ranks, grouped GEMM there,
    all-to-all back. A token is sent once to each rank that holds any of its experts, and that rank
    sums the results of these experts.

    Collectives: five per forward (counts, expert ids, tokens, weights, results); every rank of the
    group must call, with the same number of experts. Each call copies the split sizes to the host
    once; this is the only synchronization point. A recomputation of the layer repeats only the
    all-to-all of tokens: it reuses the forward's routing and does not need the results.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name = register_group(group)
        self._size = group.size()

    def dispatch(
        self, experts: Any, x_TD: Tensor, topk_scores_Tk: Tensor, topk_expert_ids_Tk: Tensor
    ) -> Tensor:
        """Implement `TokenDispatcher`; `experts` is titanlite's `Experts`, or has the same call
        signature.
        """
        token_C, rows_Tk, order_Q, token_Q, rows_Pk, ends_e, send, receive = once_per_forward(
            lambda: self._route(topk_expert_ids_Tk, experts.num_experts)
        )
        exchange = _Exchange(send, receive, self._name)
        x_PD = _Send.apply(x_TD, token_C, rows_Tk, None, exchange)
        weight_Q = once_per_forward(
            lambda: _Send.apply(topk_scores_Tk, token_C, rows_Tk, order_Q, exchange)
        )
        y_PD = experts(x_PD, weight_Q, token_Q, rows_Pk, ends_e, exchange)
        return _Return.apply(y_PD, token_C, rows_Tk, exchange)

    def _route(self, topk_expert_ids_Tk: Tensor, num_experts: int) -> tuple[Any, ...]:
        """Decide which token copies go to which rank, exchange expert ids, and group the received
        rows by expert.

        In the result, `rows_Tk` has the index of the copy that is sent for each choice of a token;
        C or more means that no copy is sent for it. `rows_Pk` has the indices of the rows that are
        made of each received copy, at most k; Q or more means no row.
        """
        size = self._size
        local = num_experts // size
        # A token is sent to a rank once, even if several of its experts are there. Its choices are
        # sorted by a key. The key of the first choice on a rank is the rank: this copy is sent. The
        # key of a further choice there is rank + size: it is only counted, so that the receiver
        # knows its number of rows.
        rank_Tk = topk_expert_ids_Tk // local
        is_again_Tk = (rank_Tk.unsqueeze(2) == rank_Tk.unsqueeze(1)).tril(-1).any(2)
        key_Tk = rank_Tk + size * is_again_Tk
        order_R, token_R, rows_Tk, ends_2n = group_by_expert(key_Tk, 2 * size)
        counts_2n = ends_2n.diff(prepend=ends_2n.new_zeros(1)).view(2, size)
        sent_n2 = counts_2n.T.contiguous()  # copies and further choices for each rank
        received_n2 = all_to_all(sent_n2, [1] * size, [1] * size, self._name)
        send, receive, num_rows = self._splits(
            sent_n2, received_n2, topk_expert_ids_Tk.shape, num_experts
        )
        token_C = token_R[: sum(send)]
        rank_C1 = key_Tk.flatten().index_select(0, order_R[: sum(send)]).unsqueeze(1)
        # Local expert ids; experts of other ranks get an id of `local` or more.
        ids_Ck = (topk_expert_ids_Tk.index_select(0, token_C) - local * rank_C1) % (2 * num_experts)
        ids_Pk = all_to_all(ids_Ck, receive, send, self._name)
        order_Q, token_Q, rows_Pk, ends_e = group_by_expert(ids_Pk, local, num_rows)
        return token_C, rows_Tk, order_Q.int(), token_Q, rows_Pk, ends_e, send, receive

    def _splits(
        self, sent_n2: Tensor, received_n2: Tensor, shape: torch.Size, num_experts: int
    ) -> tuple[list[int], list[int], int]:
        """Return the number of copies sent to each rank, the number received from each rank, and
        the number of rows received.
        """
        sent, received = torch.stack([sent_n2, received_n2]).tolist()  # synchronization point
        stand_in = find_stand_in("expert_splits")
        if stand_in is not None:
            return stand_in(shape, num_experts, self._size)
        send = [copies for copies, _ in sent]
        receive = [copies for copies, _ in received]
        return send, receive, sum(map(sum, received))


class _Exchange:
    """All-to-alls of one dispatch.

    In backward, the all-to-all of the results' gradients may overlap with the recomputation of the
    layer, and the all-to-all of the tokens' gradients with the weight gradients: see
    `ops.moe_experts.Exchange`.
    """

    def __init__(self, send: list[int], receive: list[int], group: str) -> None:
        self.is_served = False
        self.is_recomputed = forward_values.get() is not None
        self.to_experts = (receive, send, group)
        self.to_tokens = (send, receive, group)
        self.sent: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, x: Tensor, splits: tuple[Any, ...]) -> Tensor:
        """Start an all-to-all of `x`; return its result, which is complete after `wait`."""
        out, self._work = start_all_to_all(x, *splits)
        return out

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def begin(self, dx_TD: Tensor) -> None:
        self.sent = self.start(dx_TD, self.to_tokens)


class _Send(torch.autograd.Function):
    """All-to-all of the tokens to the ranks of their experts. In backward the all-to-all of the
    gradients may already be in flight.

    With `order_Q` it sends the router weights of all choices, and selects the weight of each
    received row.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Any, token_C: Any, rows_Tk: Any, order_Q: Any, exchange: _Exchange
    ) -> Tensor:
        x_PD = all_to_all(x_TD.index_select(0, token_C), *exchange.to_experts)
        ctx.rows_Tk = rows_Tk
        ctx.order_Q = order_Q
        ctx.exchange = exchange
        ctx.shape = x_PD.shape
        return x_PD if order_Q is None else x_PD.flatten().index_select(0, order_Q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor):
        exchange = ctx.exchange
        sent = None
        if ctx.order_Q is None:
            sent = exchange.sent
            exchange.sent = None
            exchange.wait()
        else:
            dx = dx.new_zeros(ctx.shape.numel()).index_add_(0, ctx.order_Q, dx).view(ctx.shape)
        sent = all_to_all(dx, *exchange.to_tokens) if sent is None else sent
        return gather_sum(sent, ctx.rows_Tk), None, None, None, None


class _Return(torch.autograd.Function):
    """All-to-all of the results back to their tokens' ranks, which sum them.

    No tensor is saved for backward: a recomputation stops after the last saved tensor, so it skips
    this all-to-all.
    """

    @staticmethod
    def forward(ctx: Any, y_PD: Any, token_C: Any, rows_Tk: Any, exchange: _Exchange) -> Tensor:
        ctx.token_C = token_C
        ctx.exchange = exchange
        return gather_sum(all_to_all(y_PD, *exchange.to_tokens), rows_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor):
        exchange = ctx.exchange
        dy_CD = dout_TD.index_select(0, ctx.token_C)
        overlaps = exchange.is_served and exchange.is_recomputed
        dy_PD = (
            exchange.start(dy_CD, exchange.to_experts)
            if overlaps
            else all_to_all(dy_CD, *exchange.to_experts)
        )
        return dy_PD, None, None, None
