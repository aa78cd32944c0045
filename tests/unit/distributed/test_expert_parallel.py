"""Which copies of tokens go to which rank, without ranks."""

import pytest
import torch

from titanlite.distributed import expert_parallel


@pytest.mark.parametrize("ranks", [2, 128])
def test_copies_are_sorted_by_rank(ranks, monkeypatch):
    """Every rank alike, so that what is sent is received; as many ranks as experts have the largest
    keys.
    """
    monkeypatch.setattr(expert_parallel, "all_to_all", lambda x, *_: x)
    dispatcher = object.__new__(expert_parallel.ExpertParallelDispatcher)
    dispatcher._name, dispatcher._size = "", ranks
    ids_Tk = torch.rand(40, 128, generator=torch.Generator().manual_seed(0)).topk(4).indices
    token_C, _, order_Q, _, _, ends_e, send, receive = dispatcher._route(ids_Tk, 128)
    of_ranks = [torch.where((ids_Tk // (128 // ranks) == rank).any(1))[0] for rank in range(ranks)]
    assert token_C.tolist() == torch.cat(of_ranks).tolist()
    assert send == receive == [len(tokens) for tokens in of_ranks]
    local = [(ids_Tk - 128 // ranks * rank)[tokens] for rank, tokens in enumerate(of_ranks)]
    here = torch.cat(local).clamp(-1, 128 // ranks)
    counts = [int((here == expert).sum()) for expert in range(128 // ranks)]
    assert ends_e.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert len(order_Q) == sum(counts)
