"""The balancer: direction of the bias, integer counts, skipped steps; one process."""

import pytest
import torch

from titanlite.config import ModelConfig
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families
from titanlite.optim.expert_bias import ExpertBiasBalancer

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def one_rank(counts: torch.Tensor) -> None:
    """The sum over a single rank."""


def build(rate=0.01, family="qwen3_moe"):
    config: ModelConfig = families()[family].presets["debug"]
    model = build_decoder(config)
    materialize(model, "cpu")
    return model, ExpertBiasBalancer(model, rate, one_rank), [moe.gate for moe in model.moe_layers().values()]


def test_busy_experts_become_harder_to_choose():
    _, balancer, routers = build()
    routers[0].tokens_per_expert.copy_(torch.tensor([9, 0, 4, 4, 4, 4, 4, 3]))  # mean 4
    routers[1].tokens_per_expert.fill_(5)
    routers[2].tokens_per_expert.copy_(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0]))
    balancer.accumulate()
    counts = balancer.step(TRUE)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, torch.stack([router.tokens_per_expert for router in routers]))
    for router, signs in zip(routers, [[-1, 1, 0, 0, 0, 0, 0, 1], [0] * 8, [-1] + [1] * 7], strict=True):
        centred = torch.tensor(signs, dtype=torch.float32) - sum(signs) / 8
        # Float32 of 0.01 and one product.
        torch.testing.assert_close(router.expert_bias, 0.01 * centred, rtol=1e-6, atol=0)
    assert routers[0].expert_bias.dtype == torch.float32


def test_bias_of_a_frozen_router_stays():
    _, balancer, routers = build()
    routers[0].weight.requires_grad_(False)
    for router in routers:
        router.tokens_per_expert.copy_(torch.tensor([9, 0, 4, 4, 4, 4, 4, 3]))
    balancer.accumulate()
    assert torch.equal(balancer.step(TRUE)[0], routers[0].tokens_per_expert), "it is counted all the same"
    assert not routers[0].expert_bias.any() and routers[1].expert_bias.any()


def test_counts_above_two_to_the_24_are_exact():
    _, balancer, routers = build()
    big = 2**24
    counts = torch.full((8,), big)  # float32 cannot tell 2**24 and 2**24 + 1 apart, nor the mean from either
    counts[0] += 1
    routers[0].tokens_per_expert.copy_(counts)
    balancer.accumulate()
    assert torch.equal(balancer.step(TRUE)[0], counts)
    assert routers[0].expert_bias.sign().tolist() == [-1, 1, 1, 1, 1, 1, 1, 1]

    routers[1].tokens_per_expert.fill_(2**40)
    balancer.counts.zero_()
    balancer.accumulate()
    balancer.step(TRUE)
    assert torch.equal(routers[1].expert_bias, torch.zeros(8))


def test_micro_batches_add_up_and_a_step_starts_anew():
    _, balancer, routers = build()
    for value in (3, 4):
        for router in routers:
            router.tokens_per_expert.fill_(value)
        balancer.accumulate()
    assert torch.equal(balancer.step(TRUE), torch.full((3, 8), 7))
    assert torch.equal(balancer.step(TRUE), torch.zeros(3, 8, dtype=torch.int64))


def test_biases_add_up_over_steps():
    _, balancer, routers = build(rate=0.5)
    for _ in range(3):
        routers[0].tokens_per_expert.copy_(torch.tensor([8, 0, 4, 4, 4, 4, 4, 4]))
        balancer.accumulate()
        balancer.step(TRUE)
    assert routers[0].expert_bias.tolist() == [-1.5, 1.5, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("finite", [TRUE, FALSE])
def test_rate_zero_or_a_skipped_step_leaves_the_bias(finite):
    _, balancer, routers = build(rate=0.0 if finite else 0.01)
    routers[0].expert_bias.fill_(0.25)
    routers[0].tokens_per_expert.copy_(torch.arange(8))
    balancer.accumulate()
    assert torch.equal(balancer.step(finite)[0], torch.arange(8))
    assert torch.equal(routers[0].expert_bias, torch.full((8,), 0.25))
    assert balancer.counts.count_nonzero() == 0


def test_dense_model_has_nothing_to_balance():
    _, balancer, _ = build(family="qwen3")
    balancer.accumulate()
    assert balancer.step(TRUE) is None


def test_bias_evens_out_the_load_of_a_fixed_batch():
    model, balancer, routers = build(rate=0.002)
    model.train()
    tokens = torch.randint(2048, (8, 32), generator=torch.Generator().manual_seed(0))
    loads = []
    with torch.no_grad():
        for _ in range(40):
            model(tokens)
            balancer.accumulate()
            counts = balancer.step(TRUE).double()
            loads.append((counts.amax(dim=1) / counts.mean(dim=1)).max().item())
    assert loads[-1] < 0.8 * loads[0]
    assert all(router.expert_bias.isfinite().all() for router in routers)
