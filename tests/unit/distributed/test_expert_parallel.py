"""Which copies of tokens go to which rank, and how they travel."""

import pytest
import torch
import torch.distributed as dist

from titanlite.distributed import collectives, expert_parallel


@pytest.mark.parametrize("ranks", [2, 128])
def test_copies_are_sorted_by_rank(ranks, monkeypatch):
    """Every rank alike, so that what is sent is received; as many ranks as experts have the largest
    keys.
    """
    monkeypatch.setattr(expert_parallel, "all_to_all", lambda x, *_: x)
    dispatcher = object.__new__(expert_parallel.ExpertParallelDispatcher)
    dispatcher._name, dispatcher._size = "", ranks
    ids_Tk = torch.rand(40, 128).topk(4).indices
    token_C, _, order_Q, _, _, ends_e, send, receive = dispatcher._route(ids_Tk, 128)
    of_ranks = [torch.where((ids_Tk // (128 // ranks) == rank).any(1))[0] for rank in range(ranks)]
    assert token_C.tolist() == torch.cat(of_ranks).tolist()
    assert send == receive == [len(tokens) for tokens in of_ranks]
    local = [(ids_Tk - 128 // ranks * rank)[tokens] for rank, tokens in enumerate(of_ranks)]
    here = torch.cat(local).clamp(-1, 128 // ranks)
    counts = [int((here == expert).sum()) for expert in range(128 // ranks)]
    assert ends_e.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert len(order_Q) == sum(counts)


def test_parts_of_different_sizes_go_back_as_gradients(run_ranks):
    rows = [[1, 2], [3, 0]]  # of each rank for each rank

    def rank_main():
        rank = dist.get_rank()
        x = (10.0 * rank + torch.arange(3)).requires_grad_()
        send, receive = rows[rank], [row[rank] for row in rows]
        y = collectives.all_to_all(x, receive, send, collectives.register_group(dist.group.WORLD))
        (grad,) = torch.autograd.grad(y, x, 2 * y.detach())
        return y.tolist(), (grad / 2 - x).tolist()

    assert run_ranks(2, rank_main) == [([0, 10, 11, 12], [0] * 3), ([1, 2], [0] * 3)]
