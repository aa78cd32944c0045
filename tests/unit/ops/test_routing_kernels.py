"""Kernels of routing against float64: on a GPU as compiled, without one in Triton's interpreter."""

import pytest
import torch
from triton_interpreter import DEVICE, NEEDS_KERNELS, ON_GPU
from unit.models.conftest import build_ours, small_config

from titanlite.config.model import ModelConfig
from titanlite.config.schema import ActivationCheckpointSection
from titanlite.distributed.parallelize import checkpoint_layers
from titanlite.ops import group_by_expert, routing

pytestmark = [NEEDS_KERNELS, *ON_GPU]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Take the kernels on the CPU, too, except for float64. Fresh memory is NaN, or the smallest
    integer.
    """
    monkeypatch.setattr(routing, "takes_kernels", lambda x: x.dtype != torch.float64)

    def poisoned(make):
        def call(*args, **options):
            made = make(*args, **options)
            lowest = {torch.int32: -(2**31), torch.int64: -(2**63)}
            return made.fill_(lowest.get(made.dtype, float("nan")))

        return call

    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def make_config(num_experts, top_k, func="softmax", *, normalized=True, groups=1, limited=1):
    return ModelConfig(
        num_experts=num_experts,
        top_k=top_k,
        score_func=func,
        norm_topk_prob=normalized,
        num_expert_groups=groups,
        num_limited_groups=limited,
    )


def normalize(scores):
    return scores / scores.sum(-1, keepdim=True)


def expect(logits, bias, config):
    """Return scores and ids; of equal values the one with the lowest number comes first."""
    scores = logits.softmax(-1) if config.score_func == "softmax" else logits.sigmoid()
    choice = scores + bias
    grouped = choice.unflatten(-1, (config.num_expert_groups, -1))
    sums = grouped.sort(descending=True).values[..., :2].sum(-1)
    groups = sums.sort(descending=True, stable=True).indices[..., : config.num_limited_groups]
    is_allowed = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, groups, True)
    choice = grouped.masked_fill(~is_allowed[..., None], -float("inf")).flatten(-2)
    return scores, choice.sort(descending=True, stable=True).indices[..., : config.top_k]


CASES = {
    "three blocks of tokens": (make_config(128, 8), (2, 40), True),
    "no power of two": (make_config(24, 6, normalized=False), (3, 9), False),
    "one choice": (make_config(8, 1), (1, 7), True),
    "sigmoid": (make_config(16, 4, "sigmoid"), (2, 5), True),
    "many experts": (make_config(384, 8, "sigmoid"), (1, 11), False),
    "sigmoid, not normalized": (make_config(12, 5, "sigmoid", normalized=False), (1, 3), True),
    "groups": (make_config(40, 4, "sigmoid", groups=8, limited=3), (2, 9), True),
    "groups of one": (make_config(6, 2, groups=6, limited=3), (1, 20), False),
    "no tokens": (make_config(8, 2), (2, 0), True),
    "no sequences": (make_config(8, 2), (0, 4), True),
}


@pytest.mark.parametrize("name", CASES)
def test_choice_and_gradients(name):
    config, (batch, size), is_padded = CASES[name]
    logits = (2 * torch.randn(batch, size, config.num_experts, device=DEVICE)).requires_grad_()
    bias = torch.randn(config.num_experts, device=DEVICE) / 30
    lengths = size - torch.arange(batch, device=DEVICE).unsqueeze(1) - 1
    real = torch.arange(size, device=DEVICE) < (lengths if is_padded else size)
    real = real.expand(batch, size)
    valid = real if is_padded else None
    weights, ids, counts, sums = routing.choose_experts(
        logits.detach(), bias, valid, config, counts=True, sums=True
    )
    wide = logits.detach().double().requires_grad_()
    scores, exact_ids = expect(wide, bias.double(), config)
    assert torch.equal(ids, exact_ids.flatten(0, 1))
    chosen = torch.zeros_like(scores, dtype=torch.int64).scatter(-1, exact_ids, 1)
    assert torch.equal(counts.sum(1), (chosen * real.unsqueeze(2)).sum(1))
    exact_weights = scores.gather(-1, exact_ids).flatten(0, 1)
    exact_weights = normalize(exact_weights) if config.norm_topk_prob else exact_weights
    exact_sums = (normalize(scores) * real.unsqueeze(2)).sum(1)
    check(sums.sum(1), exact_sums)
    upstream, load = torch.randn_like(weights), torch.rand(batch, config.num_experts).to(DEVICE)
    for factor in (load, None):
        found, aux = routing.WeighExperts.apply(
            config, logits, valid, weights, ids, factor, sums.sum(1)
        )
        check(found, exact_weights)
        loss, exact_loss = (found * upstream).sum(), (exact_weights * upstream).sum()
        if factor is None:
            assert aux is None
        else:
            exact_aux = (load * exact_sums).sum()
            check(aux, exact_aux)
            loss, exact_loss = loss + 0.7 * aux, exact_loss + 0.7 * exact_aux
        (gradient,) = torch.autograd.grad(loss, logits)
        check(gradient, *torch.autograd.grad(exact_loss, wide, retain_graph=True))


def check(actual, exact):
    """Values and gradients are of order 1, and exact to 1e-7 of the largest summand."""
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), exact, rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("name", ["three blocks of tokens", "groups"])
def test_of_equal_scores_the_lowest_number_is_chosen(name):
    config, shape, _ = CASES[name]
    logits = torch.randint(3, (*shape, config.num_experts), device=DEVICE).float()
    bias = torch.zeros(config.num_experts, device=DEVICE)
    _, ids, *_ = routing.choose_experts(logits, bias, None, config, counts=True, sums=True)
    assert torch.equal(ids, expect(logits, bias, config)[1].flatten(0, 1))


@pytest.mark.parametrize("name", ["no power of two", "groups"])
def test_nan_is_chosen_and_ids_are_valid(name):
    """The weights are NaN, so that the step is skipped."""
    config, shape, _ = CASES[name]
    logits = torch.zeros(*shape, config.num_experts, device=DEVICE)
    logits[0, 0] = float("nan")
    logits[0, 1, 7] = float("nan")
    bias = torch.zeros(config.num_experts, device=DEVICE)
    weights, ids, *_ = routing.choose_experts(logits, bias, None, config, counts=True, sums=True)
    assert weights[:2].isnan().any(1).all() and weights[2:].isfinite().all()
    ids = ids.sort().values
    assert (ids >= 0).all() and (ids < config.num_experts).all() and (ids.diff() > 0).all()


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_ids", "num_unknown"),
    [(0, 4, 8, 0), (1, 1, 8, 0), (150, 8, 24, 0), (33, 3, 384, 0), (70, 2, 5, 9), (4, 2, 4, 1)],
)
def test_rows_are_in_the_order_of_their_ids_and_tokens(num_tokens, top_k, num_ids, num_unknown):
    ids = torch.randint(num_ids + num_unknown, (num_tokens, top_k), device=DEVICE)
    ids[:, 0] = 1  # many rows of one expert
    known = ids.flatten().clamp(max=num_ids)
    expected = known.sort(stable=True).indices
    num_rows = int((known < num_ids).sum())
    for kept in {None, num_rows}:
        order, token, rows, ends = group_by_expert(ids, num_ids, kept)
        assert torch.equal(order.long(), expected[:kept])
        assert torch.equal(token.long(), expected[:kept] // top_k)
        assert torch.equal(rows.flatten().long(), expected.argsort())
        counts = torch.bincount(known, minlength=num_ids)[:num_ids]
        assert torch.equal(ends.long(), counts.cumsum(0))
        assert {order.dtype, token.dtype, rows.dtype, ends.dtype} == {torch.int32}


@pytest.mark.parametrize("family", ["qwen3_moe", "dots1"])  # softmax, and sigmoid with a bias
def test_a_decoder_has_the_same_losses_counts_and_gradients(family, monkeypatch):
    model = build_ours(small_config(family, num_layers=2)).to(DEVICE)
    routers = [moe.gate for moe in model.moe_layers().values()]
    model.set_loss_coeffs(aux=0.1, z=0.1)
    tokens = torch.randint(31, (2, 5), device=DEVICE)
    targets = tokens.clone()
    targets[1, 3:] = -100
    checkpoint_layers(model, ActivationCheckpointSection(mode="full"))
    found = []
    for is_fused in (True, False):
        monkeypatch.setattr(routing, "takes_kernels", lambda x, wanted=is_fused: wanted)
        sums = model(tokens, targets)
        grads = torch.autograd.grad(sums.cross_entropy + sums.aux, list(model.parameters()))
        counts = [router.tokens_per_expert.clone() for router in routers]
        found.append(([sums.cross_entropy, sums.aux, *grads], counts))
    (fused, fused_counts), (composed, counts) = found
    assert all(map(torch.equal, fused_counts, counts))
    for one, other in zip(fused, composed, strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm()


def test_operators_without_data_have_the_shapes_of_those_with():
    ops, tests = torch.ops.titanlite, ("test_schema", "test_faketensor")
    logits, bias = torch.randn(2, 40, 128, device=DEVICE), torch.zeros(128, device=DEVICE)
    valid = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    flags = (True, False)
    weights, ids, _, sums = ops.choose_experts(logits, bias, None, 8, 1, 1, *flags)
    saved = (logits, valid, weights, ids, sums.sum(1))
    for op, operands in {
        ops.choose_experts: (logits, bias, valid, 8, 4, 2, *flags),
        ops.weigh_experts_backward: (weights, weights.sum(), *saved, *flags),
        ops.group_rows: (ids, 100, 50),
    }.items():
        torch.library.opcheck(op.default, operands, test_utils=tests)
