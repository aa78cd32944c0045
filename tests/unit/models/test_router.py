"""Router: selection and weights, counts, balance losses."""

from dataclasses import replace

import pytest
import torch

from titanlite.config import ModelConfig
from titanlite.materialize import materialize
from titanlite.models.interface import SequencePart
from titanlite.models.moe import Router

CONFIG = ModelConfig(
    hidden_size=12,
    num_experts=6,
    top_k=2,
    moe_intermediate_size=8,
    initializer_range=0.5,
    norm_topk_prob=False,
)


def build(**changes):
    with torch.device("meta"):
        router = Router(replace(CONFIG, **changes))
    materialize(router, "cpu", seed=3)
    return router.train()


def make_tokens(seed=0, dtype=torch.float32):
    return torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scores_of(router, x):
    logits = x.flatten(0, 1) @ router.weight.T
    return logits.softmax(-1) if router.config.score_func == "softmax" else logits.sigmoid()


def test_scores_are_float32_in_a_bfloat16_model():
    with torch.device("meta"):
        router = Router(CONFIG).to(torch.bfloat16)
    materialize(router, "cpu", seed=3)
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias.dtype == torch.float32
    x = make_tokens(dtype=torch.bfloat16)
    routing = router(x)
    assert routing.topk_scores_Tk.dtype == torch.float32
    exact = (x.flatten(0, 1).float() @ router.weight.float().T).softmax(-1)
    expected = exact.gather(1, routing.topk_expert_ids_Tk)
    torch.testing.assert_close(routing.topk_scores_Tk, expected, rtol=1e-5, atol=0)


def test_choices_of_real_tokens_are_counted_in_training_alone():
    router, x = build(), make_tokens()
    valid = torch.ones(2, 7, dtype=torch.bool)
    for num_valid in (14, 5):  # all, and without padding
        valid.view(-1)[num_valid:] = False
        routing = router(x, valid)
        assert routing.topk_expert_ids_Tk.shape == (14, 2), "padding is routed"
        expected = torch.bincount(routing.topk_expert_ids_Tk[:num_valid].flatten(), minlength=6)
        assert torch.equal(router.tokens_per_expert, expected) and expected.sum() == 2 * num_valid
    assert routing.aux_loss is None, "without a coefficient"
    router.eval()
    router.aux_loss_coeff = 0.1
    assert router(make_tokens(seed=9)).aux_loss is None
    assert torch.equal(router.tokens_per_expert, expected)


def naive_balance_loss(router, x, valid, ids):
    """arXiv:2412.19437, eq. 17 to 20, of every sequence, times its number of tokens (the code sums
    over tokens).
    """
    num_experts, top_k = router.config.num_experts, router.config.top_k
    total = 0.0
    for b in range(x.shape[0]):
        tokens = [t for t in range(x.shape[1]) if valid is None or valid[b, t]]
        if not tokens:
            continue
        scores = scores_of(router, x[b : b + 1])
        for i in range(num_experts):
            chosen = sum(
                1 for t in tokens if i in ids.view(x.shape[0], x.shape[1], -1)[b, t].tolist()
            )
            f_i = num_experts / (top_k * len(tokens)) * chosen
            p_i = sum(scores[t, i] / scores[t].sum() for t in tokens) / len(tokens)
            total = total + f_i * p_i * len(tokens)
    return total


@pytest.mark.parametrize(
    ("score_func", "normalized", "padded"),
    [("softmax", False, True), ("softmax", True, False), ("sigmoid", True, True)],
)
def test_weights_and_balance_loss_and_their_gradients(score_func, normalized, padded):
    router = build(score_func=score_func, norm_topk_prob=normalized, routed_scaling_factor=1.5)
    x, valid, router.aux_loss_coeff = make_tokens(), None, 0.3
    router.expert_bias[1] = 3.0
    if padded:
        valid = torch.ones(2, 7, dtype=torch.bool)
        valid[0, 4:] = False
    routing = router(x, valid)
    ids = routing.topk_expert_ids_Tk
    weights = scores_of(router, x).gather(1, ids)
    weights = 1.5 * (weights / weights.sum(dim=1, keepdim=True) if normalized else weights)
    balance = 0.3 * naive_balance_loss(router, x, valid, ids)
    # float32, sums of 12 terms; the pull of the experts nearly cancels in softmax, so gradients
    # have an absolute bound.
    torch.testing.assert_close(routing.topk_scores_Tk, weights, rtol=1e-5, atol=0)
    torch.testing.assert_close(routing.aux_loss, balance, rtol=1e-5, atol=0)
    upstream = torch.randn(14, 2)
    for actual, expected in (
        (routing.topk_scores_Tk * upstream, weights * upstream),
        (routing.aux_loss, balance),
    ):
        gradients = [
            torch.autograd.grad(y.sum(), router.weight, retain_graph=True)[0]
            for y in (actual, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=3e-5)


def test_sequence_sum_sees_the_counts_of_each_sequence():
    router, x = build(), make_tokens()
    router.aux_loss_coeff = 1.0
    plain = router(x).aux_loss
    seen = []
    # ranks with equal halves
    router.sequence_parts = [
        SequencePart(lambda x: x, lambda counts: seen.append(counts.clone()) or counts * 2)
    ]
    torch.testing.assert_close(router(x).aux_loss, plain, rtol=1e-6, atol=0)
    assert seen[0].shape == (2, 6)
    assert seen[0].dtype == torch.int64


@pytest.mark.parametrize("padded", [False, True])
def test_z_loss(padded):
    router, x = build(), make_tokens()
    router.z_loss_coeff = 0.5
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 2:] = not padded
    logits = (x @ router.weight.T)[valid]
    expected = 0.5 * logits.exp().sum(-1).log().square().sum()
    actual = router(x, valid).aux_loss
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    gradients = [torch.autograd.grad(loss, router.weight)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
