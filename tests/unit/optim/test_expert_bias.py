"""What balances experts by default, and the bias: its direction, integer counts, skipped steps; one
process.
"""

from dataclasses import replace

import pytest
import torch
from files import read_table

from tests.loading import hf_config
from titanlite.config import JobConfig
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families, family_of
from titanlite.models.families.config_json import transformers_config
from titanlite.optim.expert_bias import (
    AUX_LOSS_COEFF,
    BIAS_UPDATE_RATE,
    ExpertBiasBalancer,
    advise_balancing,
    complete_balancing,
)

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def one_rank(counts):
    """The sum over a single rank."""


def build(rate=0.01):
    model = build_decoder(families()["qwen3_moe"].presets["debug"])
    materialize(model, "cpu")
    routers = [moe.gate for moe in model.moe_layers().values()]
    return model, ExpertBiasBalancer(model, rate, one_rank), routers


def complete(family="qwen3_moe", before=None, weights="", sizes=None, **given):
    """Return the rate of the bias and the coefficient of the loss that a run has."""
    job = JobConfig()
    job.checkpoint.initial_load_path = weights
    for name, value in given.items():
        setattr(job.moe, name, value)
    config = replace(families()[family].presets["debug"], **(sizes or {}))
    completed = complete_balancing(job.moe, config, before, has_weights=bool(weights))
    again = complete_balancing(completed, config, before, has_weights=bool(weights))
    assert again == completed, "a saved configuration says the same"
    return completed.expert_bias_update_rate, completed.aux_loss_coeff


def advise(job, model):
    return advise_balancing(job.moe, job.model.implementation, model)


@pytest.mark.parametrize("family", families())
def test_from_random_weights_every_moe_is_balanced(family):
    config = families()[family].presets["debug"]
    if not config.num_experts:
        assert complete(family) == (None, None)
    elif family_of(config).expert_bias_key is None:
        assert complete(family) == (None, AUX_LOSS_COEFF)
    else:
        assert complete(family) == (BIAS_UPDATE_RATE, None)
    assert complete(family, weights="folder") == (None, None), (
        "trained weights are as their model's authors left them"
    )


@pytest.mark.parametrize("case", read_table("balancing")["cases"])
def test_what_is_set_and_what_a_run_had_wins(case):
    defaults = {"rate": BIAS_UPDATE_RATE, "coeff": AUX_LOSS_COEFF, "none": None}
    expected = [defaults.get(value, value) for value in case["expected"]]
    assert list(complete(**case["given"])) == expected


def test_idle_experts_are_told_what_to_set():
    job = JobConfig()
    model, _, routers = build()
    assert (
        advise(job, model) == f"Nothing balances them: set moe.aux_loss_coeff = {AUX_LOSS_COEFF:g}."
    )
    job.moe.aux_loss_coeff = 0.02
    assert advise(job, model) == "Raise moe.aux_loss_coeff, which is 0.02."
    job.moe.expert_bias_update_rate = 1e-3
    assert advise(job, model) == "Raise moe.expert_bias_update_rate, which is 0.001."
    for router in routers:
        router.weight.requires_grad_(False)
    assert "aux_loss_coeff" in advise(job, model), "a bias beside a frozen router does not move"


def test_a_class_of_transformers_has_no_setting():
    job = JobConfig()
    config = families()["qwen3_moe"].presets["debug"]
    model = build_transformers(transformers_config(hf_config(config).to_dict(), "test"))
    assert complete_balancing(job.moe, model.config, has_weights=False) == job.moe
    assert advise(job, model).startswith("transformers' Qwen3MoeForCausalLM routes by itself")


def test_busy_experts_become_harder_to_choose():
    _, balancer, routers = build()
    routers[0].tokens_per_expert.copy_(torch.tensor([9, 0, 4, 4, 4, 4, 4, 3]))  # mean 4
    routers[1].tokens_per_expert.fill_(5)
    routers[2].tokens_per_expert.copy_(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0]))
    balancer.accumulate()
    counts = balancer.step(TRUE)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, torch.stack([router.tokens_per_expert for router in routers]))
    for router, signs in zip(
        routers, [[-1, 1, 0, 0, 0, 0, 0, 1], [0] * 8, [-1] + [1] * 7], strict=True
    ):
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
    assert torch.equal(balancer.step(TRUE)[0], routers[0].tokens_per_expert), (
        "it is counted all the same"
    )
    assert not routers[0].expert_bias.any() and routers[1].expert_bias.any()


def test_counts_above_two_to_the_24_are_exact():
    _, balancer, routers = build()
    big = 2**24
    # float32 cannot tell 2**24 and 2**24 + 1 apart, nor the mean from either
    counts = torch.full((8,), big)
    counts[0] += 1
    routers[0].tokens_per_expert.copy_(counts)
    balancer.accumulate()
    assert torch.equal(balancer.step(TRUE)[0], counts)
    assert routers[0].expert_bias.sign().tolist() == [-1, 1, 1, 1, 1, 1, 1, 1]


def test_micro_batches_and_the_biases_of_steps_add_up():
    _, balancer, routers = build(rate=0.5)
    for _ in range(3):
        for _ in range(2):
            routers[0].tokens_per_expert.copy_(torch.tensor([8, 0, 4, 4, 4, 4, 4, 4]))
            balancer.accumulate()
        assert balancer.step(TRUE)[0].tolist() == [16, 0, 8, 8, 8, 8, 8, 8]
    assert routers[0].expert_bias.tolist() == [-1.5, 1.5, 0, 0, 0, 0, 0, 0]
    assert not balancer.step(TRUE).any(), "a step starts anew"


@pytest.mark.parametrize("finite", [TRUE, FALSE])
def test_rate_zero_or_a_skipped_step_leaves_the_bias(finite):
    _, balancer, routers = build(rate=0.0 if finite else 0.01)
    routers[0].expert_bias.fill_(0.25)
    routers[0].tokens_per_expert.copy_(torch.arange(8))
    balancer.accumulate()
    assert torch.equal(balancer.step(finite)[0], torch.arange(8))
    assert torch.equal(routers[0].expert_bias, torch.full((8,), 0.25))
    assert balancer.counts.count_nonzero() == 0
